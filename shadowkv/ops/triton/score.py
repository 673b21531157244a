"""How much every query head wants every chunk: the query times all landmarks, and the parts of its softmax.

Design. The landmarks are read once; everything else is small beside them (logits 4 G bytes a chunk, 6 % at G = 4
and D = 128 in bf16). A program takes SCORE_SPLIT_CHUNKS chunks of one KV head, in tiles of about TILE_BYTES that are
loaded ahead, and multiplies each tile with the group's queries on the tensor cores: their other side is padded to 16,
which costs nothing, since the kernel waits for memory. The softmax is not finished here: a split leaves its
maximum and its sum of exponentials, and whoever chooses puts the parts together. Maximum and sum are kept per
position in the tile, so that nothing is reduced over the block before the end.

Predicted: 8 rows of 60K tokens (8 KV heads, 7,500 chunks, D = 128, bf16): 123 MB of landmarks, 8 MB of logits,
2 MB of slots, 0.5 GFLOP: 31 us at 4.3 TB/s, with 960 programs on 132 SMs.
"""

import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops import select
from shadowkv.ops.rows import LayerRows
from shadowkv.ops.splits import SCORE_SPLIT_CHUNKS, score_splits
from shadowkv.ops.triton.rows import CHUNK_CAPACITY, CHUNKS, ELEMENT, LANDMARKS, SLOT_OF_CHUNK, fact, tensor_of

TILE_BYTES = 32768
"""Landmarks that are multiplied at a time."""
MOST_CHUNKS = 128
"""Chunks in a tile at most; at least 16, and 64 where the tensor cores are to be used well."""
NUM_WARPS = 4
NUM_STAGES = 3
"""Tiles in flight in a program."""

OUTLIER = tl.constexpr(select.OUTLIER)


@triton.jit
def _score_kernel(
    p_address,
    p_facts,
    p_q,
    p_logits,
    p_parts,
    stride_qb,
    stride_qn,
    stride_lb,
    stride_lk,
    stride_lg,
    stride_pb,
    stride_pk,
    stride_pg,
    stride_pz,
    width,
    scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DTYPE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
    PIECE: tl.constexpr,
    OUTLIERS: tl.constexpr,
):
    i_split = tl.program_id(0)
    i_head = tl.program_id(1).to(tl.int64)
    i_row = tl.program_id(2).to(tl.int64)
    chunks = fact(p_facts, i_row, CHUNKS)
    first = i_split * SPLIT
    o_g = tl.arange(0, BLOCK_G)
    m_g = o_g < GROUP
    p_part = p_parts + i_row * stride_pb + i_head * stride_pk + i_split.to(tl.int64) * stride_pz
    p_part_G = p_part + o_g.to(tl.int64) * stride_pg
    if first >= chunks:
        tl.store(p_part_G, tl.full([BLOCK_G], float("-inf"), tl.float32), mask=m_g)
        tl.store(p_part_G + 1, tl.zeros([BLOCK_G], tl.float32), mask=m_g)
        return
    capacity = fact(p_facts, i_row, CHUNK_CAPACITY).to(tl.int64)
    p_landmarks = tensor_of(p_address, i_row, LANDMARKS, DTYPE) + i_head * capacity * D
    if OUTLIERS:
        p_slot_of = tensor_of(p_address, i_row, SLOT_OF_CHUNK, tl.int32) + i_head * capacity

    o_d = tl.arange(0, BLOCK_D)
    o_n = i_head * GROUP + o_g
    p_q_DG = p_q + i_row * stride_qb + o_n[None, :] * stride_qn + o_d[:, None]
    b_q_DG = tl.load(p_q_DG, mask=(o_d[:, None] < D) & m_g[None, :], other=0.0)
    p_logits_G = p_logits + i_row * stride_lb + i_head * stride_lk + o_g.to(tl.int64)[None, :] * stride_lg
    b_top_CG = tl.full([BLOCK_C, BLOCK_G], float("-inf"), tl.float32)
    b_sum_CG = tl.zeros([BLOCK_C, BLOCK_G], tl.float32)
    for start in tl.range(first, tl.minimum(first + SPLIT, chunks), BLOCK_C, num_stages=STAGES):
        o_c = start + tl.arange(0, BLOCK_C)
        m_c = o_c < chunks
        m_open_C = m_c
        if OUTLIERS:
            m_open_C = tl.load(p_slot_of + o_c, mask=m_c, other=OUTLIER) != OUTLIER
        if tl.float32 == DTYPE:  # sums of short pieces err less than one long sum
            b_logits_CG = tl.zeros([BLOCK_C, BLOCK_G], tl.float32)
            for first_d in tl.static_range(0, BLOCK_D, PIECE):
                o_e = first_d + tl.arange(0, PIECE)
                p_tile_CE = p_landmarks + (o_c.to(tl.int64)[:, None] * D + o_e[None, :])
                b_tile_CE = tl.load(p_tile_CE, mask=m_c[:, None] & (o_e[None, :] < D), other=0.0)
                p_q_EG = p_q + i_row * stride_qb + o_n[None, :] * stride_qn + o_e[:, None]
                b_q_EG = tl.load(p_q_EG, mask=(o_e[:, None] < D) & m_g[None, :], other=0.0)
                b_logits_CG += tl.dot(b_tile_CE, b_q_EG, input_precision="ieee") * scale
        else:
            p_tile_CD = p_landmarks + (o_c.to(tl.int64)[:, None] * D + o_d[None, :])
            if ALIGNED:
                p_tile_CD = tl.multiple_of(p_tile_CD, [16, 16])
            b_tile_CD = tl.load(p_tile_CD, mask=m_c[:, None] & (o_d[None, :] < D), other=0.0)
            b_logits_CG = tl.dot(b_tile_CD, b_q_DG) * scale
        b_logits_CG = tl.where(m_open_C[:, None], b_logits_CG, float("-inf"))
        tl.store(p_logits_G + o_c[:, None], b_logits_CG, mask=(o_c < width)[:, None] & m_g[None, :])
        b_new_CG = tl.maximum(b_top_CG, b_logits_CG)
        b_base_CG = tl.where(b_new_CG == float("-inf"), 0.0, b_new_CG)
        b_sum_CG = b_sum_CG * tl.exp(b_top_CG - b_base_CG) + tl.exp(b_logits_CG - b_base_CG)
        b_top_CG = b_new_CG
    b_top_G = tl.max(b_top_CG, axis=0)
    b_base_G = tl.where(b_top_G == float("-inf"), 0.0, b_top_G)
    b_sum_G = tl.sum(b_sum_CG * tl.exp(b_top_CG - b_base_G[None, :]), axis=0)
    tl.store(p_part_G, b_top_G, mask=m_g)
    tl.store(p_part_G + 1, b_sum_G, mask=m_g)


def score_landmarks(rows: LayerRows, q_BND: Tensor, logits_BKGC: Tensor, parts_BKGZ2: Tensor) -> None:
    """Logits q . landmark / sqrt(D) of every row's chunks, and the softmax's parts; see :func:`score_table`.

    ``logits`` is -inf for outliers, too.
    """
    score_table(rows, q_BND, logits_BKGC, parts_BKGZ2, q_BND.shape[2] ** -0.5, outliers=True)


def score_table(
    rows: LayerRows, q_BND: Tensor, logits_BKGC: Tensor, parts_BKGZ2: Tensor, scale: float, *, outliers: bool = False
) -> None:
    """Logits scale * q . entry of every row's chunks, and the softmax's parts.

    Each chunk has an entry of D numbers in a table [K, CHUNK_CAPACITY, D], at the address of the landmarks.
    ``logits`` is -inf from a row's last chunk to the end of that tile; beyond, it stays as it is.
    ``parts`` holds the maximum and the sum of exp(logit - maximum) of SCORE_SPLIT_CHUNKS chunks each, (-inf, 0)
    where there are none.

    Shapes: q [B, N, D] in the table's dtype; logits [B, K, G, C] float32 with C at least every row's chunks
    (a multiple of 16 is written fastest); parts [B, K, G, Z, 2] float32 with Z = ``score_splits(C)`` of ``ops.splits``.
    Last axes are contiguous.

    Args:
        outliers: chunks that ``SLOT_OF_CHUNK`` says are outliers get -inf.
    """
    batch, kv_heads, group, width = logits_BKGC.shape
    dim, element = q_BND.shape[2], q_BND.element_size()
    block_d = max(triton.next_power_of_2(dim), 16)
    block_c = min(max(TILE_BYTES // (block_d * element), 16), MOST_CHUNKS, SCORE_SPLIT_CHUNKS)
    _score_kernel[(score_splits(width), kv_heads, batch)](
        rows.address_BX,
        rows.facts_BI,
        q_BND,
        logits_BKGC,
        parts_BKGZ2,
        q_BND.stride(0),
        q_BND.stride(1),
        *logits_BKGC.stride()[:3],
        *parts_BKGZ2.stride()[:4],
        width,
        scale,
        GROUP=group,
        D=dim,
        DTYPE=ELEMENT[q_BND.dtype],
        SPLIT=SCORE_SPLIT_CHUNKS,
        BLOCK_C=block_c,
        BLOCK_D=block_d,
        BLOCK_G=max(triton.next_power_of_2(group), 16),
        STAGES=NUM_STAGES,
        ALIGNED=dim * element % 16 == 0,
        PIECE=32,
        OUTLIERS=outliers,
        num_warps=NUM_WARPS,
    )
