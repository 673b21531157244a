"""The keys of fetched chunks: rebuilt from coefficients, rotated to their positions, in their slots."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shadowkv.ops.contract.base import Op, Outputs, Traffic
from shadowkv.ops.contract.bounds import Bounded
from shadowkv.ops.contract.faults import LEFT_OUT, ONE_OFF, coarse_product, last_zeroed, values_of
from shadowkv.ops.contract.fetches import UNTOUCHED, FetchCase, Fetched, make_selection, make_tables, slots_of
from shadowkv.ops.contract.rotation import ROPE_ROWS, cos_sin, make_rope, turned
from shadowkv.ops.contract.rows import RowSpec, Sizes
from shadowkv.ops.lowrank import rebuild
from shadowkv.ops.rope import Rope
from shadowkv.ops.rows import Address, LayerRows, Selection


@dataclass(frozen=True)
class KeyCase(FetchCase):
    """``rotary_dim`` 0 stands for all of the head's width."""

    rotary_dim: int = 0
    interleaved: bool = False


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

    def reference(self, inputs: KeyInputs) -> Outputs:
        outputs = {f"k of row {i}": held[Address.K] for i, held in enumerate(inputs.tensors)}
        for i, head, fetched, slots_ML in _fetched(inputs):
            held = inputs.tensors[i]
            k_MLD = rebuild(
                held[Address.COEFF][fetched.chunk_M],
                held[Address.BASIS][head].expand(len(fetched.chunk_M), -1, -1),
                held[Address.MEAN][head].expand(len(fetched.chunk_M), -1),
            )
            positions_ML = _positions(inputs, fetched.chunk_M)
            k_MLD = inputs.rope.rotate(k_MLD, positions_ML, held[Address.ROPE_ROWS][positions_ML])
            outputs[f"k of row {i}"][head, slots_ML] = k_MLD.to(inputs.dtype)
        return outputs

    def truth(self, inputs: KeyInputs) -> dict[str, Bounded]:
        """Products of R terms and the mean, turned in float32, rounded once."""
        return self._turned(inputs, _products(inputs))

    def faults(self, inputs: KeyInputs) -> dict[str, Outputs]:
        fewer = [held | {Address.BASIS: last_zeroed(held[Address.BASIS], 2)} for held in inputs.tensors]
        found = {
            LEFT_OUT: values_of(self.truth(replace(inputs, tensors=fewer))),
            ONE_OFF: values_of(self._turned(inputs, _products(inputs), chunks_on=1)),
        }
        coarse = []
        for i, head, fetched, _ in _fetched(inputs):
            factors = inputs.tensors[i][Address.COEFF][fetched.chunk_M], inputs.tensors[i][Address.BASIS][head].mT
            fault, products_MLD = coarse_product(*factors, inputs.dtype)
            coarse.append(Bounded.exact(products_MLD))
        if coarse:
            found[fault] = values_of(self._turned(inputs, coarse))
        return found

    def _turned(self, inputs: KeyInputs, products: list[Bounded], chunks_on: int = 0) -> dict[str, Bounded]:
        """The slots with these keys without their mean, turned as if they stood some chunks further on."""
        found = {f"k of row {i}": Bounded.exact(held[Address.K]) for i, held in enumerate(inputs.tensors)}
        for (i, head, fetched, slots_ML), products_MLD in zip(_fetched(inputs), products, strict=True):
            held = inputs.tensors[i]
            rows_ML = held[Address.ROPE_ROWS][_positions(inputs, fetched.chunk_M)]
            cos, sin = cos_sin(_positions(inputs, fetched.chunk_M + chunks_on), rows_ML, inputs.rope)
            k_MLD = turned(products_MLD + Bounded.exact(held[Address.MEAN][head]), cos, sin, inputs.rope.interleaved)
            found[f"k of row {i}"].put((head, slots_ML), k_MLD.rounded(inputs.dtype))
        return found

    def traffic(self, case: KeyCase, dtype: torch.dtype) -> Traffic:
        sizes, fetched = case.sizes, case.fetched()
        chunks, bases = sum(map(sum, fetched)), sum(n > 0 for row in fetched for n in row)
        moved = chunks * sizes.chunk_tokens * (sizes.rank + sizes.head_dim) + bases * sizes.head_dim * sizes.rank
        flops = 2 * chunks * sizes.chunk_tokens * sizes.rank * sizes.head_dim
        return Traffic(device_bytes=moved * dtype.itemsize, flops=flops)


def _fetched(inputs: KeyInputs) -> Iterator[tuple[int, int, Fetched, Tensor]]:
    """Every fetch list: its row, its KV head, itself, and its token slots [M, L]."""
    for i, (spec, row) in enumerate(zip(inputs.case.specs, inputs.lists, strict=True)):
        for head, fetched in enumerate(row):
            yield i, head, fetched, slots_of(spec, inputs.case.sizes, fetched)


def _positions(inputs: KeyInputs, chunk_M: Tensor) -> Tensor:
    """Of the chunks' tokens, [M, L]."""
    size = inputs.case.sizes.chunk_tokens
    return chunk_M[:, None] * size + torch.arange(size, device=chunk_M.device)


def _products(inputs: KeyInputs) -> list[Bounded]:
    """Coefficients times basis [M, L, D] of every fetch list."""
    found = []
    for i, head, fetched, _ in _fetched(inputs):
        coeff_MLR = Bounded.exact(inputs.tensors[i][Address.COEFF][fetched.chunk_M])
        found.append(coeff_MLR @ Bounded.exact(inputs.tensors[i][Address.BASIS][head].mT))
    return found
