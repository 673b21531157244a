"""Random fetch lists for kernel cases: which chunks of which rows are to be brought into which slots."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.ops.contract.rows import RowSpec, Sizes, facts_of
from shadowkv.ops.rows import Address, LayerRows, Selection

BEYOND = 1 << 30
"""In entries beyond the counts: a chunk or slot that no row has."""
UNTOUCHED = 0.5
"""In slots that nothing is to be written to; finite, so that whole tensors can be compared."""


@dataclass(frozen=True)
class FetchCase:
    """Rows, and at most so many chunks per row and KV head wanted before and after attention.

    ``late`` says which of them are fetched. ``full``: every list is as long as it may be.
    """

    specs: tuple[RowSpec, ...]
    sizes: Sizes
    now: int
    after: int = 0
    late: bool = False
    full: bool = False

    def counts(self) -> list[list[tuple[int, int]]]:
        """By row and KV head: how many are wanted before attention, and how many after it."""
        gen = torch.Generator().manual_seed(1)

        def some(most: int) -> int:
            return most if self.full else int(torch.randint(0, most + 1, (1,), generator=gen))

        counts = []
        for spec in self.specs:
            room = min(spec.resident, spec.chunks - spec.outliers) if spec.chunks else 0
            now = [some(min(self.now, room)) for _ in range(self.sizes.kv_heads)]
            counts.append([(n, some(min(self.after, room - n))) for n in now])
        return counts

    def fetched(self) -> list[list[int]]:
        """By row and KV head: how many are fetched."""
        return [[pair[self.late] for pair in row] for row in self.counts()]


@dataclass(frozen=True)
class Fetched:
    """The chunks of one row and KV head that are fetched, and their slots (int64, on the rows' device)."""

    chunk_M: Tensor
    slot_M: Tensor


def make_selection(case: FetchCase, device: torch.device, seed: int) -> tuple[Selection, list[list[Fetched]]]:
    """The fetch lists as kernels see them, and by row and KV head."""
    gen = torch.Generator().manual_seed(seed)
    batch, heads = len(case.specs), case.sizes.kv_heads
    entries = max(max(spec.resident for spec in case.specs), 1)
    chunk_BKP = torch.full((batch, heads, entries), BEYOND, dtype=torch.int32)
    slot_BKP = torch.full((batch, heads, entries), BEYOND, dtype=torch.int32)
    lists = []
    for b, (spec, counts) in enumerate(zip(case.specs, case.counts(), strict=True)):
        row = []
        for k, (now, after) in enumerate(counts):
            total = now + after
            chunk_BKP[b, k, :total] = torch.randperm(spec.chunks, generator=gen)[:total].int()
            slot_BKP[b, k, :total] = torch.randperm(spec.resident, generator=gen)[:total].int()
            part = slice(now, total) if case.late else slice(now)
            row.append(Fetched(chunk_BKP[b, k, part].long().to(device), slot_BKP[b, k, part].long().to(device)))
        lists.append(row)
    count_BK2 = torch.tensor(case.counts(), dtype=torch.int32, device=device)
    unread_BK = torch.full((batch, heads), BEYOND, dtype=torch.int32, device=device)
    unread_BKP = torch.full_like(chunk_BKP, BEYOND, device=device)
    return Selection(unread_BKP, unread_BK, chunk_BKP.to(device), slot_BKP.to(device), count_BK2), lists


def make_tables(
    specs: tuple[RowSpec, ...], sizes: Sizes, tensors: list[dict[Address, Tensor]], device: torch.device
) -> LayerRows:
    """The tables of rows that have only these tensors. The tensors must be kept alive."""
    address = [
        [held[column].data_ptr() if column in held and not spec.padding else 0 for column in Address]
        for spec, held in zip(specs, tensors, strict=True)
    ]
    facts = [facts_of(spec, sizes) for spec in specs]
    return LayerRows(
        torch.tensor(address, dtype=torch.int64, device=device), torch.tensor(facts, dtype=torch.int32, device=device)
    )


def slots_of(spec: RowSpec, sizes: Sizes, fetched: Fetched) -> Tensor:
    """The token slots [M, L] of the fetched chunks."""
    offsets_L = torch.arange(sizes.chunk_tokens, device=fetched.slot_M.device)
    return (spec.outliers + fetched.slot_M)[:, None] * sizes.chunk_tokens + offsets_L
