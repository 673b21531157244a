"""Decode attention of one query token per row over the slots that it may see.

The tokens of a (row, KV head) are counted through three segments, [outliers | chosen chunks | recent window],
and every token number is turned into a slot by arithmetic and, for chosen chunks, one entry of the list that
selection left. A program takes a run of token numbers; several runs of one (row, KV head) are merged by a second
kernel. Dense attention is the case without outliers and chosen chunks, whose window begins at slot 0.

Notes on the design:
- A token's key is one row of D elements, so whatever the order of the slots, loads are 16-byte vectors over whole
  128-byte lines. Working out a slot costs some ten integer instructions per 16 bytes, an order of magnitude below
  what an SM can issue in the time in which its share of the memory delivers them; so one loop serves all segments,
  and the load pipeline is filled once per program, not once per segment.
- The slots of a block are found one block ahead. Left to Triton, the list's entry and the key that hangs on it
  share the stages of the pipeline, which took 7 stages and 210 registers for what 4 stages and 112 do now.
- The G queries of a KV head share one read of its keys and values, padded to the 16 rows of the smallest tensor
  core tile. The padding computes nothing that anybody waits for: 2 x 16 x D multiplications for 2 D elements read.
- Runs are of equal length within a row, so a long row is spread over all its programs, however short the others
  are; a row that fits in one run is written at once, and the second kernel skips it.
- Three programs share an SM: with a stage more it is two, and 48 rows take 147 us instead of 120. A step of the
  loop takes 1.75 us however few programs run, so what counts is that all run at once: ``ops.splits`` sees to it.
- The merge is a kernel of its own, not the last program's work: it has one program per query head, all splits in
  flight at once, and no counter that a replay would have to find at zero.

Predicted, at 4.3 TB/s, G = 4, D = 128, 16 bits: a token of a KV head is 512 bytes and 4,096 operations (16,384 with
the padding), so 8 to 32 operations per byte against the 190 that the tensor cores could do. Dense, 7 rows of
122,880 tokens: 3.52 GB, 820 us; 1 row of 32,768: 134 MB, 31 us. Sparse, 14 / 28 / 48 rows of 2,500 slots:
143 / 287 / 492 MB, 33 / 67 / 114 us. Partial results are 2 KiB per run, under 1 % from 512 tokens on.
"""

import math
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.errors import ShapeError
from shadowkv.ops.rows import LayerRows, Selection
from shadowkv.ops.splits import MIN_SPLIT_TOKENS, attention_splits
from shadowkv.ops.triton.rows import (
    ELEMENT,
    FIRST,
    OUTLIER_TOKENS,
    RESIDENT_CHUNKS,
    RING_SLOTS,
    RING_START,
    SLOTS,
    TOKENS,
    K,
    V,
    fact,
    tensor_of,
)

BLOCK_BYTES = 16384
"""Keys of one step of the loop; with the values twice that is in flight per stage."""
NUM_WARPS = 4
NUM_STAGES = 3
MERGE_SPLITS = 32
"""Partial results that a merging program has in flight."""
MERGE_WARPS = 4
GROUP_ROWS = 16
"""The least rows of a tensor core tile; the most query heads that share a KV head."""

LOG2_E = 1 / math.log(2)


def attention_scratch(
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_tokens: int,
    *,
    splits: int | None = None,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what :func:`attend` leaves between its kernels; no content is needed or kept.

    Args:
        splits: instead of what :func:`ops.splits.attention_splits` says.
    """
    if splits is None:
        splits = attention_splits(batch, kv_heads, max_tokens)
    lead = (batch, kv_heads, splits, heads // kv_heads)
    return {"partial_BKXGD": ((*lead, head_dim), torch.float32), "softmax_BKXG2": ((*lead, 2), torch.float32)}


def attend(
    rows: LayerRows,
    q_BND: Tensor,
    kv_heads: int,
    chunk_tokens: int,
    selection: Selection | None,
    out_BND: Tensor,
    scratch: Mapping[str, Tensor],
) -> None:
    """Attention of every row's query over its outliers, chosen chunks and recent window, scaled by 1/sqrt(D).

    Shapes: q and out [B, N, D], the last axis contiguous; ``scratch`` as :func:`attention_scratch` says for at
    least B rows, and its third axis is the number of splits.

    Without a selection no chunk is attended. A row that may see nothing gives zeros.

    Raises:
        ShapeError: the query heads do not divide into the KV heads, or more than 16 share one.
    """
    batch, heads, dim = q_BND.shape
    group = heads // kv_heads
    if heads % kv_heads or not 1 <= group <= GROUP_ROWS:
        raise ShapeError(f"{heads} query heads over {kv_heads} KV heads; 1 to {GROUP_ROWS} must share each")
    assert q_BND.stride(2) == out_BND.stride(2) == 1
    partial, softmax = scratch["partial_BKXGD"], scratch["softmax_BKXG2"]
    splits = partial.shape[2]
    assert partial.shape[0] >= batch
    assert partial.shape[3:] == (group, dim)
    assert partial.is_contiguous()
    assert softmax.is_contiguous()
    block_dim = triton.next_power_of_2(dim)
    block_tokens = min(max(BLOCK_BYTES // (block_dim * q_BND.element_size()), 16), 128)
    picks = selection.attend_BKP if selection is not None else rows.facts_BI
    counts = selection.attend_count_BK if selection is not None else rows.facts_BI
    width = selection.attend_BKP.shape[2] if selection is not None else 0
    assert picks.is_contiguous()
    assert counts.is_contiguous()
    shared = {
        "GROUP": group,
        "DIM": dim,
        "CHUNK_TOKENS": chunk_tokens,
        "SELECTED": selection is not None,
        "SPLITS": splits,
        "MIN_SPLIT": MIN_SPLIT_TOKENS,
        "BLOCK_TOKENS": block_tokens,
        "BLOCK_D": block_dim,
    }
    _attend_run[(splits, kv_heads, batch)](
        rows.address_BX,
        rows.facts_BI,
        q_BND,
        picks,
        counts,
        out_BND,
        partial,
        softmax,
        q_BND.stride(0),
        q_BND.stride(1),
        out_BND.stride(0),
        out_BND.stride(1),
        width,
        LOG2_E / math.sqrt(dim),
        **shared,
        ELEMENT=ELEMENT[q_BND.dtype],
        BLOCK_G=GROUP_ROWS,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    if splits > 1:
        _merge_runs[(heads, batch)](
            rows.facts_BI,
            counts,
            out_BND,
            partial,
            softmax,
            out_BND.stride(0),
            out_BND.stride(1),
            **shared,
            BLOCK_SPLITS=min(triton.next_power_of_2(splits), MERGE_SPLITS),
            num_warps=MERGE_WARPS,
        )


@triton.jit
def _segments(
    p_facts,
    p_counts,
    i_row,
    i_head,
    kv_heads,
    CHUNK_TOKENS: tl.constexpr,
    SELECTED: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Tokens of the outliers, tokens up to the end of the chosen chunks, tokens in all, tokens per run."""
    outliers = fact(p_facts, i_row, OUTLIER_TOKENS)
    chosen_end = outliers
    if SELECTED:
        # Nobody counts for padding rows; they have no resident chunks either.
        count = tl.load(p_counts + i_row * kv_heads + i_head)
        count = tl.maximum(tl.minimum(count, fact(p_facts, i_row, RESIDENT_CHUNKS)), 0)
        chosen_end += count * CHUNK_TOKENS
    total = chosen_end + fact(p_facts, i_row, TOKENS) - fact(p_facts, i_row, FIRST)
    run = tl.maximum(tl.cdiv(total, SPLITS), MIN_SPLIT)
    if SPLITS == 1:
        run = total
    run = tl.maximum(tl.cdiv(run, BLOCK_TOKENS), 1) * BLOCK_TOKENS
    return outliers, chosen_end, total, run


@triton.jit
def _slots(
    o_t,
    end,
    p_pick,
    outliers,
    chosen_end,
    ring_base,
    ring_wrap,
    ring_slots,
    CHUNK_TOKENS: tl.constexpr,
    SELECTED: tl.constexpr,
):
    """The slots of token numbers; of numbers from ``end`` on, anything."""
    b_slot = ring_base + tl.where(o_t >= ring_wrap, o_t - ring_slots, o_t)
    if SELECTED:
        o_c = o_t - outliers
        m_c = (o_c >= 0) & (o_t < chosen_end) & (o_t < end)
        b_pick = tl.load(p_pick + o_c // CHUNK_TOKENS, mask=m_c, other=0)
        b_slot = tl.where(m_c, outliers + b_pick * CHUNK_TOKENS + o_c % CHUNK_TOKENS, b_slot)
    return tl.where(o_t < outliers, o_t, b_slot)


@triton.jit
def _attend_run(
    p_address,
    p_facts,
    p_q,
    p_picks,
    p_counts,
    p_out,
    p_partial,
    p_softmax,
    q_row_stride,
    q_head_stride,
    out_row_stride,
    out_head_stride,
    picks_width,
    scale_log2,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    SELECTED: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """One run of one (row, KV head): the result if it is the only one, or its part of it."""
    i_split = tl.program_id(0)
    i_head = tl.program_id(1)
    i_row = tl.program_id(2).to(tl.int64)
    kv_heads = tl.num_programs(1)
    outliers, chosen_end, total, run = _segments(
        p_facts, p_counts, i_row, i_head, kv_heads, CHUNK_TOKENS, SELECTED, SPLITS, MIN_SPLIT, BLOCK_TOKENS
    )
    o_g = tl.arange(0, BLOCK_G)
    o_d = tl.arange(0, BLOCK_D)
    m_gd = (o_g[:, None] < GROUP) & (o_d[None, :] < DIM)
    o_heads = (i_head * GROUP + o_g).to(tl.int64)[:, None]
    # Asked for before the first branch, so that what a program waits for at its start it waits for once.
    b_q = tl.load(p_q + i_row * q_row_stride + o_heads * q_head_stride + o_d[None, :], mask=m_gd, other=0.0)
    head_offset = i_head.to(tl.int64) * fact(p_facts, i_row, SLOTS) * DIM
    p_k = tensor_of(p_address, i_row, K, ELEMENT) + head_offset
    p_v = tensor_of(p_address, i_row, V, ELEMENT) + head_offset
    p_pick = p_picks + (i_row * kv_heads + i_head) * picks_width
    ring_slots = tl.maximum(fact(p_facts, i_row, RING_SLOTS), 1)
    # At most ring_slots positions are recent, so a position wraps at most once from here on.
    ring_first = fact(p_facts, i_row, FIRST) % ring_slots - chosen_end
    ring_base = fact(p_facts, i_row, RING_START) + ring_first
    ring_wrap = ring_slots - ring_first

    p_out_gd = p_out + i_row * out_row_stride + o_heads * out_head_stride + o_d[None, :]
    begin = i_split * run
    end = tl.minimum(begin + run, total)
    if begin >= total:
        if i_split == 0:
            tl.store(p_out_gd, tl.zeros([BLOCK_G, BLOCK_D], dtype=ELEMENT), mask=m_gd)
        return

    b_max = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_G], dtype=tl.float32)
    b_acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    o_t = begin + tl.arange(0, BLOCK_TOKENS)
    b_slot = _slots(o_t, end, p_pick, outliers, chosen_end, ring_base, ring_wrap, ring_slots, CHUNK_TOKENS, SELECTED)
    for start in range(begin, end, BLOCK_TOKENS):
        m_t = start + tl.arange(0, BLOCK_TOKENS) < end
        # Masked, not only weighted with 0: memory that nobody wrote may hold NaN.
        m_td = m_t[:, None] & (o_d[None, :] < DIM)
        o_td = b_slot.to(tl.int64)[:, None] * DIM + o_d[None, :]
        b_k = tl.load(p_k + o_td, mask=m_td, other=0.0)
        b_v = tl.load(p_v + o_td, mask=m_td, other=0.0)
        o_t = start + BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        b_slot = _slots(
            o_t, end, p_pick, outliers, chosen_end, ring_base, ring_wrap, ring_slots, CHUNK_TOKENS, SELECTED
        )
        b_score = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale_log2
        b_score = tl.where(m_t[None, :], b_score, float("-inf"))
        b_top = tl.maximum(b_max, tl.max(b_score, 1))
        b_weight = tl.exp2(b_score - b_top[:, None])
        b_fade = tl.exp2(b_max - b_top)
        b_sum = b_sum * b_fade + tl.sum(b_weight, 1)
        b_acc = b_acc * b_fade[:, None]
        b_acc = tl.dot(b_weight.to(ELEMENT), b_v, b_acc, input_precision="ieee")
        b_max = b_top

    if total <= run:
        tl.store(p_out_gd, (b_acc / b_sum[:, None]).to(ELEMENT), mask=m_gd)
    else:
        i_part = ((i_row * kv_heads + i_head) * SPLITS + i_split) * GROUP
        tl.store(p_partial + (i_part + o_g)[:, None] * DIM + o_d[None, :], b_acc, mask=m_gd)
        p_pair = p_softmax + (i_part + o_g) * 2
        tl.store(p_pair, b_max, mask=o_g < GROUP)
        tl.store(p_pair + 1, b_sum, mask=o_g < GROUP)


@triton.jit
def _merge_runs(
    p_facts,
    p_counts,
    p_out,
    p_partial,
    p_softmax,
    out_row_stride,
    out_head_stride,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    SELECTED: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """One query head: the runs' parts, weighted as one softmax."""
    i_query = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    kv_heads = tl.num_programs(0) // GROUP
    i_head = i_query // GROUP
    _, _, total, run = _segments(
        p_facts, p_counts, i_row, i_head, kv_heads, CHUNK_TOKENS, SELECTED, SPLITS, MIN_SPLIT, BLOCK_TOKENS
    )
    if total <= run:
        return
    runs = tl.cdiv(total, run)
    o_d = tl.arange(0, BLOCK_D)
    i_part = (i_row * kv_heads + i_head) * SPLITS
    b_max = float("-inf")
    b_sum = 0.0
    b_acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(0, runs, BLOCK_SPLITS):
        o_x = start + tl.arange(0, BLOCK_SPLITS)
        m_x = o_x < runs
        o_part = (i_part + o_x) * GROUP + i_query % GROUP
        m_xd = m_x[:, None] & (o_d[None, :] < DIM)
        b_part = tl.load(p_partial + o_part[:, None] * DIM + o_d[None, :], mask=m_xd, other=0.0)
        b_part_max = tl.load(p_softmax + o_part * 2, mask=m_x, other=float("-inf"))
        b_part_sum = tl.load(p_softmax + o_part * 2 + 1, mask=m_x, other=0.0)
        b_top = tl.maximum(b_max, tl.max(b_part_max, 0))
        b_weight = tl.exp2(b_part_max - b_top)
        b_fade = tl.exp2(b_max - b_top)
        b_sum = b_sum * b_fade + tl.sum(b_weight * b_part_sum, 0)
        b_acc = b_acc * b_fade + tl.sum(b_weight[:, None] * b_part, 0)
        b_max = b_top
    p_out_d = p_out + i_row * out_row_stride + i_query.to(tl.int64) * out_head_stride + o_d
    tl.store(p_out_d, (b_acc / b_sum).to(p_out.dtype.element_ty), mask=o_d < DIM)
