"""Small settings of the methods that ShadowKV is compared with: 40 tokens fit, 90 do not."""

from shadowkv.config import (
    InfiniGenConfig,
    LokiConfig,
    OracleConfig,
    QuestConfig,
    RandomConfig,
    SelectionConfig,
    SnapKVConfig,
    StreamingConfig,
)

SHARED = {"budget_tokens": 16, "sink_tokens": 4, "recent_tokens": 24}
BASELINES = {
    "selection": SelectionConfig(**SHARED, chunk_tokens=4, outlier_chunks=2),
    "quest": QuestConfig(**SHARED, page_tokens=4, dense_layers=0),
    "quest-host": QuestConfig(**SHARED, page_tokens=4, dense_layers=1, value_store="host", query_block_tokens=5),
    "loki": LokiConfig(**SHARED),
    "infinigen": InfiniGenConfig(**SHARED, skew_queries=6),
    "oracle": OracleConfig(**SHARED, chunk_tokens=4),
    "random-host": RandomConfig(**SHARED, chunk_tokens=4, selection_seed=7, value_store="host"),
    "snapkv": SnapKVConfig(budget_tokens=40, window_tokens=8, pool_tokens=3, generated_tokens=256),
    "streaming": StreamingConfig(budget_tokens=40, query_block_tokens=8),
}
"""By name, for the tests that every method passes."""
