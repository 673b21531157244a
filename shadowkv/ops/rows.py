"""One decode step's rows as a kernel sees them: where each sequence's tensors are, and its lengths.

Sequences are extents of unequal size, so a batched kernel takes no strided tensor of them but a table: for
every row the addresses of one layer's tensors and a few facts. Both tables have fixed places, so a captured
step is replayed after they were rewritten; rows join and leave by what is written into them.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor


class Address(IntEnum):
    """Columns of the address table: byte addresses of one layer's tensors of one sequence, 0 where it has none."""

    K = 0
    """[K, SLOTS, D]: keys after RoPE, by slot."""
    V = 1
    """[K, SLOTS, D]."""
    LANDMARKS = 2
    """[K, CHUNK_CAPACITY, D]."""
    SLOT_OF_CHUNK = 3
    """[K, CHUNK_CAPACITY] int32: resident slot, or EMPTY or OUTLIER (``ops.select``)."""
    RESIDENT_IDS = 4
    """[K, RESIDENT_CHUNKS] int32: the chunk in each slot, or EMPTY."""
    LAST_USED = 5
    """[K, RESIDENT_CHUNKS] int32: the step that chose the slot's chunk last."""
    COEFF = 6
    """[CHUNK_CAPACITY, L, R]."""
    BASIS = 7
    """[K, D, R]."""
    MEAN = 8
    """[K, D] float32."""
    VALUES = 9
    """[K, CHUNK_CAPACITY, L, D], in page-locked host memory or on the device."""
    ROPE_ROWS = 10
    """[capacity] int32: the RoPE row of every position; the same in all layers."""
    COUNTERS = 11
    """[3] int64: hits, misses, fetched chunks."""


class Fact(IntEnum):
    """Columns of the fact table (int32). A row of zeros with a WRITE_SLOT of -1 is padding: it attends to nothing."""

    TOKENS = 0
    """Tokens of the sequence, the new one included, so the new one's position is one less."""
    WRITE_SLOT = 1
    """Where the new token's key and value go, or -1."""
    SLOTS = 2
    """Token slots per KV head in K and V."""
    OUTLIER_TOKENS = 3
    """The first slots, always attended."""
    RESIDENT_CHUNKS = 4
    """Chunk slots after the outliers."""
    RING_START = 5
    """The slot at which the recent window begins."""
    RING_SLOTS = 6
    """Its size; the token at position p is in slot RING_START + p mod RING_SLOTS."""
    FIRST = 7
    """The oldest position that is attended in the window."""
    CHUNKS = 8
    """Chunks of the context that can be selected from; 0 while a sequence is exact."""
    CHUNK_CAPACITY = 9
    SELECT = 10
    """Chunks that a step selects per KV head; never more than can be selected."""
    CAP = 11
    """At most so many of those missing are fetched before attention, best first."""
    LATE_CAP = 12
    """At most so many further ones are fetched after attention, for the next step."""
    STEP = 13
    """Number of the step, for LAST_USED."""
    TOKEN = 14
    """The new token's id."""
    ROPE_ROW = 15
    """The row of RoPE frequencies that the new token is rotated with."""


class RowFacts(NamedTuple):
    """One row of the fact table, in the order of :class:`Fact`; as it stands, a padding row."""

    tokens: int = 0
    write_slot: int = -1
    slots: int = 0
    outlier_tokens: int = 0
    resident_chunks: int = 0
    ring_start: int = 0
    ring_slots: int = 0
    first: int = 0
    chunks: int = 0
    chunk_capacity: int = 0
    select: int = 0
    cap: int = 0
    late_cap: int = 0
    step: int = 0
    token: int = 0
    rope_row: int = 0


@dataclass(frozen=True)
class LayerRows:
    """The tables of one layer. Shapes: address_BX [B, len(Address)] int64, facts_BI [B, len(Fact)] int32."""

    address_BX: Tensor
    facts_BI: Tensor


@dataclass(frozen=True)
class Selection:
    """What choosing leaves for fetching and attention, for B rows; overwritten by every layer.

    Shapes: attend_BKP, fetch_chunk_BKP, fetch_slot_BKP [B, K, P] int32 with P the most resident chunks of any
    row; attend_count_BK [B, K] int32; fetch_count_BK2 [B, K, 2] int32.

    ``attend`` lists the chunk slots to attend to in ascending order. ``fetch_chunk`` and ``fetch_slot`` list the
    chunks to be brought into slots: first those wanted before attention, then those wanted after it;
    ``fetch_count`` says how many of each. Entries beyond the counts are unspecified.
    """

    attend_BKP: Tensor
    attend_count_BK: Tensor
    fetch_chunk_BKP: Tensor
    fetch_slot_BKP: Tensor
    fetch_count_BK2: Tensor
