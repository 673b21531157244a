"""The keys of fetched chunks: rebuilt from coefficients, rotated to their positions, in their slots."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.ops.contract.base import Op, Outputs, Traffic
from shadowkv.ops.contract.fetches import UNTOUCHED, FetchCase, Fetched, make_selection, make_tables, slots_of
from shadowkv.ops.contract.rows import RowSpec, Sizes
from shadowkv.ops.lowrank import rebuild
from shadowkv.ops.rope import Rope
from shadowkv.ops.rows import Address, LayerRows, Selection

ROPE_ROWS = 3


@dataclass(frozen=True)
class KeyCase(FetchCase):
    """``rotary_dim`` 0 stands for all of the head's width."""

    rotary_dim: int = 0
    interleaved: bool = False


def make_rope(rotary_dim: int, interleaved: bool, device: torch.device) -> Rope:
    """Several rows, each with frequencies and a factor of its own."""

    def frequencies(length: int) -> tuple[Tensor, float]:
        exponents_F = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return 1.0 / (10000.0 * (1 + length)) ** exponents_F, 1 + 0.3 * length

    rope = Rope(frequencies, lambda length: length, rotary_dim=rotary_dim, interleaved=interleaved, device=device)
    for length in range(ROPE_ROWS):
        rope.row(length)
    return rope


def turned(x: Tensor, positions: Tensor, rows: Tensor, rope: Rope, *, back: bool = False) -> Tensor:
    """``Rope.rotate`` (or ``unrotate``) for float64 too, where only the angles are float32's, as models make them."""
    if x.dtype != torch.float64:
        return rope.unrotate(x, positions, rows) if back else rope.rotate(x, positions, rows)
    table, rows = rope.table, rows.long()
    angles = (positions.float()[..., None] * table.inv_freq_XF[rows]).double()
    pairs = torch.polar(table.factor_X[rows].double()[..., None].expand_as(angles).contiguous(), angles)
    rotary, rest = x[..., : table.rotary_dim], x[..., table.rotary_dim :]
    half = table.rotary_dim // 2
    layout = (half, 2) if table.interleaved else (2, half)
    axis = -1 if table.interleaved else -2
    a, b = rotary.reshape(*x.shape[:-1], *layout).unbind(axis)
    out = torch.complex(a, b) / pairs if back else torch.complex(a, b) * pairs
    return torch.cat([torch.stack([out.real, out.imag], axis).flatten(-2), rest], -1)


@dataclass(frozen=True)
class KeyInputs:
    """``tensors``: by row, what the table points to."""

    case: KeyCase
    rows: LayerRows
    selection: Selection
    lists: list[list[Fetched]]
    tensors: list[dict[Address, Tensor]]
    rope: Rope
    dtype: torch.dtype


class RebuildKeys(Op[KeyCase, KeyInputs]):
    """See the module."""

    name = "rebuild_keys"
    source = "ops.lowrank.rebuild and ops.rope.Rope.rotate, as in cache.shadowkv, _fetch"

    def cases(self) -> list[KeyCase]:
        padding, exact = RowSpec(0, 0, 0, 0, 0), RowSpec(0, 0, 0, 5, 24)
        rows = (RowSpec(40, 3, 9, 5, 24), padding, RowSpec(7, 0, 4, 30, 32), exact, RowSpec(12, 2, 6, 1, 16))
        far = (RowSpec(16380, 1, 9, 5, 24),)  # positions up to a million
        return [
            KeyCase(rows, Sizes(2, 1, 64, 8, 24), 6, 3),
            KeyCase(rows, Sizes(2, 1, 64, 8, 24), 6, 3, late=True, interleaved=True),
            KeyCase(rows, Sizes(3, 1, 80, 4, 40), 9, full=True, rotary_dim=32, interleaved=True),
            KeyCase(rows[:3], Sizes(1, 1, 96, 16, 17), 9, 2),
            KeyCase(rows[:1], Sizes(2, 1, 128, 8, 160), 4, full=True),
            KeyCase(far, Sizes(1, 1, 256, 64, 33), 2, 7, late=True, rotary_dim=64),
            KeyCase(far, Sizes(1, 1, 64, 64, 16), 3, full=True),
            KeyCase(rows, Sizes(1, 1, 64, 8, 512), 0),
        ]

    def bench_cases(self) -> list[KeyCase]:
        def case(rows: int, now: int) -> KeyCase:
            return KeyCase((RowSpec(15616, 48, 256, 30, 64),) * rows, Sizes(8, 4, 128, 8, 160), now, full=True)

        return [case(1, 8), case(14, 8), case(14, 77), case(48, 8), case(48, 77)]

    def make(self, case: KeyCase, device: torch.device, dtype: torch.dtype, seed: int = 0) -> KeyInputs:
        sizes = case.sizes
        gen = torch.Generator().manual_seed(seed)
        selection, lists = make_selection(case, device, seed)
        tensors = []
        for spec, row in zip(case.specs, lists, strict=True):
            capacity = spec.chunks + spec.spare_chunks
            coeff = torch.full((capacity, sizes.chunk_tokens, sizes.rank), torch.nan, dtype=dtype, device=device)
            wanted = torch.unique(torch.cat([fetched.chunk_M for fetched in row]))
            noise = torch.randn(len(wanted), *coeff.shape[1:], generator=gen)
            coeff[wanted] = noise.to(device, dtype)
            shape = (sizes.kv_heads, sizes.head_dim, sizes.rank)
            slots = (spec.outliers + spec.resident) * sizes.chunk_tokens + spec.window_slots
            rope_rows = torch.randint(0, ROPE_ROWS, (capacity * sizes.chunk_tokens,), generator=gen, dtype=torch.int32)
            tensors.append(
                {
                    Address.COEFF: coeff,
                    Address.BASIS: (torch.randn(shape, generator=gen) / sizes.rank**0.5).to(device, dtype),
                    Address.MEAN: torch.randn(shape[:2], generator=gen).to(device),
                    Address.ROPE_ROWS: rope_rows.to(device),
                    Address.K: torch.full((shape[0], slots, shape[1]), UNTOUCHED, dtype=dtype, device=device),
                }
            )
        rope = make_rope(case.rotary_dim or sizes.head_dim, case.interleaved, device)
        rows = make_tables(case.specs, sizes, tensors, device)
        return KeyInputs(case, rows, selection, lists, tensors, rope, dtype)

    def run(self, inputs: KeyInputs) -> Outputs:
        from shadowkv.ops.triton.keys import rebuild_keys

        sizes = inputs.case.sizes
        shape = (sizes.rank, sizes.chunk_tokens, sizes.kv_heads, sizes.head_dim)
        rebuild_keys(inputs.rows, inputs.selection, inputs.rope.table, *shape, inputs.dtype, inputs.case.late)
        return {f"k of row {i}": held[Address.K] for i, held in enumerate(inputs.tensors)}

    def reference(self, inputs: KeyInputs, dtype: torch.dtype) -> Outputs:
        outputs, size = {}, inputs.case.sizes.chunk_tokens
        for i, (spec, row) in enumerate(zip(inputs.case.specs, inputs.lists, strict=True)):
            held = inputs.tensors[i]
            k_KED = held[Address.K].to(dtype)
            for head, fetched in enumerate(row):
                factors = (
                    held[Address.COEFF][fetched.chunk_M],
                    held[Address.BASIS][head].expand(len(fetched.chunk_M), -1, -1),
                    held[Address.MEAN][head].expand(len(fetched.chunk_M), -1),
                )
                if dtype == torch.float64:
                    coeff, basis, mean = (x.double() for x in factors)
                    k_MLD = coeff @ basis.mT + mean[:, None]
                else:
                    k_MLD = rebuild(*factors)
                positions_ML = fetched.chunk_M[:, None] * size + torch.arange(size, device=k_KED.device)
                k_MLD = turned(k_MLD, positions_ML, held[Address.ROPE_ROWS][positions_ML], inputs.rope)
                k_KED[head, slots_of(spec, inputs.case.sizes, fetched)] = k_MLD.to(dtype)
            outputs[f"k of row {i}"] = k_KED
        return outputs

    def traffic(self, case: KeyCase, dtype: torch.dtype) -> Traffic:
        sizes, fetched = case.sizes, case.fetched()
        chunks, bases = sum(map(sum, fetched)), sum(n > 0 for row in fetched for n in row)
        moved = chunks * sizes.chunk_tokens * (sizes.rank + sizes.head_dim) + bases * sizes.head_dim * sizes.rank
        flops = 2 * chunks * sizes.chunk_tokens * sizes.rank * sizes.head_dim
        return Traffic(device_bytes=moved * dtype.itemsize, flops=flops)
