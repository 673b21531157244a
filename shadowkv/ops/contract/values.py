"""The values of fetched chunks, from the host's memory into their slots."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shadowkv.ops.contract.base import Op, Outputs, Traffic
from shadowkv.ops.contract.faults import LEFT_OUT, ONE_OFF
from shadowkv.ops.contract.fetches import UNTOUCHED, FetchCase, Fetched, make_selection, make_tables, slots_of
from shadowkv.ops.contract.rows import RowSpec, Sizes
from shadowkv.ops.rows import Address, LayerRows, Selection

MOST_ROWS = 64
"""Outputs are named by row."""


@dataclass(frozen=True)
class ValueInputs:
    """By row: VALUES [K, C, L, D], in page-locked memory beside a GPU, and V [K, SLOTS, D]."""

    case: FetchCase
    rows: LayerRows
    selection: Selection
    lists: list[list[Fetched]]
    values_KCLD: list[Tensor]
    v_KED: list[Tensor]
    dtype: torch.dtype


class FetchValues(Op[FetchCase, ValueInputs]):
    """See the module."""

    name = "fetch_values"
    source = "cache.shadowkv, _fetch"
    exact = frozenset(f"v of row {i}" for i in range(MOST_ROWS))

    def cases(self) -> list[FetchCase]:
        small, padding = Sizes(2, 1, 64, 8, 8), RowSpec(0, 0, 0, 0, 0)
        exact = RowSpec(0, 0, 0, 5, 24)
        rows = (RowSpec(40, 3, 9, 5, 24), padding, RowSpec(7, 0, 4, 30, 32), exact, RowSpec(12, 2, 6, 1, 16))
        many = tuple(RowSpec(20, 1, 7, 3, 16) if i % 3 else padding for i in range(13))
        return [
            FetchCase(rows, small, 6, 3),
            FetchCase(rows, small, 6, 3, late=True),
            FetchCase(rows, Sizes(3, 1, 80, 4, 8), 9, full=True),
            FetchCase(rows[:1], Sizes(1, 1, 96, 8, 8), 2, 3, late=True),
            FetchCase(rows[:3], Sizes(1, 1, 256, 64, 8), 3),
            FetchCase(many, Sizes(5, 1, 128, 8, 8), 3, 2),
            FetchCase(rows, small, 0),
            FetchCase((padding,), small, 4),
        ]

    def bench_cases(self) -> list[FetchCase]:
        def case(rows: int, now: int, tokens: int = 8, chunks: int = 16381) -> FetchCase:
            return FetchCase((RowSpec(chunks, 48, 256, 30, 64),) * rows, Sizes(8, 4, 128, tokens, 160), now, full=True)

        return [case(1, 77), case(14, 8), case(14, 77), case(14, 16, tokens=4, chunks=32765)]

    def make(self, case: FetchCase, device: torch.device, dtype: torch.dtype, seed: int = 0) -> ValueInputs:
        sizes = case.sizes
        gen = torch.Generator(device).manual_seed(seed)
        selection, lists = make_selection(case, device, seed)
        values, v = [], []
        for spec, row in zip(case.specs, lists, strict=True):
            shape = (sizes.kv_heads, spec.chunks + spec.spare_chunks, sizes.chunk_tokens, sizes.head_dim)
            at_store = torch.full(shape, torch.nan, dtype=dtype, pin_memory=device.type == "cuda")
            for head, fetched in enumerate(row):
                noise_MLD = torch.randn(len(fetched.chunk_M), *shape[2:], generator=gen, device=device)
                at_store[head, fetched.chunk_M.cpu()] = noise_MLD.to("cpu", dtype)
            values.append(at_store)
            slots = (spec.outliers + spec.resident) * sizes.chunk_tokens + spec.window_slots
            v.append(torch.full((sizes.kv_heads, slots, sizes.head_dim), UNTOUCHED, dtype=dtype, device=device))
        tensors = [{Address.VALUES: a, Address.V: b} for a, b in zip(values, v, strict=True)]
        rows = make_tables(case.specs, sizes, tensors, device)
        return ValueInputs(case, rows, selection, lists, values, v, dtype)

    def run(self, inputs: ValueInputs) -> Outputs:
        from shadowkv.ops.triton.values import fetch_values

        sizes = inputs.case.sizes
        shape = (sizes.chunk_tokens, sizes.kv_heads, sizes.head_dim)
        fetch_values(inputs.rows, inputs.selection, *shape, inputs.dtype, inputs.case.late)
        return {f"v of row {i}": v_KED for i, v_KED in enumerate(inputs.v_KED)}

    def reference(self, inputs: ValueInputs) -> Outputs:
        outputs = {}
        for i, (spec, row) in enumerate(zip(inputs.case.specs, inputs.lists, strict=True)):
            v_KED = inputs.v_KED[i].clone()
            for head, fetched in enumerate(row):
                v_MLD = inputs.values_KCLD[i][head, fetched.chunk_M.cpu()].to(v_KED.device)
                v_KED[head, slots_of(spec, inputs.case.sizes, fetched)] = v_MLD
            outputs[f"v of row {i}"] = v_KED
        return outputs

    def faults(self, inputs: ValueInputs) -> dict[str, Outputs]:
        fewer = [[Fetched(fetched.chunk_M[1:], fetched.slot_M[1:]) for fetched in row] for row in inputs.lists]
        beside = [values.roll(1, 1) for values in inputs.values_KCLD]
        return {
            LEFT_OUT: self.reference(replace(inputs, lists=fewer)),
            ONE_OFF: self.reference(replace(inputs, values_KCLD=beside)),
        }

    def traffic(self, case: FetchCase, dtype: torch.dtype) -> Traffic:
        chunk_bytes = case.sizes.chunk_tokens * case.sizes.head_dim * dtype.itemsize
        moved = sum(map(sum, case.fetched())) * chunk_bytes
        return Traffic(device_bytes=moved, bus_bytes=moved)
