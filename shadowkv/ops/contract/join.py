"""Chunks that leave the recent window join the context, in all layers of several sequences."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.ops.chunks import chunk_means, split_chunks
from shadowkv.ops.contract.base import Op, Outputs, Traffic
from shadowkv.ops.contract.fetches import UNTOUCHED, make_tables
from shadowkv.ops.contract.keys import ROPE_ROWS, make_rope, turned
from shadowkv.ops.contract.rows import RowSpec, Sizes
from shadowkv.ops.lowrank import project
from shadowkv.ops.rope import Rope
from shadowkv.ops.rows import Address

MOST_ROWS = 64
"""Outputs are named by row."""


@dataclass(frozen=True)
class JoinCase:
    """``joins``: by row, how many chunks leave its window; the first of them is the context's next one.

    ``ranks``: by layer, instead of ``sizes.rank``. ``rotary_dim`` 0 stands for all of the head's width.
    """

    specs: tuple[RowSpec, ...]
    joins: tuple[int, ...]
    sizes: Sizes
    ranks: tuple[int, ...]
    rotary_dim: int = 0
    interleaved: bool = False
    rank_multiple: int = 1


@dataclass(frozen=True)
class JoinInputs:
    """``tensors``: by row; all but the counters, means, bases and coefficients have the layers as first axis.

    ``by_layer``: the same by layer and row, as the tables show them.
    """

    case: JoinCase
    address_LBX: Tensor
    facts_BI: Tensor
    first_chunk_B: Tensor
    chunk_count_B: Tensor
    ranks_X: Tensor
    tensors: list[dict[Address, Tensor]]
    by_layer: list[list[dict[Address, Tensor]]]
    rope: Rope
    dtype: torch.dtype

    def leaving(self, row: int) -> tuple[slice, Tensor, Tensor]:
        """The chunks that leave, their positions and their slots."""
        spec, size = self.case.specs[row], self.case.sizes.chunk_tokens
        chunks = slice(spec.chunks, spec.chunks + self.case.joins[row])
        positions_S = torch.arange(chunks.start * size, chunks.stop * size, device=self.facts_BI.device)
        start = (spec.outliers + spec.resident) * size
        return chunks, positions_S, start + positions_S % max(spec.window_slots, 1)


class _Join(Op[JoinCase, JoinInputs]):
    """What both contracts share: the cases and their inputs."""

    def cases(self) -> list[JoinCase]:
        padding, sizes = RowSpec(0, 0, 0, 0, 0), Sizes(2, 1, 64, 8, 0)
        first, exact = RowSpec(7, 2, 3, 41, 48, spare_chunks=6), RowSpec(0, 1, 2, 30, 37, spare_chunks=4)
        other = RowSpec(12, 1, 4, 96, 96, spare_chunks=11)
        wide = RowSpec(150, 1, 2, 130, 192)
        rows, joins = (first, padding, exact, other), (5, 0, 3, 11)
        return [
            JoinCase(rows, joins, sizes, (24, 40, 17)),
            JoinCase(rows, joins, Sizes(3, 1, 80, 4, 0), (40, 16), rotary_dim=32, interleaved=True, rank_multiple=8),
            JoinCase(rows[:2], (1, 0), Sizes(8, 1, 96, 8, 0), (160,), interleaved=True),
            JoinCase((wide,), (2,), Sizes(1, 1, 256, 64, 0), (33,), rotary_dim=64),
            JoinCase(rows, (0, 0, 1, 0), Sizes(5, 1, 128, 8, 0), (65,)),
            JoinCase((first, other), (0, 0), sizes, (16,)),
        ]

    def bench_cases(self) -> list[JoinCase]:
        def case(rows: int) -> JoinCase:
            spec = RowSpec(100, 48, 256, 120, 128, spare_chunks=20)
            ranks = (160,) * 32
            return JoinCase((spec,) * rows, (12,) * rows, Sizes(8, 4, 128, 8, 160), ranks, rank_multiple=16)

        return [case(1), case(14)]

    def make(self, case: JoinCase, device: torch.device, dtype: torch.dtype, seed: int = 0) -> JoinInputs:
        gen = torch.Generator().manual_seed(seed)
        rope = make_rope(case.rotary_dim or case.sizes.head_dim, case.interleaved, device)
        tensors, by_layer = [], []
        for spec in case.specs:
            held, bases = _row(case, spec, device, dtype, gen)
            tensors.append(held)
            by_layer.append([{name: x if name == Address.ROPE_ROWS else x[i] for name, x in held.items()} | more
                             for i, more in enumerate(bases)])  # fmt: skip
        layers = [[row[i] for row in by_layer] for i in range(len(case.ranks))]
        tables = [make_tables(case.specs, case.sizes, rows, device) for rows in layers]
        first_B, count_B, ranks_X = (
            torch.tensor(x, dtype=torch.int32, device=device)
            for x in ([spec.chunks for spec in case.specs], case.joins, case.ranks)
        )
        address_LBX, facts_BI = torch.stack([table.address_BX for table in tables]), tables[0].facts_BI
        inputs = JoinInputs(case, address_LBX, facts_BI, first_B, count_B, ranks_X, tensors, layers, rope, dtype)
        for i, held in enumerate(tensors):
            _, _, slots_S = inputs.leaving(i)
            for name in (Address.K, Address.V):
                shape = (*held[name].shape[:2], len(slots_S), case.sizes.head_dim)
                held[name][:, :, slots_S] = torch.randn(shape, generator=gen).to(device, dtype)
        return inputs

    def _chunk_bytes(self, case: JoinCase, dtype: torch.dtype) -> int:
        """Of the keys, or of the values, that leave in all layers."""
        sizes = case.sizes
        per_chunk = sizes.kv_heads * sizes.chunk_tokens * sizes.head_dim
        return sum(case.joins) * len(case.ranks) * per_chunk * dtype.itemsize


def _row(
    case: JoinCase, spec: RowSpec, device: torch.device, dtype: torch.dtype, gen: torch.Generator
) -> tuple[dict[Address, Tensor], list[dict[Address, Tensor]]]:
    """Tensors with a layer axis, and those that each layer has of its own shape."""
    sizes, layers, capacity = case.sizes, len(case.ranks), spec.chunks + spec.spare_chunks
    k, size, d = sizes.kv_heads, sizes.chunk_tokens, sizes.head_dim
    slots = (spec.outliers + spec.resident) * size + spec.window_slots
    rope_rows = torch.randint(0, ROPE_ROWS, (capacity * size + 1,), generator=gen, dtype=torch.int32)
    pinned = device.type == "cuda"
    store = torch.full((layers, k, capacity, size, d), UNTOUCHED, dtype=dtype, pin_memory=pinned)
    held = {
        Address.K: torch.full((layers, k, slots, d), torch.nan, dtype=dtype, device=device),
        Address.V: torch.full((layers, k, slots, d), torch.nan, dtype=dtype, device=device),
        Address.LANDMARKS: torch.full((layers, k, capacity, d), UNTOUCHED, dtype=dtype, device=device),
        Address.VALUES: store,
        Address.ROPE_ROWS: rope_rows.to(device),
    }
    bases = [
        {
            Address.COEFF: torch.full((capacity, size, rank), UNTOUCHED, dtype=dtype, device=device),
            Address.BASIS: (torch.randn(k, d, rank, generator=gen) / (k * d) ** 0.5).to(device, dtype),
            Address.MEAN: torch.randn(k, d, generator=gen).to(device),
        }
        for rank in case.ranks
    ]
    return held, bases


class JoinContext(_Join):
    """Coefficients and values."""

    name = "join_context"
    source = "ops.rope.Rope.unrotate and ops.lowrank.project, as in cache.shadowkv, _join_context"
    exact = frozenset(f"values of row {i}" for i in range(MOST_ROWS))

    def run(self, inputs: JoinInputs) -> Outputs:
        from shadowkv.ops.triton.join import join_context

        case, sizes = inputs.case, inputs.case.sizes
        join_context(
            inputs.address_LBX,
            inputs.facts_BI,
            inputs.first_chunk_B,
            inputs.chunk_count_B,
            inputs.ranks_X,
            max(case.ranks),
            inputs.rope.table,
            sizes.chunk_tokens,
            sizes.kv_heads,
            sizes.head_dim,
            inputs.dtype,
            max(case.joins),
            case.rank_multiple,
        )
        if inputs.facts_BI.is_cuda:
            torch.cuda.synchronize(inputs.facts_BI.device)  # the values are on the host
        return self._outputs(inputs, inputs.dtype)

    def reference(self, inputs: JoinInputs, dtype: torch.dtype) -> Outputs:
        outputs = self._outputs(inputs, dtype)
        sizes = inputs.case.sizes
        for i in range(len(inputs.case.specs)):
            chunks, positions_S, slots_S = inputs.leaving(i)
            if chunks.start == chunks.stop:
                continue
            for j, rows in enumerate(inputs.by_layer):
                held = rows[i]
                rope_rows_S = held[Address.ROPE_ROWS][positions_S]
                k_pre_KSD = turned(
                    held[Address.K][:, slots_S].to(dtype), positions_S, rope_rows_S, inputs.rope, back=True
                )
                k_pre_SKD = k_pre_KSD.transpose(0, 1)
                if dtype == torch.float64:
                    basis_XR = held[Address.BASIS].flatten(0, 1).double()
                    coeff_SR = (k_pre_SKD - held[Address.MEAN].double()).flatten(1) @ basis_XR
                else:
                    coeff_SR = project(k_pre_SKD, held[Address.BASIS], held[Address.MEAN])
                coeff_CLR = coeff_SR.reshape(-1, sizes.chunk_tokens, coeff_SR.shape[1])
                outputs[f"coefficients of row {i}, layer {j}"][chunks] = coeff_CLR
                v_KSD = held[Address.V][:, slots_S]
                v_KCLD = split_chunks(v_KSD, sizes.chunk_tokens)
                values_KCLD = outputs[f"values of row {i}"][j]
                values_KCLD[:, chunks] = v_KCLD.to(values_KCLD)
        return outputs

    def _outputs(self, inputs: JoinInputs, dtype: torch.dtype) -> Outputs:
        outputs = {f"values of row {i}": held[Address.VALUES].to(dtype) for i, held in enumerate(inputs.tensors)}
        for j, rows in enumerate(inputs.by_layer):
            for i, held in enumerate(rows):
                outputs[f"coefficients of row {i}, layer {j}"] = held[Address.COEFF].to(dtype)
        return outputs

    def traffic(self, case: JoinCase, dtype: torch.dtype) -> Traffic:
        sizes, chunk_bytes, ranks = case.sizes, self._chunk_bytes(case, dtype), sum(case.ranks)
        tokens, width = sum(case.joins) * sizes.chunk_tokens, sizes.kv_heads * sizes.head_dim
        moved = ranks * (tokens + width * sum(n > 0 for n in case.joins)) * dtype.itemsize
        return Traffic(moved + 2 * chunk_bytes, bus_bytes=chunk_bytes, flops=2 * tokens * width * ranks)


class WriteLandmarks(_Join):
    """Means of the keys of the same chunks."""

    name = "write_landmarks"
    source = "ops.chunks.chunk_means, as in cache.index, Landmarks.write"

    def run(self, inputs: JoinInputs) -> Outputs:
        from shadowkv.ops.triton.join import write_landmarks

        sizes = inputs.case.sizes
        shape = (sizes.chunk_tokens, sizes.kv_heads, sizes.head_dim)
        tables = (inputs.address_LBX, inputs.facts_BI, inputs.first_chunk_B, inputs.chunk_count_B)
        write_landmarks(*tables, *shape, inputs.dtype, max(inputs.case.joins))
        return {f"landmarks of row {i}": held[Address.LANDMARKS] for i, held in enumerate(inputs.tensors)}

    def reference(self, inputs: JoinInputs, dtype: torch.dtype) -> Outputs:
        outputs = {}
        for i, held in enumerate(inputs.tensors):
            chunks, _, slots_S = inputs.leaving(i)
            landmarks = held[Address.LANDMARKS].to(dtype)
            for j, k_KED in enumerate(held[Address.K].to(dtype)):
                k_KCLD = split_chunks(k_KED[:, slots_S], inputs.case.sizes.chunk_tokens)
                landmarks[j, :, chunks] = k_KCLD.mean(2) if dtype == torch.float64 else chunk_means(k_KCLD)
            outputs[f"landmarks of row {i}"] = landmarks
        return outputs

    def traffic(self, case: JoinCase, dtype: torch.dtype) -> Traffic:
        read = self._chunk_bytes(case, dtype)
        return Traffic(read + read // case.sizes.chunk_tokens)
