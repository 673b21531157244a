"""Chunks that leave the recent window join the context, in all layers of several sequences."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.ops.chunks import chunk_means, split_chunks
from shadowkv.ops.contract.base import Op, Outputs, Traffic
from shadowkv.ops.contract.bounds import Bounded
from shadowkv.ops.contract.faults import (
    LEFT_OUT,
    NARROW_SUM,
    ONE_OFF,
    coarse_product,
    last_zeroed,
    narrow_sum,
    values_of,
)
from shadowkv.ops.contract.fetches import UNTOUCHED, make_tables
from shadowkv.ops.contract.rotation import ROPE_ROWS, make_rope, turned_back
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
        return self._outputs(inputs)

    def reference(self, inputs: JoinInputs) -> Outputs:
        outputs = self._outputs(inputs)
        for i, j, held in _joining(inputs):
            chunks, positions_S, slots_S = inputs.leaving(i)
            rope_rows_S = held[Address.ROPE_ROWS][positions_S]
            k_pre_KSD = inputs.rope.unrotate(held[Address.K][:, slots_S], positions_S, rope_rows_S)
            coeff_SR = project(k_pre_KSD.transpose(0, 1), held[Address.BASIS], held[Address.MEAN])
            outputs[f"coefficients of row {i}, layer {j}"][chunks] = self._by_chunk(inputs, coeff_SR)
            v_KCLD = split_chunks(held[Address.V][:, slots_S], inputs.case.sizes.chunk_tokens)
            outputs[f"values of row {i}"][j][:, chunks] = v_KCLD.cpu()
        return outputs

    def truth(self, inputs: JoinInputs) -> dict[str, Bounded]:
        """Keys turned back in float32 and centred, rounded to the storage dtype; products of K*D terms."""
        return self._coefficients(inputs, [x_SX @ basis_XR for x_SX, basis_XR in _factors(inputs)])

    def faults(self, inputs: JoinInputs) -> dict[str, Outputs]:
        plain, factors = self.reference(inputs), _factors(inputs)
        fewer = [x_SX @ basis_XR.moved(lambda x: last_zeroed(x, 0)) for x_SX, basis_XR in factors]
        beside = [x_SX @ basis_XR for x_SX, basis_XR in _factors(inputs, chunks_on=1)]
        found = {
            LEFT_OUT: plain | values_of(self._coefficients(inputs, fewer)),
            ONE_OFF: plain | values_of(self._coefficients(inputs, beside)),
            f"{ONE_OFF}, of the values": {name: x.roll(1, 2) if name in self.exact else x for name, x in plain.items()},
        }
        coarse = []
        for x_SX, basis_XR in factors:
            stored_SX = x_SX.value.to(inputs.dtype)
            fault, coeff_SR = coarse_product(stored_SX, basis_XR.value, inputs.dtype)
            coarse.append(Bounded.exact(coeff_SR))
        if coarse:
            found[fault] = plain | values_of(self._coefficients(inputs, coarse))
        return found

    def _coefficients(self, inputs: JoinInputs, products: list[Bounded]) -> dict[str, Bounded]:
        """All outputs that are not exact, with these coefficients of the chunks that join."""
        found = {name: Bounded.exact(x) for name, x in self._outputs(inputs).items() if name not in self.exact}
        for (i, j, _), coeff_SR in zip(_joining(inputs), products, strict=True):
            stored = coeff_SR.rounded(inputs.dtype).moved(lambda x: self._by_chunk(inputs, x))
            found[f"coefficients of row {i}, layer {j}"].put(inputs.leaving(i)[0], stored)
        return found

    def _by_chunk(self, inputs: JoinInputs, coeff_SR: Tensor) -> Tensor:
        return coeff_SR.reshape(-1, inputs.case.sizes.chunk_tokens, coeff_SR.shape[1])

    def _outputs(self, inputs: JoinInputs) -> Outputs:
        outputs = {f"values of row {i}": held[Address.VALUES] for i, held in enumerate(inputs.tensors)}
        for j, rows in enumerate(inputs.by_layer):
            for i, held in enumerate(rows):
                outputs[f"coefficients of row {i}, layer {j}"] = held[Address.COEFF]
        return outputs

    def traffic(self, case: JoinCase, dtype: torch.dtype) -> Traffic:
        sizes, chunk_bytes, ranks = case.sizes, self._chunk_bytes(case, dtype), sum(case.ranks)
        tokens, width = sum(case.joins) * sizes.chunk_tokens, sizes.kv_heads * sizes.head_dim
        moved = ranks * (tokens + width * sum(n > 0 for n in case.joins)) * dtype.itemsize
        return Traffic(moved + 2 * chunk_bytes, bus_bytes=chunk_bytes, flops=2 * tokens * width * ranks)


def _joining(inputs: JoinInputs) -> Iterator[tuple[int, int, dict[Address, Tensor]]]:
    """Every row and layer that something leaves the window of, with its tensors."""
    for j, rows in enumerate(inputs.by_layer):
        for i, joins in enumerate(inputs.case.joins):
            if joins:
                yield i, j, rows[i]


def _factors(inputs: JoinInputs, chunks_on: int = 0) -> list[tuple[Bounded, Bounded]]:
    """By row and layer the keys [S, K*D], turned back from some chunks further on, and the basis [K*D, R]."""
    found = []
    for i, _, held in _joining(inputs):
        _, positions_S, slots_S = inputs.leaving(i)
        rope_rows_S = held[Address.ROPE_ROWS][positions_S]
        away_S = positions_S + chunks_on * inputs.case.sizes.chunk_tokens
        k_pre_KSD = turned_back(Bounded.exact(held[Address.K][:, slots_S]), away_S, rope_rows_S, inputs.rope)
        k_pre_SKD = k_pre_KSD.moved(lambda x: x.transpose(0, 1))
        centred_SKD = (k_pre_SKD - Bounded.exact(held[Address.MEAN])).rounded(inputs.dtype)
        basis_XR = Bounded.exact(held[Address.BASIS].flatten(0, 1))
        found.append((centred_SKD.moved(lambda x: x.flatten(1)), basis_XR))
    return found


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

    def reference(self, inputs: JoinInputs) -> Outputs:
        outputs = {}
        for i, held in enumerate(inputs.tensors):
            chunks, _, slots_S = inputs.leaving(i)
            landmarks = held[Address.LANDMARKS]
            for j, k_KED in enumerate(held[Address.K]):
                landmarks[j, :, chunks] = chunk_means(split_chunks(k_KED[:, slots_S], inputs.case.sizes.chunk_tokens))
            outputs[f"landmarks of row {i}"] = landmarks
        return outputs

    def truth(self, inputs: JoinInputs) -> dict[str, Bounded]:
        """Sums of the L keys of a chunk in float32, divided and rounded once."""
        size = inputs.case.sizes.chunk_tokens
        return self._landmarks(inputs, lambda terms: terms.sum(3) / size)

    def faults(self, inputs: JoinInputs) -> dict[str, Outputs]:
        size = inputs.case.sizes.chunk_tokens

        def narrow(terms: Bounded) -> Bounded:
            return Bounded.exact(narrow_sum(terms.value, 3, inputs.dtype) / size)

        found = {
            LEFT_OUT: self._landmarks(inputs, lambda x: x[:, :, :, 1:].sum(3) / size),
            ONE_OFF: self._landmarks(inputs, lambda x: (x.sum(3) / size).moved(lambda y: y.roll(1, 2))),
        }
        if inputs.dtype != torch.float32:
            found[NARROW_SUM] = self._landmarks(inputs, narrow)
        return {fault: values_of(made) for fault, made in found.items()}

    def _landmarks(self, inputs: JoinInputs, mean: Callable[[Bounded], Bounded]) -> dict[str, Bounded]:
        """The tables with these means of the chunks [layers, K, C, L, D] that leave."""
        found = {}
        for i, held in enumerate(inputs.tensors):
            chunks, _, slots_S = inputs.leaving(i)
            landmarks = Bounded.exact(held[Address.LANDMARKS])
            if inputs.case.joins[i]:
                keys = torch.stack(
                    [split_chunks(k_KED[:, slots_S], inputs.case.sizes.chunk_tokens) for k_KED in held[Address.K]]
                )
                landmarks.put((slice(None), slice(None), chunks), mean(Bounded.exact(keys)).rounded(inputs.dtype))
            found[f"landmarks of row {i}"] = landmarks
        return found

    def traffic(self, case: JoinCase, dtype: torch.dtype) -> Traffic:
        read = self._chunk_bytes(case, dtype)
        return Traffic(read + read // case.sizes.chunk_tokens)
