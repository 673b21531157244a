"""Contract of decode attention over slots: ``ops.triton.attention``."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from shadowkv.ops.attention import dense_attention
from shadowkv.ops.contract.base import Op, Outputs, Traffic
from shadowkv.ops.contract.bounds import FUNCTION, ROUNDOFF, Bounded
from shadowkv.ops.contract.faults import LEFT_OUT, NARROW_SUM, ONE_OFF, TF32, narrow_sum, tf32_product, values_of
from shadowkv.ops.contract.rows import RowSpec, Sizes, make_rows
from shadowkv.ops.rows import Fact, LayerRows, Selection
from shadowkv.ops.select import EMPTY

POISON = 1 << 30
"""List entries that nobody may follow."""
LEAST_STEP = 16
"""Tokens that a kernel takes at a time at least. Sums are scaled anew with each step, by a power of e, and once more
with each run that is merged; a run is one step at least."""


@dataclass(frozen=True)
class AttentionCase:
    """Rows with or without a selection; ``splits`` None is what the split policy says."""

    label: str
    sizes: Sizes
    rows: tuple[RowSpec, ...]
    selected: bool = True
    splits: int | None = None

    def chosen(self, row: RowSpec, head: int) -> int:
        """Chunks that are attended in a head: fewer in odd ones, never more than are held."""
        held = min(row.resident - (row.resident > 1), row.chunks - row.outliers)
        return max(min(row.select, held) - head % 2, 0) if self.selected else 0

    def attended(self, row: RowSpec, head: int) -> int:
        """Tokens that a head sees."""
        return (row.outliers + self.chosen(row, head)) * self.sizes.chunk_tokens + row.recent_tokens


@dataclass(frozen=True)
class AttentionInputs:
    """``tensors`` are the rows' own, by name; the tables hold their addresses."""

    case: AttentionCase
    tensors: list[dict[str, Tensor]]
    rows: LayerRows
    selection: Selection | None
    q_BND: Tensor


class Attention(Op[AttentionCase, AttentionInputs]):
    """Attention of one query token per row over outliers, chosen chunks and recent window."""

    name = "attention"
    source = "ops.attention.dense_attention over the slots that a row sees; arXiv 2410.21465, algorithm 2"

    def cases(self) -> list[AttentionCase]:
        wide = Sizes(kv_heads=2, group=4, head_dim=64, chunk_tokens=8, rank=16)
        many = (
            RowSpec(chunks=70, outliers=3, resident=60, recent_tokens=37, window_slots=48, select=50),
            RowSpec(chunks=0, outliers=0, resident=0, recent_tokens=700, window_slots=701),
            RowSpec(chunks=0, outliers=0, resident=0, recent_tokens=0, window_slots=8),
            RowSpec(chunks=5, outliers=1, resident=2, recent_tokens=1, window_slots=16, select=1),
            RowSpec(chunks=9, outliers=0, resident=4, recent_tokens=16, window_slots=16, select=0),
        )
        found = [
            AttentionCase("unequal rows, one run", wide, many, splits=1),
            AttentionCase("unequal rows, three runs", wide, many, splits=3),
            AttentionCase("no selection", wide, many, selected=False, splits=2),
        ]
        shapes = ((80, 1, 4, 3), (96, 16, 64, 1), (128, 5, 16, 1), (256, 2, 8, 1), (64, 4, 1, 1))
        for dim, group, chunk, heads in shapes:
            sizes = Sizes(kv_heads=heads, group=group, head_dim=dim, chunk_tokens=chunk, rank=16)
            row = RowSpec(
                chunks=320 // chunk,
                outliers=1,
                resident=256 // chunk + 1,
                recent_tokens=chunk + 5,
                window_slots=max(3 * chunk, 8),
                select=256 // chunk,
            )
            found.append(AttentionCase(f"D {dim}, G {group}, L {chunk}", sizes, (row,), splits=2))
        return found

    def bench_cases(self) -> list[AttentionCase]:
        sizes = Sizes(kv_heads=8, group=4, head_dim=128, chunk_tokens=8, rank=160)
        # The context's length is nothing to this kernel; 64 chunks more than fit are enough of it.
        sparse = RowSpec(chunks=368, outliers=48, resident=256, recent_tokens=68, window_slots=128, select=255)
        found = [
            AttentionCase(f"sparse, {rows} rows of 2,492 slots", sizes, (sparse,) * rows) for rows in (1, 14, 28, 48)
        ]
        for rows, tokens in ((7, 122880), (1, 32768), (1, 122880)):
            dense = RowSpec(chunks=0, outliers=0, resident=0, recent_tokens=tokens, window_slots=tokens)
            found.append(AttentionCase(f"dense, {rows} x {tokens:,} tokens", sizes, (dense,) * rows, selected=False))
        return found

    def make(self, case: AttentionCase, device: torch.device, dtype: torch.dtype, seed: int = 0) -> AttentionInputs:
        tensors, rows = make_rows(list(case.rows), case.sizes, device, dtype, seed)
        gen = torch.Generator().manual_seed(seed + 1)
        kv_heads, batch = case.sizes.kv_heads, len(case.rows)
        width = max(1, *(row.resident for row in case.rows))
        attend = torch.full((batch, kv_heads, width), POISON, dtype=torch.int32)
        # For padding rows nobody counts.
        counts = torch.full((batch, kv_heads), POISON, dtype=torch.int32)
        for i, row in enumerate(case.rows):
            if row.padding:
                continue
            held_KP = tensors[i]["RESIDENT_IDS"].cpu() != EMPTY
            for head in range(kv_heads):
                count = case.chosen(row, head)
                held = held_KP[head].nonzero()[:, 0]
                picked = held[torch.randperm(len(held), generator=gen)[:count]].sort().values
                attend[i, head, :count], counts[i, head] = picked.int(), count
        q_BND = torch.randn(batch, kv_heads * case.sizes.group, case.sizes.head_dim, generator=gen).to(device, dtype)
        selection = None
        if case.selected:
            none = torch.full_like(attend, POISON).to(device)
            fetched = torch.zeros(batch, kv_heads, 2, dtype=torch.int32, device=device)
            selection = Selection(attend.to(device), counts.to(device), none, none, fetched)
        inputs = AttentionInputs(case, tensors, rows, selection, q_BND)
        for i, row in enumerate(case.rows):
            if row.padding:
                continue
            for head in range(kv_heads):
                hidden = torch.ones(tensors[i]["K"].shape[1], dtype=torch.bool, device=device)
                hidden[_slots(inputs, i, head)] = False
                for name in ("K", "V"):
                    tensors[i][name][head].masked_fill_(hidden[:, None], torch.nan)
        return inputs

    def run(self, inputs: AttentionInputs) -> Outputs:
        launch, out_BND = _prepared(inputs)
        launch()
        return {"out": out_BND}

    def launch(self, inputs: AttentionInputs) -> Callable[[], object]:
        return _prepared(inputs)[0]

    def reference(self, inputs: AttentionInputs) -> Outputs:
        out_BND = torch.zeros_like(inputs.q_BND)
        for index, q_GD, k_SD, v_SD in _heads(inputs):
            out_BND[index] = dense_attention(q_GD[:, None], k_SD[None], v_SD[None])[:, 0]
        return {"out": out_BND}

    def truth(self, inputs: AttentionInputs) -> dict[str, Bounded]:
        """Scores of D terms; a softmax whose weights are rounded to the storage dtype before they meet the values."""
        out = Bounded.full(tuple(inputs.q_BND.shape), 0.0, inputs.q_BND.device)
        for index, q_GD, k_SD, v_SD in _heads(inputs):
            out.put(index, attended(Bounded.exact(q_GD), Bounded.exact(k_SD), Bounded.exact(v_SD), inputs.q_BND.dtype))
        return {"out": out}

    def faults(self, inputs: AttentionInputs) -> dict[str, Outputs]:
        facts_BI = inputs.rows.facts_BI.clone()
        facts_BI[:, Fact.FIRST] += (facts_BI[:, Fact.TOKENS] - facts_BI[:, Fact.FIRST] > 1).int()
        found = {
            LEFT_OUT: values_of(self.truth(replace(inputs, rows=replace(inputs.rows, facts_BI=facts_BI)))),
            TF32 if inputs.q_BND.dtype == torch.float32 else NARROW_SUM: {"out": _coarse(inputs)},
        }
        if inputs.selection is not None:
            count_BK = inputs.selection.attend_count_BK
            fewer = replace(inputs.selection, attend_count_BK=count_BK - (count_BK > 0).int())
            found[ONE_OFF] = values_of(self.truth(replace(inputs, selection=fewer)))
        return found

    def traffic(self, case: AttentionCase, dtype: torch.dtype) -> Traffic:
        heads, dim = range(case.sizes.kv_heads), case.sizes.head_dim
        tokens = sum(case.attended(row, head) for row in case.rows for head in heads)
        queries = len(case.rows) * len(heads) * case.sizes.group
        return Traffic(
            device_bytes=(2 * tokens + 2 * queries) * dim * dtype.itemsize,
            flops=4 * tokens * case.sizes.group * dim,
        )


def attended(q_GD: Bounded, k_SD: Bounded, v_SD: Bounded, dtype: torch.dtype) -> Bounded:
    """Attention of G queries over S tokens, [G, D], as kernels with a running softmax have it."""
    score_GS = (q_GD @ k_SD.moved(torch.t)) * (1 / math.sqrt(q_GD.value.shape[1]))
    weight_GS = (score_GS - score_GS.amax(1, keepdim=True)).exp()
    rescaled = 2 * (1 + k_SD.value.shape[0] // LEAST_STEP) * (FUNCTION + ROUNDOFF)
    total_G1 = weight_GS.sum(1, keepdim=True).loosened(rescaled)
    sums_GD = (weight_GS.rounded(dtype) @ v_SD).loosened(rescaled)
    return (sums_GD / total_G1).rounded(dtype)


def _coarse(inputs: AttentionInputs) -> Tensor:
    """Sums over the tokens in the storage dtype, or scores by TF32."""
    dtype = inputs.q_BND.dtype
    out_BND = torch.zeros_like(inputs.q_BND, dtype=torch.float64)
    for index, q_GD, k_SD, v_SD in _heads(inputs):
        score_GS = tf32_product(q_GD, k_SD.mT) if dtype == torch.float32 else q_GD.double() @ k_SD.double().mT
        score_GS /= math.sqrt(q_GD.shape[1])
        weight_GS1 = torch.exp(score_GS - score_GS.amax(1, keepdim=True))[..., None]
        if dtype == torch.float32:
            out_BND[index] = (weight_GS1 * v_SD).sum(1) / weight_GS1.sum(1)
        else:
            out_BND[index] = narrow_sum(weight_GS1 * v_SD, 1, dtype) / narrow_sum(weight_GS1, 1, dtype)
    return out_BND


def _heads(inputs: AttentionInputs) -> Iterator[tuple[tuple[int, slice], Tensor, Tensor, Tensor]]:
    """Every KV head of a row that sees something: its place in the result, queries [G, D], keys and values [S, D]."""
    group = inputs.case.sizes.group
    for i, row in enumerate(inputs.case.rows):
        for head in range(inputs.case.sizes.kv_heads if not row.padding else 0):
            slots = _slots(inputs, i, head)
            if len(slots):
                index = (i, slice(head * group, (head + 1) * group))
                k_SD, v_SD = (inputs.tensors[i][name][head, slots] for name in ("K", "V"))
                yield index, inputs.q_BND[index], k_SD, v_SD


def _slots(inputs: AttentionInputs, i: int, head: int) -> Tensor:
    """The slots that a KV head of a row sees, in the kernel's order (int64)."""
    facts = inputs.rows.facts_BI[i].tolist()
    device, size = inputs.q_BND.device, inputs.case.sizes.chunk_tokens
    outliers, ring = facts[Fact.OUTLIER_TOKENS], facts[Fact.RING_SLOTS]
    found = [torch.arange(outliers, device=device)]
    if inputs.selection is not None:
        count = int(inputs.selection.attend_count_BK[i, head])
        chosen_P = inputs.selection.attend_BKP[i, head, :count].long()
        found.append((outliers + chosen_P[:, None] * size + torch.arange(size, device=device)).flatten())
    recent = torch.arange(facts[Fact.FIRST], facts[Fact.TOKENS], device=device)
    return torch.cat([*found, facts[Fact.RING_START] + recent % ring])


def _prepared(inputs: AttentionInputs) -> tuple[Callable[[], object], Tensor]:
    """The kernels' launch, with poisoned scratch, and what it writes."""
    from shadowkv.ops.triton.attention import attend, attention_scratch

    case, q_BND = inputs.case, inputs.q_BND
    sizes, (batch, heads, dim) = case.sizes, q_BND.shape
    longest = max(case.attended(row, 0) for row in case.rows)
    scratch = {
        name: torch.full(shape, torch.nan, dtype=dtype, device=q_BND.device)
        for name, (shape, dtype) in attention_scratch(
            batch, heads, sizes.kv_heads, dim, longest, splits=case.splits
        ).items()
    }
    out_BND = torch.full_like(q_BND, torch.nan)
    args = (inputs.rows, q_BND, sizes.kv_heads, sizes.chunk_tokens, inputs.selection, out_BND, scratch)
    return partial(attend, *args), out_BND
