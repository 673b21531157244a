"""From logits to chunks, from chunks to slots, and to the list of slots to attend to: one program a KV head.

Design. Nothing is sorted. Scores become int32 keys of the same order, which stay in registers, and the best k
of them are found by searching for their threshold (``search``). The same search finds which misses are fetched
and whose slots they get. Lists come from ranks in a mask.

More chunks than LANES do not fit into registers. There every lane keeps the largest of its keys: the k-th largest
of those maxima bounds the k-th largest key from below, and what lies above it is few: at most k keys per key of a
lane, and k ties. These are listed in scratch memory and chosen from as above.

Predicted: a round is 0.15 us, ten rounds a search; 2 to 3 searches of that, 1 us for logits (120 KB a program at
7,500 chunks and G = 4), 2 us of dependent loads, 1 us of scans: 6 to 8 us, whatever the batch up to 132 programs.
"""

import triton
import triton.language as tl
from torch import Tensor

from shadowkv.errors import ShapeError
from shadowkv.ops import select
from shadowkv.ops.rows import LayerRows, Selection
from shadowkv.ops.triton.rows import (
    CAP,
    CHUNK_CAPACITY,
    CHUNKS,
    COUNTERS,
    LAST_USED,
    LATE_CAP,
    RESIDENT_CHUNKS,
    RESIDENT_IDS,
    SELECT,
    SLOT_OF_CHUNK,
    STEP,
    fact,
    tensor_of,
)
from shadowkv.ops.triton.search import LOWEST, best, bounds, rank, threshold

LANES = 16384
"""Keys in registers at most: 16 a thread at 32 warps. Selections of more than some 1,800 chunks from more than
that take twice as many."""
MOST_LANES = 65536
"""Counts are halves of an int32."""
KEYS_PER_THREAD = 16
"""Decides on the number of warps, between the bounds below."""
LEAST_WARPS = 4
MOST_WARPS = 32

EMPTY = tl.constexpr(select.EMPTY)
COLUMNS = 4
"""Least consecutive ids in a row of the matrix of keys: vectors of 16 bytes."""


@triton.jit
def _log_total(p_part, splits, stride_pg, stride_pz, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_Z: tl.constexpr):
    """The log-sum-exp of every query head, from its parts."""
    o_g = tl.arange(0, BLOCK_G).to(tl.int64)
    o_z = tl.arange(0, BLOCK_Z).to(tl.int64)
    m_GX = (o_g < GROUP)[:, None] & (o_z < splits)[None, :]
    p_GX = p_part + o_g[:, None] * stride_pg + o_z[None, :] * stride_pz
    b_top_GX = tl.load(p_GX, mask=m_GX, other=float("-inf"))
    b_sum_GX = tl.load(p_GX + 1, mask=m_GX, other=0.0)
    b_top_G = tl.max(b_top_GX, axis=1)
    b_base_G = tl.where(b_top_G == float("-inf"), 0.0, b_top_G)
    b_sum_G = tl.sum(b_sum_GX * tl.exp(b_top_GX - b_base_G[:, None]), axis=1)
    return b_base_G + tl.log(tl.where(o_g < GROUP, b_sum_G, 1.0))


@triton.jit
def _keys(p_logits, stride_lg, b_total_G, o_c_XX, m_read_XX, m_XX, GROUP: tl.constexpr, BLOCK_G: tl.constexpr):
    """Keys in the order of scores: the maximum over the group of logit - log-sum-exp; LOWEST outside ``m``."""
    o_g = tl.arange(0, BLOCK_G)
    b_score_XX = tl.full(o_c_XX.shape, float("-inf"), tl.float32)
    p_logit_XX = p_logits + o_c_XX
    for g in tl.static_range(GROUP):
        total = tl.sum(tl.where(o_g == g, b_total_G, 0.0), axis=0)
        b_logit_XX = tl.load(p_logit_XX + g * stride_lg, mask=m_read_XX, other=float("-inf"))
        b_score_XX = tl.maximum(b_score_XX, b_logit_XX - total)
    b_score_XX = tl.where(b_score_XX == 0.0, 0.0, b_score_XX)  # -0.0 and 0.0 are equal and have one key
    b_bits_XX = b_score_XX.to(tl.int32, bitcast=True)
    b_key_XX = b_bits_XX ^ ((b_bits_XX >> 31) & 0x7FFFFFFF)
    return tl.where(m_XX & (b_score_XX > float("-inf")), b_key_XX, LOWEST)


@triton.jit
def _readable(o_c_XX, chunks, width):
    """Chunks whose logits are read, the row's and up to 3 more, so that a vector is read or not as one."""
    return (o_c_XX < (chunks + 3) // 4 * 4) & (o_c_XX < width)


@triton.jit
def _shortlist(
    p_logits,
    stride_lg,
    b_total_G,
    p_keys,
    width,
    chunks,
    count,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Leaves in ``p_keys`` the ids, ascending, of chunks that all of the best ``count`` are among: how many."""
    o_lane_XX = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    b_top_XX = tl.full([ROWS, COLS], LOWEST, tl.int32)
    for start in range(0, chunks, ROWS * COLS):
        o_c_XX = start + o_lane_XX
        m_read_XX = _readable(o_c_XX, chunks, width)
        b_key_XX = _keys(p_logits, stride_lg, b_total_G, o_c_XX, m_read_XX, o_c_XX < chunks, GROUP, BLOCK_G)
        tl.store(p_keys + o_c_XX, b_key_XX, mask=o_c_XX < chunks)
        b_top_XX = tl.maximum(b_top_XX, b_key_XX)
    low, held = bounds(b_top_XX)
    low, _, _ = threshold(b_top_XX, count, low, held)
    tl.debug_barrier()
    listed = count * 0
    ties = count * 0
    for start in range(0, chunks, ROWS * COLS):
        o_c_XX = start + o_lane_XX
        b_key_XX = tl.load(p_keys + o_c_XX, mask=o_c_XX < chunks, other=LOWEST)
        b_tie_XX = (b_key_XX == low).to(tl.int32)
        m_keep_XX = (b_key_XX > low) | ((b_tie_XX > 0) & (ties + rank(b_tie_XX) < count))
        b_keep_XX = m_keep_XX.to(tl.int32)
        o_list_XX = listed + rank(b_keep_XX)  # never beyond the keys that were read
        tl.debug_barrier()
        tl.store(p_keys + o_list_XX, o_c_XX, mask=m_keep_XX)
        listed += tl.sum(b_keep_XX)
        ties += tl.sum(b_tie_XX)
    tl.debug_barrier()
    return listed


@triton.jit
def _choose_kernel(
    p_address,
    p_facts,
    p_logits,
    p_parts,
    p_keys,
    p_attend,
    p_attend_count,
    p_chunk,
    p_slot,
    p_fetch_count,
    stride_lb,
    stride_lk,
    stride_lg,
    stride_pb,
    stride_pk,
    stride_pg,
    stride_pz,
    stride_kb,
    stride_kk,
    stride_out,
    width,
    splits,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SHORTLIST: tl.constexpr,
    LANE_ROWS: tl.constexpr,
    LANE_COLS: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    SLOT_COLS: tl.constexpr,
    ATTEND_RESIDENT: tl.constexpr,
):
    i_head = tl.program_id(0).to(tl.int64)
    i_row = tl.program_id(1).to(tl.int64)
    i_out = i_row * tl.num_programs(0) + i_head
    chunks = fact(p_facts, i_row, CHUNKS)
    count = fact(p_facts, i_row, SELECT)
    if (chunks <= 0) | (count <= 0):
        tl.store(p_attend_count + i_out, 0)
        tl.store(p_fetch_count + 2 * i_out, 0)
        tl.store(p_fetch_count + 2 * i_out + 1, 0)
        return
    step = fact(p_facts, i_row, STEP)
    resident = fact(p_facts, i_row, RESIDENT_CHUNKS)
    capacity = fact(p_facts, i_row, CHUNK_CAPACITY).to(tl.int64)
    cap = tl.minimum(fact(p_facts, i_row, CAP), count)
    late_cap = tl.minimum(fact(p_facts, i_row, LATE_CAP), count)
    p_slot_of = tensor_of(p_address, i_row, SLOT_OF_CHUNK, tl.int32) + i_head * capacity
    p_ids = tensor_of(p_address, i_row, RESIDENT_IDS, tl.int32) + i_head * resident
    p_used = tensor_of(p_address, i_row, LAST_USED, tl.int32) + i_head * resident
    p_attend += i_out * stride_out
    p_chunk += i_out * stride_out
    p_slot += i_out * stride_out

    # Which chunks.
    p_logits += i_row * stride_lb + i_head * stride_lk
    p_part = p_parts + i_row * stride_pb + i_head * stride_pk
    b_total_G = _log_total(p_part, splits, stride_pg, stride_pz, GROUP, BLOCK_G, BLOCK_Z)
    o_XX = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    if SHORTLIST:
        p_list = p_keys + i_row * stride_kb + i_head * stride_kk
        listed = _shortlist(
            p_logits, stride_lg, b_total_G, p_list, width, chunks, count, GROUP, BLOCK_G, LANE_ROWS, LANE_COLS
        )
        b_id_XX = tl.load(p_list + o_XX, mask=o_XX < listed, other=0)
        m_XX = o_XX < listed
        m_read_XX = m_XX
    else:
        b_id_XX = o_XX
        m_XX = o_XX < chunks
        m_read_XX = _readable(o_XX, chunks, width)
    b_key_XX = _keys(p_logits, stride_lg, b_total_G, b_id_XX, m_read_XX, m_XX, GROUP, BLOCK_G)
    low, held = bounds(b_key_XX)
    count = tl.minimum(count, held)  # fewer than were asked for only where logits are NaN
    m_best_XX, low = best(b_key_XX, count, low, held)

    # Which of them are missing, and which of those are fetched: now, or after attention.
    b_slot_XX = tl.load(p_slot_of + b_id_XX, mask=m_best_XX, other=EMPTY)
    m_hit_XX = b_slot_XX >= 0
    tl.store(p_used + b_slot_XX, tl.zeros_like(b_slot_XX) + step, mask=m_hit_XX)
    hits = tl.sum(m_hit_XX.to(tl.int32))
    misses = count - hits
    now = tl.minimum(misses, cap)
    late = tl.minimum(misses - now, late_cap)
    m_fetch_XX = m_best_XX & (b_slot_XX < 0)
    m_now_XX = m_fetch_XX
    if now < misses:
        b_missing_XX = tl.where(m_fetch_XX, b_key_XX, LOWEST)
        if now > 0:
            m_now_XX, _ = best(b_missing_XX, now, low, misses)
        else:
            m_now_XX = tl.zeros([ROWS, COLS], tl.int1)
        m_fetch_XX = m_now_XX
        if late > 0:
            m_fetch_XX, _ = best(b_missing_XX, now + late, low, misses)
    b_both_XX = rank(m_now_XX.to(tl.int32) + ((m_fetch_XX & ~m_now_XX).to(tl.int32) << 16))
    o_fetch_XX = tl.where(m_now_XX, b_both_XX & 0xFFFF, now + (b_both_XX >> 16))
    tl.store(p_chunk + o_fetch_XX, b_id_XX, mask=m_fetch_XX)

    # Whose slots they get: both lists are in ascending order, and meet by rank.
    o_slot_XX = tl.arange(0, SLOT_ROWS)[:, None] * SLOT_COLS + tl.arange(0, SLOT_COLS)[None, :]
    m_slot_XX = o_slot_XX < resident
    tl.debug_barrier()  # the stamps of hits, and the list
    b_used_XX = tl.load(p_used + o_slot_XX, mask=m_slot_XX, other=step)
    b_held_XX = tl.load(p_ids + o_slot_XX, mask=m_slot_XX, other=EMPTY)
    m_victim_XX = tl.zeros([SLOT_ROWS, SLOT_COLS], tl.int1)
    fetched = now + late
    if fetched > 0:
        b_age_XX = tl.where(b_used_XX != step, ~b_used_XX, LOWEST)  # largest where used longest ago
        youngest, free = bounds(b_age_XX)
        m_victim_XX, _ = best(b_age_XX, fetched, youngest, free)
    b_rank_XX = rank(m_victim_XX.to(tl.int32))
    b_new_XX = tl.load(p_chunk + b_rank_XX, mask=m_victim_XX, other=EMPTY)
    tl.debug_barrier()  # everyone has read the old state
    tl.store(p_slot + b_rank_XX, o_slot_XX, mask=m_victim_XX)
    tl.store(p_ids + o_slot_XX, b_new_XX, mask=m_victim_XX)
    tl.store(p_used + o_slot_XX, tl.zeros_like(b_used_XX) + step, mask=m_victim_XX)
    tl.store(
        p_slot_of + b_held_XX, tl.full([SLOT_ROWS, SLOT_COLS], EMPTY, tl.int32), mask=m_victim_XX & (b_held_XX >= 0)
    )
    tl.store(p_slot_of + b_new_XX, o_slot_XX, mask=m_victim_XX)

    # What is attended: a late chunk's slot still holds what it held.
    m_there_XX = b_held_XX >= 0 if ATTEND_RESIDENT else m_slot_XX & (b_used_XX == step)
    b_attend_XX = (m_there_XX | (m_victim_XX & (b_rank_XX < now))).to(tl.int32)
    tl.store(p_attend + rank(b_attend_XX), o_slot_XX, mask=b_attend_XX > 0)
    tl.store(p_attend_count + i_out, tl.sum(b_attend_XX))
    tl.store(p_fetch_count + 2 * i_out, now)
    tl.store(p_fetch_count + 2 * i_out + 1, late)
    o_counter = tl.arange(0, 4)
    b_counter = tl.where(o_counter == 0, hits, tl.where(o_counter == 1, misses, fetched)).to(tl.int64)
    p_counters = tensor_of(p_address, i_row, COUNTERS, tl.int64)
    tl.atomic_add(p_counters + o_counter, b_counter, mask=o_counter < 3, sem="relaxed")


def _matrix(keys: int, warps: int) -> tuple[int, int]:
    """Rows and columns of at least this many keys (a power of two), about a row a thread."""
    columns = min(max(keys // (32 * warps), COLUMNS), keys)
    return keys // columns, columns


def _listed_at_most(chunks: int, select: int, lanes: int) -> int:
    """Room for the shortlist: all keys of so many lanes as there are chunks to select, and as many ties."""
    most: int = triton.next_power_of_2(select * (triton.cdiv(chunks, lanes) + 1))
    return most


def choose_chunks(
    rows: LayerRows,
    logits_BKGC: Tensor,
    parts_BKGZ2: Tensor,
    keys_BKC: Tensor,
    out: Selection,
    *,
    attend_resident: bool,
) -> None:
    """Choose every row's best chunks, give those that are missing slots, and list what to attend to.

    As ``ops.select`` does: a chunk's score is the maximum over the group of its log-softmax; at most CAP of those
    missing are fetched now and LATE_CAP late. With ``attend_resident`` all slots are attended that hold a chunk
    or get one now, otherwise those of chosen chunks. Resident sets and counters are updated. Rows that select
    nothing get counts of 0.

    Shapes: logits [B, K, G, C] float32, -inf where a chunk cannot be chosen, of any value beyond a row's chunks (a C
    that is a multiple of 16 is read fastest); parts
    [B, K, G, Z, 2] float32: maximum and sum of exp(logit - maximum) of any split of the chunks; keys [B, K, C]
    int32 is scratch memory, used where C is more than LANES. ``out`` is contiguous.

    Raises:
        ShapeError: so many chunks and slots that they cannot be counted.
    """
    batch, kv_heads, group, width = logits_BKGC.shape
    splits, most_slots = parts_BKGZ2.shape[3], out.attend_BKP.shape[2]
    block, lanes = triton.next_power_of_2(max(width, 16)), LANES
    shortlist = block > lanes
    if shortlist:
        block = _listed_at_most(width, most_slots, lanes)
    while block > lanes:
        lanes *= 2
        block = _listed_at_most(width, most_slots, lanes)
    if lanes > MOST_LANES:
        raise ShapeError(
            f"{most_slots} of {width} chunks: choosing takes {lanes} keys at a time, and at most {MOST_LANES} can be "
            "counted; use larger chunks or a smaller resident set"
        )
    slots = triton.next_power_of_2(max(most_slots, 16))
    warps = min(max(max(lanes if shortlist else block, slots) // (32 * KEYS_PER_THREAD), LEAST_WARPS), MOST_WARPS)
    block_rows, block_columns = _matrix(block, warps)
    lane_rows, lane_columns = _matrix(lanes, warps)
    slot_rows, slot_columns = _matrix(slots, warps)
    _choose_kernel[(kv_heads, batch)](
        rows.address_BX,
        rows.facts_BI,
        logits_BKGC,
        parts_BKGZ2,
        keys_BKC,
        out.attend_BKP,
        out.attend_count_BK,
        out.fetch_chunk_BKP,
        out.fetch_slot_BKP,
        out.fetch_count_BK2,
        *logits_BKGC.stride()[:3],
        *parts_BKGZ2.stride()[:4],
        *keys_BKC.stride()[:2],
        most_slots,
        width,
        splits,
        GROUP=group,
        BLOCK_G=triton.next_power_of_2(group),
        BLOCK_Z=triton.next_power_of_2(splits),
        ROWS=block_rows,
        COLS=block_columns,
        SHORTLIST=shortlist,
        LANE_ROWS=lane_rows,
        LANE_COLS=lane_columns,
        SLOT_ROWS=slot_rows,
        SLOT_COLS=slot_columns,
        ATTEND_RESIDENT=attend_resident,
        num_warps=warps,
    )
