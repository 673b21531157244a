"""Values of fetched chunks, from page-locked host memory to their slots, read in place over the bus.

A copy needs a program that knows the list, and the list is on the device; so a kernel reads the host's memory
itself. What it takes to fill a PCIe 5 bus (50 GB/s) is some 100 KB in flight, not many programs: a few
persistent ones leave the rest of the device to the keys and to whatever runs beside. Measured for 2 KiB
chunks: 16 programs with 4 chunks in flight each give 50.6 GB/s and 8 give 42; with one chunk in flight it takes
132. 1 KiB chunks need 32 programs with 8 in flight.

The lists of all rows and heads are one: every program sums the counts, and finds an item's list by counting
the cumulative sums that are not beyond it (2,048 lists are 8 numbers per thread). While a tile is on its way,
the next one's addresses are found and its loads are issued too; only then is the first one stored.

Predicted: bytes / 50 GB/s. 14 rows x 8 heads x 8 chunks of 2 KiB: 1.8 MB, 37 us. Measured on an H200 (where copies
reach 55.4 GB/s): 42 us, and 352 us for 77 chunks instead of 8, 50.2 GB/s. 16 to 48 programs with tiles of 4 to
16 KiB give 49.7 to 50.2 GB/s there and 42 to 46 us for the short lists: more in flight changes nothing, so what is
left is how reads by programs use the bus, and 6 us to start and to finish.
"""

import torch
import triton
import triton.language as tl

from shadowkv.ops.rows import LayerRows, Selection
from shadowkv.ops.triton import rows as tr

PROGRAMS = 32
TILE_BYTES = 8192
"""What a program asks for at a time (and has twice in flight): 4 chunks of 2 KiB, 8 of 1 KiB."""
NUM_WARPS = 8


@triton.jit
def _locate(
    p_address, p_facts, p_fetch_chunk, p_fetch_slot, p_fetch_count, i_item, total, cumulative, entries, kv_heads,
    ELEMENT: tl.constexpr, LATE: tl.constexpr, SIZE: tl.constexpr, L: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Where the parts of chunks that these items are lie in VALUES and in V, at which element of the chunk."""
    m_item = i_item < total
    i_chunk = i_item // PARTS
    begun = cumulative[None, :] <= i_chunk[:, None]
    pair = tl.where(m_item, tl.sum(begun.to(tl.int32), axis=1), 0)
    before = tl.max(tl.where(begun, cumulative[None, :], 0), axis=1)
    row, head = pair // kv_heads, (pair % kv_heads).to(tl.int64)
    at = i_chunk - before
    if LATE:
        at += tl.load(p_fetch_count + pair * 2, mask=m_item, other=0)
    i_entry = pair.to(tl.int64) * entries + at
    chunk = tl.load(p_fetch_chunk + i_entry, mask=m_item, other=0)
    slot = tl.load(p_fetch_slot + i_entry, mask=m_item, other=0)
    capacity = tl.load(p_facts + row * tr.FACTS + tr.CHUNK_CAPACITY, mask=m_item, other=0)
    slots = tl.load(p_facts + row * tr.FACTS + tr.SLOTS, mask=m_item, other=0)
    first = tl.load(p_facts + row * tr.FACTS + tr.OUTLIER_TOKENS, mask=m_item, other=0)
    values = tl.load(p_address + row * tr.ADDRESSES + tr.VALUES, mask=m_item, other=0)
    v = tl.load(p_address + row * tr.ADDRESSES + tr.V, mask=m_item, other=0)
    part = (i_item % PARTS) * PART
    o_source = (head * capacity + chunk) * SIZE + part
    o_target = (head * slots + first + slot.to(tl.int64) * L) * (SIZE // L) + part
    p_source = tl.multiple_of(values.to(tl.pointer_type(ELEMENT)) + o_source, 16)
    p_target = tl.multiple_of(v.to(tl.pointer_type(ELEMENT)) + o_target, 16)
    return p_source, p_target, part, m_item


@triton.jit
def _fetch_values(
    p_address, p_facts, p_fetch_chunk, p_fetch_slot, p_fetch_count, entries, kv_heads, pairs,
    ELEMENT: tl.constexpr, LATE: tl.constexpr, SIZE: tl.constexpr, L: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr, ITEMS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    o_pair = tl.arange(0, BLOCK_PAIRS)
    count = tl.load(p_fetch_count + o_pair * 2 + (1 if LATE else 0), mask=o_pair < pairs, other=0)
    cumulative = tl.cumsum(count, axis=0)
    total = tl.sum(count, axis=0) * PARTS
    begin = tl.program_id(0) * ITEMS
    if begin >= total:
        return
    i_item = begin + tl.arange(0, ITEMS)
    o_e = tl.arange(0, PART)[None, :]
    p_source, p_target, part, m_item = _locate(
        p_address, p_facts, p_fetch_chunk, p_fetch_slot, p_fetch_count, i_item, total, cumulative, entries, kv_heads,
        ELEMENT, LATE, SIZE, L, PARTS, PART,
    )  # fmt: skip
    m_tile = m_item[:, None] & (part[:, None] + o_e < SIZE)
    tile = tl.load(p_source[:, None] + o_e, mask=m_tile, other=0.0, eviction_policy="evict_first")
    step = tl.num_programs(0) * ITEMS
    for following in range(begin + step, total + step, step):
        i_item = following + tl.arange(0, ITEMS)
        p_next, p_next_target, part, m_item = _locate(
            p_address, p_facts, p_fetch_chunk, p_fetch_slot, p_fetch_count, i_item, total, cumulative, entries,
            kv_heads, ELEMENT, LATE, SIZE, L, PARTS, PART,
        )  # fmt: skip
        m_next = m_item[:, None] & (part[:, None] + o_e < SIZE)
        next_tile = tl.load(p_next[:, None] + o_e, mask=m_next, other=0.0, eviction_policy="evict_first")
        tl.store(p_target[:, None] + o_e, tile, mask=m_tile)
        tile, p_target, m_tile = next_tile, p_next_target, m_next


def fetch_values(
    rows: LayerRows,
    selection: Selection,
    chunk_tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    late: bool,
) -> None:
    """Copy the values of the chunks on the fetch lists into their slots of V.

    ``late``: those wanted after attention, instead of those wanted before it. Nothing is read of a row whose
    list is empty.
    """
    batch, _, entries = selection.fetch_chunk_BKP.shape
    size = chunk_tokens * head_dim
    part = min(triton.next_power_of_2(size), TILE_BYTES // dtype.itemsize)
    parts = triton.cdiv(size, part)
    items = triton.next_power_of_2(triton.cdiv(TILE_BYTES, min(size, part) * dtype.itemsize))
    _fetch_values[(PROGRAMS,)](
        rows.address_BX,
        rows.facts_BI,
        selection.fetch_chunk_BKP,
        selection.fetch_slot_BKP,
        selection.fetch_count_BK2,
        entries,
        kv_heads,
        batch * kv_heads,
        ELEMENT=tr.ELEMENT[dtype],
        LATE=late,
        SIZE=size,
        L=chunk_tokens,
        PARTS=parts,
        PART=part,
        ITEMS=items,
        BLOCK_PAIRS=triton.next_power_of_2(batch * kv_heads),
        num_warps=NUM_WARPS,
    )
