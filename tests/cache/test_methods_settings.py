"""Settings of the methods that select: wrong ones are refused in words, and a config describes itself."""

import pytest

from shadowkv.config import InfiniGenConfig, LokiConfig, OracleConfig, QuestConfig, RandomConfig, SelectionConfig
from shadowkv.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: QuestConfig(page_tokens=0), "page_tokens is 0"),
        (lambda: LokiConfig(score_dims=0), "score_dims is 0"),
        (lambda: InfiniGenConfig(dense_layers=0), "dense_layers is 0"),
        (lambda: InfiniGenConfig(skew_queries=0), "skew_queries is 0"),
        (lambda: InfiniGenConfig(partial_ratio=0.0), "partial_ratio is 0.0"),
        (lambda: InfiniGenConfig(partial_ratio=1.1), "partial_ratio is 1.1"),
        (lambda: InfiniGenConfig(alpha=0.0), "alpha is 0.0"),
        (lambda: InfiniGenConfig(alpha=float("nan")), "alpha is nan"),
        (lambda: SelectionConfig(outlier_chunks=1, sink_tokens=9), "outlier_chunks is 1"),
        (lambda: OracleConfig(chunk_tokens=0), "chunk_tokens is 0"),
        (lambda: RandomConfig(selection_seed=-1), "selection_seed is -1"),
        (lambda: QuestConfig(value_store="disk"), "value_store is 'disk'; allowed: host, device"),
        (lambda: LokiConfig(budget_tokens=0), "budget_tokens is 0"),
        (lambda: OracleConfig(recent_tokens=-1), "recent_tokens is -1"),
    ],
)
def test_wrong_settings_are_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_config_describes_itself():
    assert QuestConfig(page_tokens=8).describe() == "quest(page_tokens=8)"
    assert LokiConfig().describe() == "loki()"
