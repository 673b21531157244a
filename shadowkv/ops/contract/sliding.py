"""The contract of logits that are overwritten for benchmarks."""

import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shadowkv.ops.contract.base import Op, Outputs, Traffic
from shadowkv.ops.contract.faults import LEFT_OUT, ONE_OFF
from shadowkv.ops.rows import Fact
from shadowkv.ops.sliding import OUT_OF_REACH, Circle, new_chunks, sliding_logits


@dataclass(frozen=True)
class SlidingCase:
    """Chunks of each row (0 is padding), and what the selection is to be."""

    chunks: tuple[int, ...]
    kv_heads: int
    group: int
    capacity: int
    splits: int
    select: int
    hit_rate: float
    step: int = 7


@dataclass(frozen=True)
class SlidingInputs:
    """Logits and partial sums as scoring leaves them."""

    case: SlidingCase
    logits_BKGC: Tensor
    parts_BKGZ2: Tensor
    facts_BI: Tensor


class OverwriteLogits(Op[SlidingCase, SlidingInputs]):
    """Logits of a known hit rate."""

    name = "overwrite_logits"
    source = "ops.sliding"
    exact: ClassVar[frozenset[str]] = frozenset({"logits", "parts"})

    def cases(self) -> list[SlidingCase]:
        return [
            SlidingCase((40, 0, 64, 1), 2, 3, 64, 3, 8, 0.6),
            SlidingCase((1500, 1025), 1, 1, 1500, 1, 100, 0.0, step=100_000),
            SlidingCase((5,), 3, 4, 9, 2, 5, 1.0),
        ]

    def bench_cases(self) -> list[SlidingCase]:
        return [SlidingCase((15616,) * 14, 8, 4, 15872, 31, 256, 0.6)]

    def make(self, case: SlidingCase, device: torch.device, dtype: torch.dtype, seed: int = 0) -> SlidingInputs:
        gen = torch.Generator().manual_seed(seed)
        shape = (len(case.chunks), case.kv_heads, case.group)
        logits_BKGC = torch.randn(*shape, case.capacity, generator=gen)
        logits_BKGC[:, :, :, ::7] = -torch.inf  # outliers
        facts_BI = torch.zeros(len(case.chunks), len(Fact), dtype=torch.int32)
        for row, chunks in enumerate(case.chunks):
            facts_BI[row, Fact.CHUNKS], facts_BI[row, Fact.STEP] = chunks, case.step
        parts_BKGZ2 = torch.randn(*shape, case.splits, 2, generator=gen)
        return SlidingInputs(case, logits_BKGC.to(device), parts_BKGZ2.to(device), facts_BI.to(device))

    def run(self, inputs: SlidingInputs) -> Outputs:
        from shadowkv.ops.triton.sliding import overwrite_logits

        new = new_chunks(inputs.case.select, inputs.case.hit_rate)
        overwrite_logits(inputs.logits_BKGC, inputs.parts_BKGZ2, inputs.facts_BI, new)
        return {"logits": inputs.logits_BKGC, "parts": inputs.parts_BKGZ2}

    def reference(self, inputs: SlidingInputs) -> Outputs:
        case, logits_BKGC, parts_BKGZ2 = inputs.case, inputs.logits_BKGC, inputs.parts_BKGZ2
        new, circle = new_chunks(case.select, case.hit_rate), Circle.of(case.capacity)
        for row, chunks in enumerate(case.chunks):
            if not chunks:
                continue
            made_KC = sliding_logits(circle, case.kv_heads, chunks, case.step, new, logits_BKGC.device)
            own_KC = logits_BKGC[row, :, 0, :chunks]
            own_KC.copy_(torch.where(own_KC.isfinite(), made_KC, own_KC))
            parts_BKGZ2[row, ..., 0], parts_BKGZ2[row, ..., 1] = -torch.inf, 0
            parts_BKGZ2[row, :, :, 0, 0], parts_BKGZ2[row, :, :, 0, 1] = OUT_OF_REACH, 1
            parts_BKGZ2[row, :, 0, 0, 0] = 0
        return {"logits": logits_BKGC, "parts": parts_BKGZ2}

    def faults(self, inputs: SlidingInputs) -> dict[str, Outputs]:
        case = inputs.case
        fewer = replace(case, chunks=tuple(max(chunks - 1, 0) for chunks in case.chunks))
        short = self.reference(replace(copy.deepcopy(inputs), case=fewer))
        beside = self.reference(copy.deepcopy(inputs))
        return {LEFT_OUT: short, ONE_OFF: beside | {"logits": beside["logits"].roll(1, 3)}}

    def traffic(self, case: SlidingCase, dtype: torch.dtype) -> Traffic:
        return Traffic(8 * sum(case.chunks) * case.kv_heads)
