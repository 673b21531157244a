"""Random sequences of unequal size for kernel cases, with the tables that kernels read them through."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.ops.rows import Address, Fact, LayerRows
from shadowkv.ops.select import EMPTY, OUTLIER


@dataclass(frozen=True)
class RowSpec:
    """One compressed sequence in one layer. Sizes in chunks, but for ``recent_tokens`` and ``window_slots``.

    ``chunks`` 0 is an exact sequence of ``recent_tokens`` tokens; padding is a row without any.
    """

    chunks: int
    outliers: int
    resident: int
    recent_tokens: int
    window_slots: int
    select: int = 0
    cap: int = 1 << 30
    late_cap: int = 0
    spare_chunks: int = 3
    """Capacity beyond ``chunks``."""

    @property
    def padding(self) -> bool:
        return not self.chunks and not self.recent_tokens


@dataclass(frozen=True)
class Sizes:
    """Axes that all rows share."""

    kv_heads: int
    group: int
    head_dim: int
    chunk_tokens: int
    rank: int


STEP = 7
"""The number of the step in every row."""


def make_row(
    spec: RowSpec, sizes: Sizes, device: torch.device, dtype: torch.dtype, gen: torch.Generator
) -> dict[str, Tensor]:
    """One layer's tensors of a sequence, filled at random; what must not be read is NaN.

    The resident set holds as many chunks as fit, but leaves some slots empty when there is more than one.
    """

    def noise(*shape: int) -> Tensor:
        if device.type == "cpu":
            return torch.randn(*shape, generator=gen).to(dtype)
        # Gigabytes for a benchmark, which a host would take minutes to draw.
        own = torch.Generator(device).manual_seed(int(torch.randint(1 << 31, (), generator=gen)))
        return torch.randn(*shape, generator=own, device=device).to(dtype)

    k, d, size = sizes.kv_heads, sizes.head_dim, sizes.chunk_tokens
    capacity = spec.chunks + spec.spare_chunks
    slots = (spec.outliers + spec.resident) * size + spec.window_slots
    ids = torch.full((k, spec.resident), EMPTY, dtype=torch.int32)
    used = torch.full((k, spec.resident), EMPTY, dtype=torch.int32)
    slot_of = torch.full((k, capacity), EMPTY, dtype=torch.int32)
    for head in range(k):
        order = torch.randperm(spec.chunks, generator=gen)
        slot_of[head, order[: spec.outliers]] = OUTLIER
        held = order[spec.outliers :][: spec.resident - (spec.resident > 1)].int()
        ids[head, : len(held)] = held
        slot_of[head, held.long()] = torch.arange(len(held), dtype=torch.int32)
        used[head, : len(held)] = torch.randint(0, STEP, (len(held),), generator=gen, dtype=torch.int32)
    landmarks, coeff = noise(k, capacity, d), noise(capacity, size, sizes.rank)
    values = noise(k, capacity, size, d)
    landmarks[:, spec.chunks :], coeff[spec.chunks :], values[:, spec.chunks :] = (torch.nan,) * 3
    held_k, held_v = noise(k, slots, d), noise(k, slots, d)
    for head in range(k):
        empty = (ids[head] == EMPTY).to(device).repeat_interleave(size)
        region = slice(spec.outliers * size, (spec.outliers + spec.resident) * size)
        held_k[head, region][empty], held_v[head, region][empty] = torch.nan, torch.nan
    return {
        "K": held_k,
        "V": held_v,
        "LANDMARKS": landmarks,
        "SLOT_OF_CHUNK": slot_of.to(device),
        "RESIDENT_IDS": ids.to(device),
        "LAST_USED": used.to(device),
        "COEFF": coeff,
        "BASIS": noise(k, d, sizes.rank) / sizes.rank**0.5,
        "MEAN": noise(k, d).float(),
        "VALUES": values,
        "ROPE_ROWS": torch.zeros(capacity * size + spec.window_slots, dtype=torch.int32, device=device),
        "COUNTERS": torch.zeros(3, dtype=torch.int64, device=device),
    }


def facts_of(spec: RowSpec, sizes: Sizes) -> list[int]:
    """The row's facts; the window holds its tokens from the end of the context on."""
    facts = [0] * len(Fact)
    facts[Fact.WRITE_SLOT] = -1
    if spec.padding:
        return facts
    size = sizes.chunk_tokens
    first, start = spec.chunks * size, (spec.outliers + spec.resident) * size
    facts[Fact.TOKENS] = first + spec.recent_tokens
    facts[Fact.SLOTS] = start + spec.window_slots
    facts[Fact.OUTLIER_TOKENS] = spec.outliers * size
    facts[Fact.RESIDENT_CHUNKS] = spec.resident
    facts[Fact.RING_START], facts[Fact.RING_SLOTS] = start, spec.window_slots
    facts[Fact.WRITE_SLOT] = start + (facts[Fact.TOKENS] - 1) % spec.window_slots
    facts[Fact.FIRST] = first
    facts[Fact.CHUNKS], facts[Fact.CHUNK_CAPACITY] = spec.chunks, spec.chunks + spec.spare_chunks
    facts[Fact.SELECT], facts[Fact.CAP], facts[Fact.LATE_CAP] = spec.select, spec.cap, spec.late_cap
    facts[Fact.STEP] = STEP
    return facts


def make_rows(
    specs: list[RowSpec], sizes: Sizes, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[list[dict[str, Tensor]], LayerRows]:
    """Tensors by row and by the names of :class:`Address`, and the tables. The tensors must be kept alive."""
    gen = torch.Generator().manual_seed(seed)
    rows = [make_row(spec, sizes, device, dtype, gen) for spec in specs]
    address = [
        [0 if spec.padding else row[column.name].data_ptr() for column in Address]
        for spec, row in zip(specs, rows, strict=True)
    ]
    facts = [facts_of(spec, sizes) for spec in specs]
    tables = LayerRows(
        torch.tensor(address, dtype=torch.int64, device=device), torch.tensor(facts, dtype=torch.int32, device=device)
    )
    return rows, tables
