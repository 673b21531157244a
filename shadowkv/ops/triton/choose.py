"""From logits to chunks, from chunks to slots, and to the list of slots to attend to.

Design. Nothing is sorted. Scores become int32 keys of the same order (a wide kernel: every SM reads its share of
the logits), with the largest key of every run of SPAN chunks behind them. Then one program a KV head: the best k keys
are members of the k runs with the largest maxima (of equal maxima the first), so that it looks at the maxima and
at k runs only: both are few where SPAN is about the root of chunks / k. The best k of a block are those above a
threshold, found by counting (``search``). The same search finds which misses are fetched and whose slots they get,
and lists come from ranks in a mask.

History. One program that read all logits itself took 29 us at 7,500 chunks and 58 us at 15,300 (8 rows, H200): its
time grew with the chunks, not with the rows. So the reading is spread, and what one program searches is small.
A hit is seen from its slot, by its key, which is read at the start: looked up by chunk, stamped and read again, slots
cost three trips to memory one after the other.
"""

import triton
import triton.language as tl
from torch import Tensor

from shadowkv.errors import ShapeError
from shadowkv.ops import select
from shadowkv.ops.rows import LayerRows, Selection
from shadowkv.ops.splits import choose_width, run_chunks
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
from shadowkv.ops.triton.search import LOWEST, best, bounds, rank

TILE_KEYS = 1024
"""Keys that one program of the first kernel makes."""
TILE_WARPS = 4
KEYS_PER_THREAD = 8
"""Decides on the number of warps of the second kernel, between the bounds below: a round of its searches costs a
barrier of all of them."""
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
def _keys(b_score_XX, m_XX):
    """Keys in the order of scores; LOWEST outside ``m`` and where a score is -inf."""
    b_score_XX = tl.where(b_score_XX == 0.0, 0.0, b_score_XX)  # -0.0 and 0.0 are equal and have one key
    b_bits_XX = b_score_XX.to(tl.int32, bitcast=True)
    b_key_XX = b_bits_XX ^ ((b_bits_XX >> 31) & 0x7FFFFFFF)
    return tl.where(m_XX & (b_score_XX > float("-inf")), b_key_XX, LOWEST)


@triton.jit
def _readable(o_c_XX, chunks, width):
    """Chunks whose logits are read, the row's and up to 3 more, so that a vector is read or not as one."""
    return (o_c_XX < (chunks + 3) // 4 * 4) & (o_c_XX < width)


@triton.jit
def _choose_keys(
    p_facts,
    p_logits,
    p_parts,
    p_keys,
    stride_lb,
    stride_lk,
    stride_lg,
    stride_pb,
    stride_pk,
    stride_pg,
    stride_pz,
    stride_kb,
    stride_kk,
    width,
    splits,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    RUNS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """The keys of RUNS runs of SPAN chunks, and behind all keys the largest of every run."""
    i_tile = tl.program_id(0)
    i_head = tl.program_id(1).to(tl.int64)
    i_row = tl.program_id(2).to(tl.int64)
    chunks = fact(p_facts, i_row, CHUNKS)
    if (fact(p_facts, i_row, SELECT) <= 0) | (i_tile * RUNS * SPAN >= chunks):
        return
    o_run = i_tile * RUNS + tl.arange(0, RUNS)
    o_c_XX = o_run[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    # Logits and parts are asked for together: a program is over when both have come once.
    o_g = tl.arange(0, BLOCK_G).to(tl.int64)
    p_logits += i_row * stride_lb + i_head * stride_lk
    p_logit_XGX = p_logits + (o_g * stride_lg)[None, :, None] + o_c_XX[:, None, :]  # so the group is in registers
    m_XGX = (o_g < GROUP)[None, :, None] & _readable(o_c_XX, chunks, width)[:, None, :]
    b_score_XGX = tl.load(p_logit_XGX, mask=m_XGX, other=float("-inf"))
    p_part = p_parts + i_row * stride_pb + i_head * stride_pk
    b_total_G = _log_total(p_part, splits, stride_pg, stride_pz, GROUP, BLOCK_G, BLOCK_Z)
    b_score_XGX -= b_total_G[None, :, None]
    b_score_XGX = tl.where(b_score_XGX > float("-inf"), b_score_XGX, float("-inf"))  # not NaN
    b_key_XX = _keys(tl.max(b_score_XGX, axis=1), o_c_XX < chunks)
    p_keys += i_row * stride_kb + i_head * stride_kk
    tl.store(p_keys + o_c_XX, b_key_XX, mask=o_c_XX < width)
    tl.store(p_keys + width + o_run, tl.max(b_key_XX, axis=1), mask=o_run * SPAN < chunks)


@triton.jit
def _choose_kernel(
    p_address,
    p_facts,
    p_keys,
    p_attend,
    p_attend_count,
    p_chunk,
    p_slot,
    p_fetch_count,
    stride_kb,
    stride_kk,
    stride_out,
    width,
    SPAN: tl.constexpr,
    RUN_ROWS: tl.constexpr,
    RUN_COLS: tl.constexpr,
    KEPT_RUNS: tl.constexpr,
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

    # What depends on nothing is asked for first: which chunks are resident, when they were used, and their keys.
    p_keys += i_row * stride_kb + i_head * stride_kk
    o_slot_XX = tl.arange(0, SLOT_ROWS)[:, None] * SLOT_COLS + tl.arange(0, SLOT_COLS)[None, :]
    m_slot_XX = o_slot_XX < resident
    b_held_XX = tl.load(p_ids + o_slot_XX, mask=m_slot_XX, other=EMPTY)
    b_used_XX = tl.load(p_used + o_slot_XX, mask=m_slot_XX, other=step)
    b_held_key_XX = tl.load(p_keys + b_held_XX, mask=b_held_XX >= 0, other=LOWEST)

    # Which chunks: none but members of the runs with the ``count`` largest maxima, of equals the first.
    o_run_XX = tl.arange(0, RUN_ROWS)[:, None] * RUN_COLS + tl.arange(0, RUN_COLS)[None, :]
    b_top_XX = tl.load(p_keys + width + o_run_XX, mask=o_run_XX * SPAN < chunks, other=LOWEST)
    low, held = bounds(b_top_XX)
    kept = tl.minimum(count, held)
    m_kept_XX, low = best(b_top_XX, kept, low, held)
    tl.store(p_chunk + rank(m_kept_XX.to(tl.int32)), o_run_XX, mask=m_kept_XX)
    tl.debug_barrier()
    o_kept = tl.arange(0, KEPT_RUNS)
    b_run = tl.load(p_chunk + o_kept, mask=o_kept < kept, other=0)
    b_id_XX = b_run[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    m_XX = (o_kept < kept)[:, None] & (b_id_XX < chunks)
    b_key_XX = tl.load(p_keys + b_id_XX, mask=m_XX, other=LOWEST)
    b_slot_XX = tl.load(p_slot_of + b_id_XX, mask=m_XX, other=EMPTY)
    low = tl.where(kept == count, low, LOWEST + 1)  # with fewer runs than chunks to choose, maxima bound nothing
    held = tl.sum((b_key_XX >= low).to(tl.int32))
    count = tl.minimum(count, held)  # fewer than were asked for only where logits are NaN
    m_best_XX, low = best(b_key_XX, count, low, held)
    tl.debug_barrier()  # the list of runs has been read by all

    # Which slots hold one of them: of equals to the last key the first are chosen, so that an id decides.
    last = tl.max(tl.where(m_best_XX & (b_key_XX == low), b_id_XX, -1))
    m_hit_XX = (b_held_key_XX > low) | ((b_held_key_XX == low) & (b_held_XX <= last))
    b_used_XX = tl.where(m_hit_XX, step, b_used_XX)

    # Which of them are missing, and which of those are fetched: now, or after attention.
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
            m_now_XX = tl.zeros([KEPT_RUNS, SPAN], tl.int1)
        m_fetch_XX = m_now_XX
        if late > 0:
            m_fetch_XX, _ = best(b_missing_XX, now + late, low, misses)
    b_both_XX = rank(m_now_XX.to(tl.int32) + ((m_fetch_XX & ~m_now_XX).to(tl.int32) << 16))
    o_fetch_XX = tl.where(m_now_XX, b_both_XX & 0xFFFF, now + (b_both_XX >> 16))
    tl.store(p_chunk + o_fetch_XX, b_id_XX, mask=m_fetch_XX)

    # Whose slots they get: both lists are in ascending order, and meet by rank.
    m_victim_XX = tl.zeros([SLOT_ROWS, SLOT_COLS], tl.int1)
    fetched = now + late
    if fetched > 0:
        b_age_XX = tl.where(b_used_XX != step, ~b_used_XX, LOWEST)  # largest where used longest ago
        youngest, free = bounds(b_age_XX)
        m_victim_XX, _ = best(b_age_XX, fetched, youngest, free)
    b_rank_XX = rank(m_victim_XX.to(tl.int32))
    tl.debug_barrier()  # the list is complete
    b_new_XX = tl.load(p_chunk + b_rank_XX, mask=m_victim_XX, other=EMPTY)
    tl.store(p_slot + b_rank_XX, o_slot_XX, mask=m_victim_XX)
    tl.store(p_ids + o_slot_XX, b_new_XX, mask=m_victim_XX)
    tl.store(p_used + o_slot_XX, tl.zeros_like(b_used_XX) + step, mask=m_victim_XX | m_hit_XX)
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


def choose_chunks(
    rows: LayerRows,
    logits_BKGC: Tensor,
    parts_BKGZ2: Tensor,
    keys_BKX: Tensor,
    out: Selection,
    *,
    most: int,
    attend_resident: bool,
) -> None:
    """Choose every row's best chunks, give those that are missing slots, and list what to attend to.

    As ``ops.select`` does: a chunk's score is the maximum over the group of its log-softmax; at most CAP of those
    missing are fetched now and LATE_CAP late. With ``attend_resident`` all slots are attended that hold a chunk
    or get one now, otherwise those of chosen chunks. Resident sets and counters are updated. Rows that select
    nothing get counts of 0.

    Shapes: logits [B, K, G, C] float32, -inf where a chunk cannot be chosen, of any value beyond a row's chunks (a C
    that is a multiple of 16 is read fastest); parts [B, K, G, Z, 2] float32: maximum and sum of
    exp(logit - maximum) of any split of the chunks; keys [B, K, ``ops.splits.choose_width(C)``] int32 is scratch
    memory. ``out`` is contiguous.

    Args:
        most: the most chunks that any row selects; no row selects more than it has slots.

    Raises:
        ShapeError: so many chunks and slots that they cannot be counted.
    """
    batch, kv_heads, group, width = logits_BKGC.shape
    splits, most_slots = parts_BKGZ2.shape[3], out.attend_BKP.shape[2]
    assert keys_BKX.shape[2] >= choose_width(width)
    span = run_chunks(most, width)
    runs = triton.next_power_of_2(max(triton.cdiv(width, span), 16))
    kept = min(triton.next_power_of_2(most), runs)
    if max(kept * span, runs, most_slots) >= 1 << 16:
        raise ShapeError(f"{most} of {width} chunks per KV head, {most_slots} slots: choosing counts to {1 << 16}")
    slots = triton.next_power_of_2(max(most_slots, 16))
    largest = max(kept * span, runs, slots)
    warps = min(max(triton.next_power_of_2(largest // (32 * KEYS_PER_THREAD)), LEAST_WARPS), MOST_WARPS)
    run_rows, run_columns = _matrix(runs, warps)
    slot_rows, slot_columns = _matrix(slots, warps)
    _choose_keys[(triton.cdiv(width, TILE_KEYS), kv_heads, batch)](
        rows.facts_BI,
        logits_BKGC,
        parts_BKGZ2,
        keys_BKX,
        *logits_BKGC.stride()[:3],
        *parts_BKGZ2.stride()[:4],
        *keys_BKX.stride()[:2],
        width,
        splits,
        GROUP=group,
        BLOCK_G=triton.next_power_of_2(group),
        BLOCK_Z=triton.next_power_of_2(splits),
        RUNS=TILE_KEYS // span,
        SPAN=span,
        num_warps=TILE_WARPS,
    )
    _choose_kernel[(kv_heads, batch)](
        rows.address_BX,
        rows.facts_BI,
        keys_BKX,
        out.attend_BKP,
        out.attend_count_BK,
        out.fetch_chunk_BKP,
        out.fetch_slot_BKP,
        out.fetch_count_BK2,
        *keys_BKX.stride()[:2],
        most_slots,
        width,
        SPAN=span,
        RUN_ROWS=run_rows,
        RUN_COLS=run_columns,
        KEPT_RUNS=kept,
        SLOT_ROWS=slot_rows,
        SLOT_COLS=slot_columns,
        ATTEND_RESIDENT=attend_resident,
        num_warps=warps,
    )
