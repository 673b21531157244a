"""Scores brought together as the benchmarks report them: by turn, by any fact of a sample, over lengths."""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from shadowkv.errors import RequestError
from shadowkv.eval.sample import Sample
from shadowkv.eval.scorers.interval import percent

K = TypeVar("K", bound=Hashable)

RULER_THRESHOLD = 85.6
"""The score of Llama-2-7B at 4K, by which RULER calls a length effective."""


def by_turn(samples: Sequence[Sample], scores: Sequence[float]) -> dict[int, float]:
    """Percent for each turn of the dialogues; independent questions are left out.

    Raises:
        RequestError: not as many scores as samples.
    """
    keys = [one.turn for one in samples]
    found = _split([-1 if key is None else key for key in keys], scores)
    return {turn: percent(own) for turn, own in sorted(found.items()) if turn >= 0}


def by_fact(samples: Sequence[Sample], scores: Sequence[float], name: str) -> dict[str | int | float, float]:
    """Percent for each value of a fact, such as LongBench's ``bucket`` or ``difficulty``, or a grid's ``depth``.

    Raises:
        RequestError: not as many scores as samples, or a sample without the fact.
    """
    lacking = [one for one in samples if name not in one.facts]
    if lacking:
        raise RequestError(f"{lacking[0].task}, sample {lacking[0].index}: it has no fact {name!r}")
    return {value: percent(own) for value, own in _split([one.facts[name] for one in samples], scores).items()}


def weighted_average(percents: Mapping[int, float], *, increasing: bool) -> float:
    """Mean over lengths with weights that rise, or fall, by one with each length (RULER's wAvg).

    Raises:
        RequestError: there are no lengths.
    """
    if not percents:
        raise RequestError("there are no lengths to take the average over")
    ordered = sorted(percents, reverse=not increasing)
    weights = range(1, len(ordered) + 1)
    return sum(weight * percents[length] for weight, length in zip(weights, ordered, strict=True)) / sum(weights)


def effective_length(percents: Mapping[int, float], threshold: float = RULER_THRESHOLD) -> int | None:
    """The largest length up to which every measured one is above the threshold; None if not even the first."""
    effective = None
    for length in sorted(percents):
        if percents[length] <= threshold:
            break
        effective = length
    return effective


def _split(keys: Sequence[K], scores: Sequence[float]) -> dict[K, list[float]]:
    if len(keys) != len(scores):
        raise RequestError(f"{len(keys)} samples have {len(scores)} scores; give one for each")
    found: dict[K, list[float]] = {}
    for key, score in zip(keys, scores, strict=True):
        found.setdefault(key, []).append(score)
    return found
