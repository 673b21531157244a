"""Percentiles."""

import pytest

from shadowkv.bench.statistics import Spread, percentile
from shadowkv.errors import ConfigError


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert percentile([float(i) for i in range(11)], 0.1) == pytest.approx(1.0)
    assert percentile([5.0], 0.9) == 5.0
    assert percentile([1.0, 2.0], 1.0) == 2.0


def test_a_spread() -> None:
    spread = Spread.of([float(i) for i in range(101)])
    assert (spread.median_ms, spread.p10_ms, spread.p90_ms, spread.repetitions) == (50.0, 10.0, 90.0, 101)
    assert spread.text() == "50 (10 to 90)"


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(ConfigError, match="measure at least once"):
        Spread.of([])
