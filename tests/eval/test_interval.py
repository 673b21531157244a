"""Intervals against a computation without shortcuts."""

import random
import statistics

import pytest
import torch

from shadowkv.errors import RequestError
from shadowkv.eval.sample import Sample
from shadowkv.eval.scorers.interval import mean_interval, nulls, paired_interval, percent
from shadowkv.eval.scorers.tables import by_fact, by_turn, effective_length, weighted_average


def naive(scores: list[float], baseline: list[float], resamples: int, seed: int) -> tuple[float, float, float]:
    """The same draws, one after the other in plain Python."""
    count = len(scores)
    draws = torch.randint(count, (resamples, count), generator=torch.Generator().manual_seed(seed)).tolist()
    means = sorted(sum(scores[i] - baseline[i] for i in draw) / count for draw in draws)
    mean = sum(one - other for one, other in zip(scores, baseline, strict=True)) / count

    def quantile(share: float) -> float:
        place = share * (resamples - 1)
        low = int(place)
        high = min(low + 1, resamples - 1)
        return means[low] + (place - low) * (means[high] - means[low])

    return mean, quantile(0.025), quantile(0.975)


@pytest.mark.parametrize("seed", [0, 7])
def test_paired_interval_is_the_naive_one(seed: int) -> None:
    rng = random.Random(seed)
    baseline = [float(rng.random() < 0.9) for _ in range(40)]
    scores = [float(rng.random() < 0.6) for _ in range(40)]
    found = paired_interval(scores, baseline, resamples=500, seed=seed)
    assert (found.mean, found.low, found.high) == pytest.approx(naive(scores, baseline, 500, seed))
    assert found == paired_interval(scores, baseline, resamples=500, seed=seed)


def test_the_interval_is_about_two_standard_errors() -> None:
    rng = random.Random(1)
    scores = [rng.gauss(0, 1) for _ in range(400)]
    found = mean_interval(scores)
    error = statistics.stdev(scores) / 20
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.06)


def test_equal_scores_have_no_width() -> None:
    found = paired_interval([1, 0, 1], [1, 0, 1])
    assert (found.mean, found.low, found.high) == (0, 0, 0)


def test_questions_of_one_context_are_drawn_together() -> None:
    """Ten copies of a score are no more evidence than one."""
    rng = random.Random(2)
    singles = [rng.random() for _ in range(30)]
    copied = [score for score in singles for _ in range(10)]
    groups = [f"context {place}" for place in range(30) for _ in range(10)]
    alone, together = mean_interval(singles), mean_interval(copied, groups=groups)
    assert (together.mean, together.low, together.high) == pytest.approx((alone.mean, alone.low, alone.high))
    assert mean_interval(copied).high < together.high


def test_groups_of_different_sizes_weigh_by_their_samples() -> None:
    found = mean_interval([1, 1, 1, 0], groups=["a", "a", "a", "b"], resamples=400)
    assert (found.mean, found.low, found.high) == (0.75, 0, 1)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(RequestError, match="cannot be paired"):
        paired_interval([1], [1, 0])
    for empty in (lambda: paired_interval([], []), lambda: mean_interval([]), lambda: percent([])):
        with pytest.raises(RequestError, match="no scores"):
            empty()
    with pytest.raises(RequestError, match="2 scores have 1 groups"):
        mean_interval([1, 0], groups=["a"])


def test_percent_and_nulls() -> None:
    assert percent([1, 0, 1]) == 66.67
    assert nulls(["", " \n", "x"]) == 2


def asked(turn: int | None, bucket: str) -> Sample:
    return Sample("t", 0, "c", "q", "", ("a",), 1, "string_match_all", turn=turn, facts={"bucket": bucket})


def test_scores_by_turn_and_by_fact() -> None:
    samples = [asked(1, "b"), asked(0, "a"), asked(1, "b"), asked(None, "a")]
    assert by_turn(samples, [1, 1, 0, 0]) == {0: 100, 1: 50}
    assert by_fact(samples, [1, 1, 0, 0], "bucket") == {"b": 50, "a": 50}
    with pytest.raises(RequestError, match="no fact 'depth'"):
        by_fact(samples, [1, 1, 0, 0], "depth")
    with pytest.raises(RequestError, match="4 samples have 1 scores"):
        by_turn(samples, [1])


def test_averages_over_lengths() -> None:
    percents = {8192: 90.0, 4096: 96.0, 16384: 60.0}
    assert weighted_average(percents, increasing=True) == pytest.approx((96 + 2 * 90 + 3 * 60) / 6)
    assert weighted_average(percents, increasing=False) == pytest.approx((3 * 96 + 2 * 90 + 60) / 6)
    assert effective_length(percents) == 8192
    assert effective_length({4096: 80.0, 8192: 99.0}) is None
    with pytest.raises(RequestError, match="no lengths"):
        weighted_average({}, increasing=True)
