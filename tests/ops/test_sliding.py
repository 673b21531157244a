"""Selections that change by a known share from step to step."""

import pytest
import torch

from shadowkv.ops.select import top_chunks
from shadowkv.ops.sliding import Circle, new_chunks, sliding_logits


@pytest.mark.parametrize("chunks", [300, 1000, 1024])
@pytest.mark.parametrize("hit_rate", [0.0, 0.6, 0.8, 1.0])
def test_the_share_that_stays_selected(chunks: int, hit_rate: float) -> None:
    select, heads, steps = 64, 2, 12
    circle, new = Circle.of(chunks), new_chunks(select, hit_rate)
    before: torch.Tensor | None = None
    kept = []
    for step in range(5, 5 + steps):
        logits_KC = sliding_logits(circle, heads, chunks, step, new, torch.device("cpu"))
        chosen_KC = torch.zeros(heads, chunks, dtype=torch.bool).scatter_(1, top_chunks(logits_KC, select), True)
        if before is not None:
            kept.append((chosen_KC & before).sum() / before.sum())
        before = chosen_KC
    assert sum(kept) / len(kept) == pytest.approx(hit_rate, abs=0.03)


def test_no_two_logits_of_a_head_are_equal_and_heads_differ() -> None:
    logits_KC = sliding_logits(Circle.of(1000), 4, 1000, 3, new_chunks(100, 0.5), torch.device("cpu"))
    assert all(len(logits_C.unique()) == 1000 for logits_C in logits_KC)
    tops = {tuple(sorted(ids.tolist())) for ids in top_chunks(logits_KC, 50)}
    assert len(tops) == 4


def test_a_circle_has_a_place_for_every_chunk() -> None:
    for capacity in (1, 2, 3, 1024, 1025, 131072):
        circle = Circle.of(capacity)
        assert circle.places >= capacity
        assert circle.stride % 2 == 1
    places = torch.arange(1024) * Circle.of(1024).stride % 1024
    assert len(places.unique()) == 1024
