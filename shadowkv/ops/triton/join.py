"""Chunks that leave the recent window for the context: coefficients, values and landmarks from the exact ring.

It happens between steps, every few dozen tokens of a sequence, to all its layers at once. Layer by layer in
plain operations it is some 40 launches per layer; here it is three in all, for several sequences: coefficients
(``join_context``), values (in the same call) and landmarks (on their own: another index has other kernels).

Coefficients are a product of [tokens, K*D] by [K*D, R]. A program makes a block of tokens by a block of
directions: it finds the angles once, then goes over the heads, turning each key back, taking the mean off in
float32 and multiplying. The two elements of a rotary pair are two products into one accumulator.

Predicted for Llama-3.1-8B, 12 chunks of 8 of one sequence in 32 layers: bases 10 MB and keys 6 MB (4 us),
1 GFLOP in 192 programs of 8 heads (some 10 us); values 6 MB over the bus (115 us at 55 GB/s, which no kernel can
shorten); landmarks 7 MB (3 us).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.rope import RopeTable
from shadowkv.ops.triton import rows as tr
from shadowkv.ops.triton.angles import cos_sin
from shadowkv.ops.triton.keys import block_of

BLOCK_TOKENS = 64
"""Most tokens per product; fewer when fewer can leave."""
BLOCK_RANK = 64
KEY_WARPS = 8
KEY_STAGES = 2
TILE_ELEMENTS = 4096
"""Of values or keys that a copying program holds at a time: heads are taken together as far as they fit."""
TILE_WARPS = 4


@triton.jit
def _leaving_slots(p_facts, row, position):
    """The ring's slots of these positions (int64)."""
    ring = position % tl.maximum(tr.fact(p_facts, row, tr.RING_SLOTS), 1)
    return (tr.fact(p_facts, row, tr.RING_START) + ring).to(tl.int64)


@triton.jit
def _join_keys(
    p_address, p_facts, p_first, p_count, p_ranks, p_inv_freq, p_factor, kv_heads, rank_blocks, one,
    ELEMENT: tl.constexpr, RANK_MULTIPLE: tl.constexpr, L: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    row, layer = tl.program_id(2), tl.program_id(1)
    rank = tl.multiple_of(tl.load(p_ranks + layer), RANK_MULTIPLE)
    start = tl.program_id(0) // rank_blocks * BLOCK_M
    r = tl.program_id(0) % rank_blocks * BLOCK_R
    tokens = tl.load(p_count + row) * L
    if (start >= tokens) | (r >= rank):
        return
    p_address += layer.to(tl.int64) * tl.num_programs(2) * tr.ADDRESSES
    o_m = start + tl.arange(0, BLOCK_M)
    m_m = o_m < tokens
    position = tl.load(p_first + row) * L + o_m
    slot = _leaving_slots(p_facts, row, position)
    slots = tr.fact(p_facts, row, tr.SLOTS).to(tl.int64)
    i_rope = tl.load(tr.tensor_of(p_address, row, tr.ROPE_ROWS, tl.int32) + position, mask=m_m, other=0)
    p_k = tr.tensor_of(p_address, row, tr.K, ELEMENT)
    p_basis = tr.tensor_of(p_address, row, tr.BASIS, ELEMENT)
    p_mean = tr.tensor_of(p_address, row, tr.MEAN, tl.float32)

    o_h = tl.arange(0, BLOCK_HALF)
    m_h = o_h < HALF
    o_a = 2 * o_h if INTERLEAVED else o_h
    o_b = o_a + 1 if INTERLEAVED else o_h + HALF
    m_mh = m_m[:, None] & m_h[None, :]
    inv_freq = tl.load(p_inv_freq + i_rope[:, None] * HALF + o_h[None, :], mask=m_mh, other=0.0)
    factor = tl.load(p_factor + i_rope, mask=m_m, other=1.0)[:, None]
    cos, sin = cos_sin(position.to(tl.float32)[:, None] * inv_freq)
    cos, sin = cos * factor, sin * factor
    norm = cos * cos + sin * sin
    cos, sin = cos / norm, sin / norm

    o_r = r + tl.arange(0, BLOCK_R)
    m_r = o_r < rank
    m_hr = m_h[:, None] & m_r[None, :]
    head_size = rank.to(tl.int64) * D
    coeff = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    # Sums by head and by piece of it, and then of these: one long sum, which the compiler makes of products that are
    # not scaled one by one, errs more in float32.
    for head in range(kv_heads):
        p_key = p_k + (head * slots + slot) * D
        p_head = p_basis + head_size * head
        a = tl.load(p_key[:, None] + o_a[None, :], mask=m_mh, other=0.0).to(tl.float32)
        b = tl.load(p_key[:, None] + o_b[None, :], mask=m_mh, other=0.0).to(tl.float32)
        mean_a = tl.load(p_mean + head * D + o_a, mask=m_h, other=0.0)
        mean_b = tl.load(p_mean + head * D + o_b, mask=m_h, other=0.0)
        basis_a = tl.load(p_head + o_a[:, None] * rank + o_r[None, :], mask=m_hr, other=0.0)
        basis_b = tl.load(p_head + o_b[:, None] * rank + o_r[None, :], mask=m_hr, other=0.0)
        back_a = a * cos + b * sin - mean_a[None, :]
        back_b = b * cos - a * sin - mean_b[None, :]
        coeff += tl.dot(back_a.to(ELEMENT), basis_a, input_precision="ieee") * one
        coeff += tl.dot(back_b.to(ELEMENT), basis_b, input_precision="ieee") * one
        if BLOCK_REST > 0:
            for first in tl.static_range(2 * HALF, D, BLOCK_REST):
                o_e = first + tl.arange(0, BLOCK_REST)
                m_e = o_e < D
                key = tl.load(p_key[:, None] + o_e[None, :], mask=m_m[:, None] & m_e[None, :], other=0.0)
                mean = tl.load(p_mean + head * D + o_e, mask=m_e, other=0.0)
                m_er = m_e[:, None] & m_r[None, :]
                basis = tl.load(p_head + o_e[:, None] * rank + o_r[None, :], mask=m_er, other=0.0)
                centred = (key.to(tl.float32) - mean[None, :]).to(ELEMENT)
                coeff += tl.dot(centred, basis, input_precision="ieee") * one
    p_out = tr.tensor_of(p_address, row, tr.COEFF, ELEMENT) + position.to(tl.int64)[:, None] * rank
    tl.store(p_out + o_r[None, :], coeff.to(ELEMENT), mask=m_m[:, None] & m_r[None, :])


@triton.jit
def _join_by_head(
    p_address, p_facts, p_first, p_count, kv_heads, head_blocks,
    ELEMENT: tl.constexpr, MEANS: tl.constexpr, L: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One chunk of some heads: its values to VALUES, or the means of its keys to LANDMARKS."""
    row, layer = tl.program_id(2), tl.program_id(1)
    leaving = tl.program_id(0) // head_blocks
    if leaving >= tl.load(p_count + row):
        return
    p_address += layer.to(tl.int64) * tl.num_programs(2) * tr.ADDRESSES
    chunk = tl.load(p_first + row) + leaving
    head = tl.program_id(0) % head_blocks * HEADS + tl.arange(0, HEADS)
    m_head = head < kv_heads
    head = head.to(tl.int64)
    o_l = tl.arange(0, BLOCK_L)
    o_d = tl.arange(0, BLOCK_D)
    slot = _leaving_slots(p_facts, row, chunk * L + o_l)
    slots = tr.fact(p_facts, row, tr.SLOTS)
    m_tile = (m_head[:, None] & (o_l < L)[None, :])[:, :, None] & (o_d < D)[None, None, :]
    o_tile = ((head * slots)[:, None] + slot[None, :])[:, :, None] * D + o_d[None, None, :]
    out = head * tr.fact(p_facts, row, tr.CHUNK_CAPACITY) + chunk
    if MEANS:
        keys = tl.load(tr.tensor_of(p_address, row, tr.K, ELEMENT) + o_tile, mask=m_tile, other=0.0)
        # Sums are wider than their terms; in float32 the order of 64 terms would show.
        mean = tl.sum(keys.to(tl.float64 if keys.dtype == tl.float32 else tl.float32), axis=1) / L
        p_out = tr.tensor_of(p_address, row, tr.LANDMARKS, ELEMENT) + out[:, None] * D
        tl.store(p_out + o_d[None, :], mean.to(ELEMENT), mask=m_head[:, None] & (o_d < D)[None, :])
    else:
        values = tl.load(tr.tensor_of(p_address, row, tr.V, ELEMENT) + o_tile, mask=m_tile, other=0.0)
        o_out = (out[:, None] * L + o_l[None, :])[:, :, None] * D + o_d[None, None, :]
        tl.store(tr.tensor_of(p_address, row, tr.VALUES, ELEMENT) + o_out, values, mask=m_tile)


def join_context(
    address_LBX: Tensor,
    facts_BI: Tensor,
    first_chunk_B: Tensor,
    chunk_count_B: Tensor,
    ranks_X: Tensor,
    max_rank: int,
    table: RopeTable,
    chunk_tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    max_chunks: int,
    rank_multiple: int = 1,
) -> None:
    """Write COEFF and VALUES of chunks whose exact keys and values are still in the rings, in all layers.

    ``slot_of_chunk`` and landmarks are not touched. Nothing is read of a row without chunks to join.

    Shapes: address [layers, B, len(Address)] int64 and facts [B, len(Fact)] int32, contiguous; first_chunk,
    chunk_count [B] int32, at most ``max_chunks`` each; ranks [layers] int32. ``rank_multiple``: a power of two
    up to 16 that divides every rank; rows of 16 bytes are then read and written as such.

    Source: ``Rope.unrotate`` and ``ops.lowrank.project``.
    """
    layers, batch = address_LBX.shape[:2]
    if not layers * batch * max_chunks:
        return
    half = table.rotary_dim // 2
    block_m = min(BLOCK_TOKENS, block_of(max_chunks * chunk_tokens))
    block_r = min(BLOCK_RANK, block_of(max_rank))
    rank_blocks = triton.cdiv(max_rank, block_r)
    _join_keys[(triton.cdiv(max_chunks * chunk_tokens, block_m) * rank_blocks, layers, batch)](
        address_LBX,
        facts_BI,
        first_chunk_B,
        chunk_count_B,
        ranks_X,
        table.inv_freq_XF,
        table.factor_X,
        kv_heads,
        rank_blocks,
        1.0,
        ELEMENT=tr.ELEMENT[dtype],
        RANK_MULTIPLE=rank_multiple,
        L=chunk_tokens,
        D=head_dim,
        HALF=half,
        INTERLEAVED=table.interleaved,
        BLOCK_HALF=block_of(half),
        BLOCK_REST=min(block_of(head_dim - 2 * half), 32 if dtype == torch.float32 else 256),
        BLOCK_M=block_m,
        BLOCK_R=block_r,
        num_warps=KEY_WARPS,
        num_stages=KEY_STAGES,
    )
    tables = (address_LBX, facts_BI, first_chunk_B, chunk_count_B)
    _launch_by_head(*tables, chunk_tokens, kv_heads, head_dim, dtype, max_chunks, means=False)


def write_landmarks(
    address_LBX: Tensor,
    facts_BI: Tensor,
    first_chunk_B: Tensor,
    chunk_count_B: Tensor,
    chunk_tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    max_chunks: int,
) -> None:
    """Write LANDMARKS of the chunks that :func:`join_context` joins, from the same rings. Shapes: see there.

    Source: ``ops.chunks.chunk_means``.
    """
    tables = (address_LBX, facts_BI, first_chunk_B, chunk_count_B)
    _launch_by_head(*tables, chunk_tokens, kv_heads, head_dim, dtype, max_chunks, means=True)


def _launch_by_head(
    address_LBX: Tensor,
    facts_BI: Tensor,
    first_chunk_B: Tensor,
    chunk_count_B: Tensor,
    chunk_tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    max_chunks: int,
    *,
    means: bool,
) -> None:
    layers, batch = address_LBX.shape[:2]
    if not layers * batch * max_chunks:
        return
    block_l, block_d = triton.next_power_of_2(chunk_tokens), triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(kv_heads), max(TILE_ELEMENTS // (block_l * block_d), 1))
    head_blocks = triton.cdiv(kv_heads, heads)
    _join_by_head[(max_chunks * head_blocks, layers, batch)](
        address_LBX,
        facts_BI,
        first_chunk_B,
        chunk_count_B,
        kv_heads,
        head_blocks,
        ELEMENT=tr.ELEMENT[dtype],
        MEANS=means,
        L=chunk_tokens,
        D=head_dim,
        HEADS=heads,
        BLOCK_L=block_l,
        BLOCK_D=block_d,
        num_warps=TILE_WARPS,
    )
