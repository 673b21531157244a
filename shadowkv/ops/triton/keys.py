"""Keys of fetched chunks: coefficients times basis plus mean, rotated to their positions, into their slots.

One program takes a block of tokens of one row's and KV head's fetch list, and strides over the list when it
is longer than the programs it was given: a grid over every possible entry would spend more time on programs
that find nothing to do than on the work (a list holds 8 of 256 possible chunks in a steady state).

The two elements of a rotary pair go into accumulators of their own, so the rotation is register arithmetic
whether pairs are half-split or interleaved; dimensions that are not rotated are a third one. Angles are one
float32 product per pair, as models make them, and cos and sin of it in full precision: at positions near 1M
anything coarser would turn a key visibly away from its neighbours in the window.

Predicted for Llama-3.1-8B (rank 160, 128 wide, chunks of 8), per layer: a chunk reads 2,560 bytes of
coefficients and writes 2,048; a head's basis is 40 KiB, from HBM once and from L2 for each block of tokens.
14 rows x 8 heads x 8 chunks are 4 MB + 4.6 MB of bases (2 us) and 0.3 GFLOP; 48 rows x 8 heads x 77 chunks
are 136 MB (32 us), 9.7 GFLOP (about 25 us on mma of this shape) and 15 M angles (some 20 us): so 5 to 10 us
in a steady state and about 60 us after a change of topic, against 37 us and 1.2 ms for the values' bus.
"""

import torch
import triton
import triton.language as tl

from shadowkv.ops.rope import RopeTable
from shadowkv.ops.rows import LayerRows, Selection
from shadowkv.ops.triton import rows as tr
from shadowkv.ops.triton.angles import cos_sin

BLOCK_TOKENS = 32
"""Tokens per tile, a power of two from 16 on."""
BLOCK_RANK = 32
"""Directions per product: 64 bytes of a coefficient row at a time in 16 bits; divides the usual ranks."""
TARGET_PROGRAMS = 528
"""Four per multiprocessor of an H200: lists are split until there are about so many programs."""
NUM_WARPS = 4
"""With these tiles 128 registers for heads 128 wide, so four programs per SM. Tiles of 64 tokens and 8 warps are two
per SM and 42 us for 14 rows x 8 heads x 77 chunks, instead of 38: what a tile waits for decides."""
NUM_STAGES = 3


@triton.jit
def _partial_dims(p_basis, rank, o_d, o_r, m_dr):
    """[R, D] of a head's basis: rows of memory are dimensions, the product wants them as columns."""
    return tl.load(p_basis + o_d[None, :] * rank + o_r[:, None], mask=m_dr, other=0.0)


@triton.jit
def _listed(p_fetch_chunk, p_fetch_slot, p_rows, list_at, o_m, tokens, L: tl.constexpr):
    """Chunk, slot and RoPE row of these tokens of a fetch list."""
    m_m = o_m < tokens
    chunk = tl.load(p_fetch_chunk + list_at + o_m // L, mask=m_m, other=0)
    slot = tl.load(p_fetch_slot + list_at + o_m // L, mask=m_m, other=0)
    i_rope = tl.load(p_rows + chunk.to(tl.int64) * L + o_m % L, mask=m_m, other=0)
    return chunk, slot, i_rope


@triton.jit
def _rebuild_keys(
    p_address,
    p_facts,
    p_fetch_chunk,
    p_fetch_slot,
    p_fetch_count,
    p_inv_freq,
    p_factor,
    entries,
    rank,
    kv_heads,
    ELEMENT: tl.constexpr,
    LATE: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row, head = tl.program_id(2), tl.program_id(1)
    pair = row * kv_heads + head
    begin = 0
    count = tl.load(p_fetch_count + pair * 2 + (1 if LATE else 0))
    if LATE:
        begin = tl.load(p_fetch_count + pair * 2)
    tokens = count * L
    if tl.program_id(0) * BLOCK_M >= tokens:
        return
    p_coeff = tr.tensor_of(p_address, row, tr.COEFF, ELEMENT)
    p_basis = tr.tensor_of(p_address, row, tr.BASIS, ELEMENT) + head.to(tl.int64) * D * rank
    p_mean = tr.tensor_of(p_address, row, tr.MEAN, tl.float32) + head * D
    p_rows = tr.tensor_of(p_address, row, tr.ROPE_ROWS, tl.int32)
    first_slot = head.to(tl.int64) * tr.fact(p_facts, row, tr.SLOTS) + tr.fact(p_facts, row, tr.OUTLIER_TOKENS)
    p_k = tr.tensor_of(p_address, row, tr.K, ELEMENT) + first_slot * D
    list_at = pair.to(tl.int64) * entries + begin

    o_h = tl.arange(0, BLOCK_HALF)
    m_h = o_h < HALF
    o_a = 2 * o_h if INTERLEAVED else o_h
    o_b = o_a + 1 if INTERLEAVED else o_h + HALF
    mean_a = tl.load(p_mean + o_a, mask=m_h, other=0.0)
    mean_b = tl.load(p_mean + o_b, mask=m_h, other=0.0)

    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    chunk, slot, i_rope = _listed(p_fetch_chunk, p_fetch_slot, p_rows, list_at, o_m, tokens, L)
    for start in range(tl.program_id(0) * BLOCK_M, tokens, tl.num_programs(0) * BLOCK_M):
        o_m = start + tl.arange(0, BLOCK_M)
        m_m = o_m < tokens
        position = chunk.to(tl.int64) * L + o_m % L
        i_turn = i_rope
        p_out = p_k + (slot.to(tl.int64) * L + o_m % L) * D
        o_coeff = position * rank
        # What the next tile begins with is on its way while this one is multiplied.
        o_next = o_m + tl.num_programs(0) * BLOCK_M
        chunk, slot, i_rope = _listed(p_fetch_chunk, p_fetch_slot, p_rows, list_at, o_next, tokens, L)

        sum_a = tl.zeros([BLOCK_M, BLOCK_HALF], tl.float32)
        sum_b = tl.zeros([BLOCK_M, BLOCK_HALF], tl.float32)
        for r in range(0, rank, BLOCK_R):
            o_r = r + tl.arange(0, BLOCK_R)
            m_r = o_r < rank
            coeff = tl.load(p_coeff + o_coeff[:, None] + o_r[None, :], mask=m_m[:, None] & m_r[None, :], other=0.0)
            m_rh = m_r[:, None] & m_h[None, :]
            basis_a = _partial_dims(p_basis, rank, o_a, o_r, m_rh)
            basis_b = _partial_dims(p_basis, rank, o_b, o_r, m_rh)
            sum_a = tl.dot(coeff, basis_a, sum_a, input_precision="ieee")
            sum_b = tl.dot(coeff, basis_b, sum_b, input_precision="ieee")
        sum_a += mean_a[None, :]
        sum_b += mean_b[None, :]

        m_mh = m_m[:, None] & m_h[None, :]
        inv_freq = tl.load(p_inv_freq + i_turn[:, None] * HALF + o_h[None, :], mask=m_mh, other=0.0)
        factor = tl.load(p_factor + i_turn, mask=m_m, other=0.0)[:, None]
        cos, sin = cos_sin(position.to(tl.float32)[:, None] * inv_freq)
        cos, sin = cos * factor, sin * factor
        out_a = (sum_a * cos - sum_b * sin).to(ELEMENT)
        out_b = (sum_b * cos + sum_a * sin).to(ELEMENT)
        if INTERLEAVED:
            o_pair = tl.arange(0, 2 * BLOCK_HALF)
            m_pair = m_m[:, None] & (o_pair < 2 * HALF)[None, :]
            tl.store(p_out[:, None] + o_pair[None, :], tl.interleave(out_a, out_b), mask=m_pair)
        else:
            tl.store(p_out[:, None] + o_a[None, :], out_a, mask=m_mh)
            tl.store(p_out[:, None] + o_b[None, :], out_b, mask=m_mh)

        if BLOCK_REST > 0:
            o_e = 2 * HALF + tl.arange(0, BLOCK_REST)
            m_e = o_e < D
            rest = tl.zeros([BLOCK_M, BLOCK_REST], tl.float32)
            for r in range(0, rank, BLOCK_R):
                o_r = r + tl.arange(0, BLOCK_R)
                m_r = o_r < rank
                coeff = tl.load(p_coeff + o_coeff[:, None] + o_r[None, :], mask=m_m[:, None] & m_r[None, :], other=0.0)
                basis = _partial_dims(p_basis, rank, o_e, o_r, m_r[:, None] & m_e[None, :])
                rest = tl.dot(coeff, basis, rest, input_precision="ieee")
            rest += tl.load(p_mean + o_e, mask=m_e, other=0.0)[None, :]
            tl.store(p_out[:, None] + o_e[None, :], rest.to(ELEMENT), mask=m_m[:, None] & m_e[None, :])


def block_of(width: int) -> int:
    """The power of two that holds so many dimensions; matrix products take at least 16, and none needs none."""
    return max(triton.next_power_of_2(width), 16) if width else 0


def rebuild_keys(
    rows: LayerRows,
    selection: Selection,
    table: RopeTable,
    rank: int,
    chunk_tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    late: bool,
) -> None:
    """Write the keys of the chunks on the fetch lists into their slots of K.

    ``late``: those wanted after attention, instead of those wanted before it. Nothing is read of a row whose
    list is empty.

    Source: ``ops.lowrank.rebuild`` and ``Rope.rotate``.
    """
    batch, _, entries = selection.fetch_chunk_BKP.shape
    blocks = triton.cdiv(entries * chunk_tokens, BLOCK_TOKENS)
    splits = min(max(TARGET_PROGRAMS // (batch * kv_heads), 1), blocks)
    half = table.rotary_dim // 2
    _rebuild_keys[(splits, kv_heads, batch)](
        rows.address_BX,
        rows.facts_BI,
        selection.fetch_chunk_BKP,
        selection.fetch_slot_BKP,
        selection.fetch_count_BK2,
        table.inv_freq_XF,
        table.factor_X,
        entries,
        rank,
        kv_heads,
        ELEMENT=tr.ELEMENT[dtype],
        LATE=late,
        L=chunk_tokens,
        D=head_dim,
        HALF=half,
        INTERLEAVED=table.interleaved,
        BLOCK_HALF=block_of(half),
        BLOCK_REST=block_of(head_dim - 2 * half),
        BLOCK_M=BLOCK_TOKENS,
        BLOCK_R=BLOCK_RANK,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
