"""The columns of ``ops.rows`` as constants that kernels can read, and how to read them."""

import torch
import triton
import triton.language as tl

from shadowkv.ops.rows import Address, Fact

ADDRESSES = tl.constexpr(len(Address))
FACTS = tl.constexpr(len(Fact))

K = tl.constexpr(Address.K.value)
V = tl.constexpr(Address.V.value)
LANDMARKS = tl.constexpr(Address.LANDMARKS.value)
SLOT_OF_CHUNK = tl.constexpr(Address.SLOT_OF_CHUNK.value)
RESIDENT_IDS = tl.constexpr(Address.RESIDENT_IDS.value)
LAST_USED = tl.constexpr(Address.LAST_USED.value)
COEFF = tl.constexpr(Address.COEFF.value)
BASIS = tl.constexpr(Address.BASIS.value)
MEAN = tl.constexpr(Address.MEAN.value)
VALUES = tl.constexpr(Address.VALUES.value)
ROPE_ROWS = tl.constexpr(Address.ROPE_ROWS.value)
COUNTERS = tl.constexpr(Address.COUNTERS.value)

TOKENS = tl.constexpr(Fact.TOKENS.value)
WRITE_SLOT = tl.constexpr(Fact.WRITE_SLOT.value)
SLOTS = tl.constexpr(Fact.SLOTS.value)
OUTLIER_TOKENS = tl.constexpr(Fact.OUTLIER_TOKENS.value)
RESIDENT_CHUNKS = tl.constexpr(Fact.RESIDENT_CHUNKS.value)
RING_START = tl.constexpr(Fact.RING_START.value)
RING_SLOTS = tl.constexpr(Fact.RING_SLOTS.value)
FIRST = tl.constexpr(Fact.FIRST.value)
CHUNKS = tl.constexpr(Fact.CHUNKS.value)
CHUNK_CAPACITY = tl.constexpr(Fact.CHUNK_CAPACITY.value)
SELECT = tl.constexpr(Fact.SELECT.value)
CAP = tl.constexpr(Fact.CAP.value)
LATE_CAP = tl.constexpr(Fact.LATE_CAP.value)
STEP = tl.constexpr(Fact.STEP.value)
TOKEN = tl.constexpr(Fact.TOKEN.value)
ROPE_ROW = tl.constexpr(Fact.ROPE_ROW.value)

ELEMENT = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""Triton's names of the dtypes that models run in."""


@triton.jit
def fact(p_facts, row, column: tl.constexpr):
    """One fact of a row (int32)."""
    return tl.load(p_facts + row * FACTS + column)


@triton.jit
def tensor_of(p_address, row, column: tl.constexpr, element: tl.constexpr):
    """A pointer to one of a row's tensors. Sequences are aligned to 256 bytes, layers inside them to 16."""
    address = tl.load(p_address + row * ADDRESSES + column)
    # On the pointer and in here: Triton 3.6 forgets the hint at a cast, and drops one that is put on a call.
    return tl.multiple_of(address.to(tl.pointer_type(element)), 16)
