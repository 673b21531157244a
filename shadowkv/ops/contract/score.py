"""The contract of scoring a table of entries: every chunk's logits, and the softmax over them in parts."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shadowkv.ops.attention import group_queries
from shadowkv.ops.contract.base import Op, Outputs, Traffic
from shadowkv.ops.contract.bounds import FUNCTION, ROUNDOFF, Bounded, stacked
from shadowkv.ops.contract.faults import LEFT_OUT, ONE_OFF, coarse_product, last_zeroed, values_of
from shadowkv.ops.contract.rows import RowSpec, Sizes, make_rows
from shadowkv.ops.rows import LayerRows
from shadowkv.ops.select import OUTLIER
from shadowkv.ops.splits import SCORE_SPLIT_CHUNKS, score_splits

PADDING = RowSpec(0, 0, 1, 0, 8)
LEAST_TILE = 16
"""Chunks that a kernel takes at a time at least. The sum of a part is scaled anew with each tile, by a power of e."""


@dataclass(frozen=True)
class ScoreCase:
    """Rows that are scored together, and the width of their logits."""

    sizes: Sizes
    rows: tuple[RowSpec, ...]
    spare_width: int = 0
    """Columns of the logits beyond the longest row."""
    scale: float | None = None
    """Of a table of any entries, whose chunks are all scored; None for landmarks, where outliers are left out."""

    @property
    def width(self) -> int:
        return max(row.chunks for row in self.rows) + self.spare_width


@dataclass(frozen=True)
class ScoreInputs:
    """``tensors``: the rows' own, which their tables point into."""

    case: ScoreCase
    tensors: list[dict[str, Tensor]]
    rows: LayerRows
    q_BND: Tensor


def _row(chunks: int, outliers: int = 2) -> RowSpec:
    return RowSpec(chunks, outliers, resident=4, recent_tokens=9, window_slots=16)


class Score(Op[ScoreCase, ScoreInputs]):
    """``ops.triton.score``."""

    name = "score_landmarks"
    source = "arXiv 2410.21465, section 4: the softmax over landmarks; cache.index.Landmarks, ops.select"

    def cases(self) -> list[ScoreCase]:
        ragged = (_row(1, 0), PADDING, _row(300), _row(0, 0), _row(513, 5))
        tables = [
            ScoreCase(Sizes(kv_heads, 4, width, 4, 8), ragged, 3, scale=0.3) for kv_heads, width in ((1, 512), (2, 10))
        ]
        return tables + [
            ScoreCase(Sizes(kv_heads, group, dim, 4, 8), rows, spare)
            for kv_heads, group, dim, rows, spare in (
                (2, 4, 128, (_row(37),), 0),
                (1, 1, 64, (_row(128, 0), _row(2)), 5),
                (1, 16, 80, (_row(130),), 1),
                (3, 3, 96, (_row(20),), 600),
                (1, 7, 256, (_row(66), _row(17)), 0),
                (2, 2, 64, ragged, 3),
            )
        ]

    def bench_cases(self) -> list[ScoreCase]:
        sizes = Sizes(8, 4, 128, 8, 160)
        shapes = ((1, 7_504), (8, 7_504), (8, 15_312), (16, 15_312), (1, 131_008))
        landmarks = [ScoreCase(sizes, (_row(chunks, 48),) * batch) for batch, chunks in shapes]
        # Bounds of pages, and a quarter of every key.
        tables = [
            ScoreCase(Sizes(8, 4, width, 8, 160), (_row(entries, 0),) * 8, scale=128**-0.5)
            for width, entries in ((256, 3_744), (32, 60_000))
        ]
        return landmarks + tables

    def make(self, case: ScoreCase, device: torch.device, dtype: torch.dtype, seed: int = 0) -> ScoreInputs:
        tensors, rows = make_rows(list(case.rows), case.sizes, device, dtype, seed)
        gen = torch.Generator().manual_seed(seed + 1)
        heads = case.sizes.kv_heads * case.sizes.group
        q_BND = torch.randn(len(case.rows), heads, case.sizes.head_dim, generator=gen).to(device, dtype)
        return ScoreInputs(case, tensors, rows, q_BND)

    def run(self, inputs: ScoreInputs) -> Outputs:
        from shadowkv.ops.triton.score import score_landmarks, score_table

        logits, parts = self.outputs(inputs)
        if inputs.case.scale is None:
            score_landmarks(inputs.rows, inputs.q_BND, logits, parts)
        else:
            score_table(inputs.rows, inputs.q_BND, logits, parts, inputs.case.scale)
        # How far beyond a row's chunks its logits are written is the kernel's business.
        for row, spec in enumerate(inputs.case.rows):
            logits[row, :, :, spec.chunks :] = -torch.inf
        return {"logits": logits, "parts": parts}

    def outputs(self, inputs: ScoreInputs) -> tuple[Tensor, Tensor]:
        """Room for logits and parts, poisoned."""
        case, device = inputs.case, inputs.q_BND.device
        shape = (len(case.rows), case.sizes.kv_heads, case.sizes.group)
        logits = torch.full((*shape, case.width), torch.nan, device=device)
        return logits, torch.full((*shape, score_splits(case.width), 2), torch.nan, device=device)

    def reference(self, inputs: ScoreInputs) -> Outputs:
        logits, parts = self.outputs(inputs)
        logits.fill_(-torch.inf)
        for row in range(len(inputs.case.rows)):
            q_KGD, entries_KCD = self._factors(inputs, row)
            chunks, dim = entries_KCD.shape[1:]
            scale = inputs.case.scale or 1 / math.sqrt(dim)
            logits[row, :, :, :chunks] = ((q_KGD @ entries_KCD.mT).float() * scale).masked_fill(
                self._closed(inputs, row), -torch.inf
            )
        for z, part in enumerate(torch.split(logits, SCORE_SPLIT_CHUNKS, dim=3)):
            parts[..., z, 0] = part.amax(3)
            base = parts[..., z, :1].clamp_min(torch.finfo(torch.float32).min)
            parts[..., z, 1] = torch.exp(part - base).sum(3)
        return {"logits": logits, "parts": parts}

    def truth(self, inputs: ScoreInputs) -> dict[str, Bounded]:
        """Products of D terms, scaled; maxima of them; sums of exponentials of up to SCORE_SPLIT_CHUNKS terms."""
        products = []
        for row in range(len(inputs.case.rows)):
            q_KGD, entries_KCD = self._factors(inputs, row)
            products.append(Bounded.exact(q_KGD) @ Bounded.exact(entries_KCD.mT))
        logits = self._logits(inputs, products)
        return {"logits": logits, "parts": _parts(logits)}

    def faults(self, inputs: ScoreInputs) -> dict[str, Outputs]:
        truth = self.truth(inputs)
        beside = [held | {"LANDMARKS": held["LANDMARKS"].clone()} for held in inputs.tensors]
        coarse = []
        for row, spec in enumerate(inputs.case.rows):
            beside[row]["LANDMARKS"][:, : spec.chunks] = beside[row]["LANDMARKS"][:, : spec.chunks].roll(1, 1)
            q_KGD, entries_KCD = self._factors(inputs, row)
            fault, products_KGC = coarse_product(q_KGD, entries_KCD.mT, inputs.q_BND.dtype)
            coarse.append(Bounded.exact(products_KGC))
        fewer_chunks = truth["logits"].moved(torch.Tensor.clone)
        fewer_chunks.value[..., 0] = -torch.inf
        return {
            LEFT_OUT: values_of(self.truth(replace(inputs, q_BND=last_zeroed(inputs.q_BND, 2)))),
            f"{LEFT_OUT}, of the softmax": values_of(truth | {"parts": _parts(fewer_chunks)}),
            ONE_OFF: values_of(self.truth(replace(inputs, tensors=beside))),
            fault: values_of(truth | {"logits": self._logits(inputs, coarse)}),
        }

    def _factors(self, inputs: ScoreInputs, row: int) -> tuple[Tensor, Tensor]:
        """Queries [K, G, D] and entries [K, C, D] of a row."""
        chunks = inputs.case.rows[row].chunks
        q_KGD = group_queries(inputs.q_BND[row, :, None], inputs.case.sizes.kv_heads)
        return q_KGD, inputs.tensors[row]["LANDMARKS"][:, :chunks]

    def _closed(self, inputs: ScoreInputs, row: int) -> Tensor:
        """The chunks [K, 1, C] that get no logit."""
        slot_of_KC = inputs.tensors[row]["SLOT_OF_CHUNK"][:, None, : inputs.case.rows[row].chunks]
        return (slot_of_KC == OUTLIER) & (inputs.case.scale is None)

    def _logits(self, inputs: ScoreInputs, products: list[Bounded]) -> Bounded:
        """[B, K, G, C] from every row's products."""
        found = Bounded.full(tuple(self.outputs(inputs)[0].shape), -torch.inf, inputs.q_BND.device)
        scale = inputs.case.scale or 1 / math.sqrt(inputs.q_BND.shape[2])
        for row, products_KGC in enumerate(products):
            closed = self._closed(inputs, row)
            index = (row, slice(None), slice(None), slice(products_KGC.value.shape[2]))
            found.put(index, (products_KGC * scale).masked_fill(closed, -torch.inf))
        return found

    def traffic(self, case: ScoreCase, dtype: torch.dtype) -> Traffic:
        sizes, chunks = case.sizes, sum(row.chunks for row in case.rows)
        each = sizes.head_dim * dtype.itemsize + 4 * sizes.group + (4 if case.scale is None else 0)
        flops = 2 * sizes.kv_heads * sizes.group * sizes.head_dim * chunks
        return Traffic(sizes.kv_heads * chunks * each, flops=flops)


def _parts(logits: Bounded) -> Bounded:
    """Maximum and sum of exponentials of every part of the chunks, [B, K, G, Z, 2]."""
    found = []
    for start in range(0, logits.value.shape[3], SCORE_SPLIT_CHUNKS):
        part = logits[..., start : start + SCORE_SPLIT_CHUNKS]
        top = part.amax(3, keepdim=True)
        base = Bounded(top.value.clamp_min(torch.finfo(torch.float32).min), top.error)
        rescaled = SCORE_SPLIT_CHUNKS // LEAST_TILE * (FUNCTION + ROUNDOFF)
        total = (part - base).exp().sum(3).loosened(rescaled)
        found.append(stacked([top[..., 0], total], -1))
    return stacked(found, 3)
