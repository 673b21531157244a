"""An index with a hit rate that was asked for, by its kernel. The plain one is tested through whole steps."""

import pytest
import torch
from torch import Tensor

from shadowkv.bench.trace_index import TraceIndex
from shadowkv.cache.index import Landmarks
from shadowkv.ops.rows import Address, Fact, LayerRows
from shadowkv.ops.sliding import Circle, new_chunks, sliding_logits

pytest.importorskip("triton")


class Scored(Landmarks):
    """Leaves random logits and an outlier, without landmarks."""

    def score(self, rows: LayerRows, q_BND: Tensor, logits_BKGC: Tensor, parts_BKGZ2: Tensor) -> None:
        logits_BKGC.normal_()
        logits_BKGC[..., 3] = -torch.inf


def test_logits_follow_the_step_in_the_facts(device: torch.device) -> None:
    index = TraceIndex(Scored(), hit_rate=0.5, select=10)
    facts = torch.zeros(1, len(Fact), dtype=torch.int32, device=device)
    facts[0, Fact.CHUNKS] = 60
    rows = LayerRows(torch.zeros(1, len(Address), dtype=torch.int64, device=device), facts)
    logits = torch.empty(1, 2, 3, 64, device=device)
    parts = torch.empty(1, 2, 3, 1, 2, device=device)
    before: Tensor | None = None
    for step in (4, 5):
        facts[0, Fact.STEP] = step
        index.score(rows, torch.empty(1, 6, 8, device=device), logits, parts)
        made_KC = sliding_logits(Circle.of(64), 2, 60, step, new_chunks(10, 0.5), device)
        made_KC[:, 3] = -torch.inf
        assert torch.equal(logits[0, :, 0, :60], made_KC)
        assert before is None or not torch.equal(before, made_KC)
        before = made_KC
    assert parts[0, 0, 0].tolist() == [[0.0, 1.0]]
