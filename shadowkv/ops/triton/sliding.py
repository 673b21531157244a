"""Overwrites a step's logits with those of ``ops.sliding``, after the real scores have been made.

Design: elementwise, one program per block of chunks, KV head and row; -inf (outliers) stays, since what may be
selected is not ours to change. The number of the step is a fact of the row, so a captured step can be replayed.
Only the first query head of a group is given them. The log-sum-exps by split are set to 0 for it, so that a score is
the logit itself, and to OUT_OF_REACH for the others, whose logits then never are the group's maximum.

Predicted: reads and writes a quarter of the float32 logits (G = 4): for 14 rows of 15,616 chunks 14 MB, 4 us. It is
extra work of the benchmark and counts in its step, not in a model's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.sliding import LOGIT_STEPS, OUT_OF_REACH, SHARES, Circle
from shadowkv.ops.triton.rows import CHUNKS, STEP, fact

BLOCK_CHUNKS = 1024
NUM_WARPS = 4

_LOGIT_STEPS = tl.constexpr(float(LOGIT_STEPS))
_SHARES = tl.constexpr(SHARES)
_OUT_OF_REACH = tl.constexpr(OUT_OF_REACH)


@triton.jit
def _overwrite_logits(
    p_logits,
    p_parts,
    p_facts,
    new_per_1024,
    places,
    stride,
    capacity,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    chunks = fact(p_facts, row, CHUNKS)
    if i_block * BLOCK_C < chunks:
        step = fact(p_facts, row, STEP).to(tl.int64)
        moved = step * new_per_1024 * places // (chunks.to(tl.int64) * _SHARES)
        o_chunk = i_block * BLOCK_C + tl.arange(0, BLOCK_C)
        m_chunk = o_chunk < chunks
        # int32 may overflow: places is a power of two, and what is asked for is a remainder by it.
        place = (o_chunk + head * (places // 4 + 1)) * stride
        distance = (place + (moved & (places - 1)).to(tl.int32)) & (places - 1)
        logit = -distance.to(tl.float32) / _LOGIT_STEPS
        pair = row.to(tl.int64) * KV_HEADS + head
        at = pair * GROUP * capacity + o_chunk
        old = tl.load(p_logits + at, mask=m_chunk, other=float("-inf"))
        tl.store(p_logits + at, logit, mask=m_chunk & (old > float("-inf")))
        if i_block == 0:
            o_split = tl.arange(0, BLOCK_Z)
            m_split = o_split < splits
            total = tl.where(o_split == 0, 1.0, 0.0)
            for i_query in tl.static_range(GROUP):
                top = tl.where(o_split == 0, 0.0 if i_query == 0 else _OUT_OF_REACH, float("-inf"))
                p_pair = p_parts + ((pair * GROUP + i_query) * splits + o_split) * 2
                tl.store(p_pair, top, mask=m_split)
                tl.store(p_pair + 1, total, mask=m_split)


def overwrite_logits(logits_BKGC: Tensor, parts_BKGZ2: Tensor, facts_BI: Tensor, new_per_1024: int) -> None:
    """Put the scores of :func:`shadowkv.ops.sliding.sliding_logits` where there are finite logits, in place.

    Shapes: logits [B, K, G, C], parts [B, K, G, Z, 2], both float32 and contiguous; facts of ``ops.rows``.
    Rows without chunks, and entries beyond a row's chunks, are left as they are.
    """
    assert all(x.is_contiguous() for x in (logits_BKGC, parts_BKGZ2, facts_BI)), "tensors must be contiguous"
    assert logits_BKGC.dtype == parts_BKGZ2.dtype == torch.float32
    rows, kv_heads, group, capacity = logits_BKGC.shape
    splits = parts_BKGZ2.shape[3]
    circle = Circle.of(capacity)
    _overwrite_logits[(triton.cdiv(capacity, BLOCK_CHUNKS), kv_heads, rows)](
        logits_BKGC,
        parts_BKGZ2,
        facts_BI,
        new_per_1024,
        circle.places,
        circle.stride,
        capacity,
        splits,
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_Z=triton.next_power_of_2(splits),
        BLOCK_C=BLOCK_CHUNKS,
        num_warps=NUM_WARPS,
    )
