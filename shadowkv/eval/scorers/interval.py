"""Scores of many samples as one number, and how sure it is."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.errors import RequestError

RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """A mean with the bounds of its interval."""

    mean: float
    low: float
    high: float


def percent(scores: Sequence[float]) -> float:
    """The mean in percent with two decimals, as RULER and LongBench give it.

    Raises:
        RequestError: there are no scores.
    """
    if not scores:
        raise RequestError("there are no scores to take the mean of")
    return round(100 * sum(scores) / len(scores), 2)


def nulls(predictions: Sequence[str]) -> int:
    """Number of empty predictions, as RULER reports it."""
    return sum(not prediction.strip() for prediction in predictions)


def mean_interval(
    scores: Sequence[float],
    *,
    groups: Sequence[Hashable] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    confidence: float = 0.95,
) -> Interval:
    """Percentile bootstrap of a mean.

    Args:
        groups: samples of one group, such as the questions of one context, are drawn together.

    Raises:
        RequestError: there are no scores, or not as many groups.
    """
    if not scores:
        raise RequestError("there are no scores to take the mean of")
    if groups is not None and len(groups) != len(scores):
        raise RequestError(f"{len(scores)} scores have {len(groups)} groups; give one for each")
    places: dict[Hashable, int] = {}
    for group in groups if groups is not None else range(len(scores)):
        places.setdefault(group, len(places))
    member = torch.tensor([places[group] for group in (groups if groups is not None else range(len(scores)))])
    values = torch.tensor(scores, dtype=torch.float64)
    sums = torch.zeros(len(places), dtype=torch.float64).index_add_(0, member, values)
    counts = torch.zeros(len(places), dtype=torch.float64).index_add_(0, member, torch.ones_like(values))
    picks = _picks(len(places), resamples, seed)
    means = (sums[picks].sum(1) / counts[picks].sum(1)).sort().values
    tail = (1 - confidence) / 2
    low, high = (float(torch.quantile(means, q)) for q in (tail, 1 - tail))
    return Interval(float(values.mean()), low, high)


def paired_interval(
    scores: Sequence[float],
    baseline: Sequence[float],
    *,
    groups: Sequence[Hashable] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    confidence: float = 0.95,
) -> Interval:
    """Mean of ``scores - baseline`` over the same samples, with its bootstrap interval.

    A difference whose interval holds 0 is none.

    Raises:
        RequestError: not the same number of scores, or none.
    """
    if len(scores) != len(baseline):
        raise RequestError(f"{len(scores)} scores cannot be paired with {len(baseline)}; give the same samples")
    differences = [one - other for one, other in zip(scores, baseline, strict=True)]
    return mean_interval(differences, groups=groups, resamples=resamples, seed=seed, confidence=confidence)


def _picks(count: int, resamples: int, seed: int) -> Tensor:
    return torch.randint(count, (resamples, count), generator=torch.Generator().manual_seed(seed))
