"""The contract of scoring a table of entries: every chunk's logits, and the softmax over them in parts."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.ops.attention import group_queries
from shadowkv.ops.contract.base import Op, Outputs, Traffic
from shadowkv.ops.contract.rows import RowSpec, Sizes, make_rows
from shadowkv.ops.rows import LayerRows
from shadowkv.ops.select import OUTLIER
from shadowkv.ops.splits import SCORE_SPLIT_CHUNKS, score_splits

PADDING = RowSpec(0, 0, 1, 0, 8)


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

    def reference(self, inputs: ScoreInputs, dtype: torch.dtype) -> Outputs:
        logits, parts = (x.to(torch.float64 if dtype == torch.float64 else torch.float32) for x in self.outputs(inputs))
        logits.fill_(-torch.inf)
        kv_heads, group, dim = inputs.case.sizes.kv_heads, inputs.case.sizes.group, inputs.case.sizes.head_dim
        scale = inputs.case.scale
        for row, spec in enumerate(inputs.case.rows):
            q_KGD = group_queries(inputs.q_BND[row, :, None], kv_heads).to(dtype)
            landmarks_KCD = inputs.tensors[row]["LANDMARKS"][:, : spec.chunks].to(dtype)
            # Matrix by matrix whatever the group: the product with one vector is summed in another order.
            q_KXD = torch.nn.functional.pad(q_KGD, (0, 0, 0, max(16 - group, 0)))
            products_KCX = landmarks_KCD @ q_KXD.mT
            scaled_KCX = products_KCX / math.sqrt(dim) if scale is None else products_KCX * scale
            found_KGC = scaled_KCX.to(logits.dtype).mT[:, :group]
            outlier_KC = inputs.tensors[row]["SLOT_OF_CHUNK"][:, : spec.chunks] == OUTLIER
            outlier_KC &= scale is None
            logits[row, :, :, : spec.chunks] = found_KGC.masked_fill(outlier_KC[:, None], -torch.inf)
        for z, part in enumerate(torch.split(logits, SCORE_SPLIT_CHUNKS, dim=3)):
            parts[..., z, 0] = part.amax(3)
            base = parts[..., z, :1].clamp_min(torch.finfo(torch.float32).min)
            parts[..., z, 1] = torch.exp(part - base).sum(3)
        return {"logits": logits, "parts": parts}

    def traffic(self, case: ScoreCase, dtype: torch.dtype) -> Traffic:
        sizes, chunks = case.sizes, sum(row.chunks for row in case.rows)
        each = sizes.head_dim * dtype.itemsize + 4 * sizes.group + (4 if case.scale is None else 0)
        flops = 2 * sizes.kv_heads * sizes.group * sizes.head_dim * chunks
        return Traffic(sizes.kv_heads * chunks * each, flops=flops)
