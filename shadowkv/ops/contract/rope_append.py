"""Contract of the new token's rotation and of its way into the cache: ``ops.triton.pointwise.rope_append``."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from shadowkv.ops.contract.base import Op, Outputs, Traffic
from shadowkv.ops.contract.bounds import Bounded
from shadowkv.ops.contract.faults import LEFT_OUT, ONE_OFF, last_zeroed, values_of
from shadowkv.ops.contract.pointwise import EPS, noise, normed, rms_norm
from shadowkv.ops.contract.rotation import turned
from shadowkv.ops.contract.rows import RowSpec, Sizes, make_rows
from shadowkv.ops.rope import Rope
from shadowkv.ops.rows import Fact, LayerRows


@dataclass(frozen=True)
class RopeAppendCase:
    """Rows with a fused projection of G queries per KV head."""

    label: str
    sizes: Sizes
    rows: tuple[RowSpec, ...]
    rotary_dim: int
    interleaved: bool = False
    norms: bool = False


@dataclass(frozen=True)
class RopeAppendInputs:
    """``tensors`` are the rows' own, by name; ``norms`` of queries and of keys, or none."""

    case: RopeAppendCase
    tensors: list[dict[str, Tensor]]
    rows: LayerRows
    qkv_BX: Tensor
    cos_BF: Tensor
    sin_BF: Tensor
    norms: tuple[Tensor, Tensor] | None


class RopeAppend(Op[RopeAppendCase, RopeAppendInputs]):
    """Per-head norms, RoPE, and the new key and value into the cache."""

    name = "rope_append"
    source = "ops.rope.Rope.turn and models.decoder.Decoder._project"

    def cases(self) -> list[RopeAppendCase]:
        rows = (
            RowSpec(chunks=5, outliers=1, resident=2, recent_tokens=3, window_slots=16),
            RowSpec(chunks=0, outliers=0, resident=0, recent_tokens=0, window_slots=8),
            RowSpec(chunks=0, outliers=0, resident=0, recent_tokens=9, window_slots=9),
        )
        return [
            RopeAppendCase("whole head", Sizes(2, 3, 64, 8, 16), rows, 64),
            RopeAppendCase("half of it, interleaved", Sizes(2, 1, 128, 8, 16), rows, 64, interleaved=True),
            RopeAppendCase("normed heads", Sizes(1, 4, 96, 8, 16), rows, 96, norms=True),
            RopeAppendCase("a quarter, normed", Sizes(1, 2, 80, 4, 16), rows, 20, norms=True),
        ]

    def bench_cases(self) -> list[RopeAppendCase]:
        row = RowSpec(chunks=0, outliers=0, resident=0, recent_tokens=100, window_slots=128)
        sizes = Sizes(kv_heads=8, group=4, head_dim=128, chunk_tokens=8, rank=160)
        return [RopeAppendCase(f"{batch} rows", sizes, (row,) * batch, 128) for batch in (1, 14, 48)]

    def make(self, case: RopeAppendCase, device: torch.device, dtype: torch.dtype, seed: int = 0) -> RopeAppendInputs:
        tensors, rows = make_rows(list(case.rows), case.sizes, device, dtype, seed)
        gen = torch.Generator().manual_seed(seed + 1)
        sizes, batch = case.sizes, len(case.rows)
        width = sizes.kv_heads * (sizes.group + 2) * sizes.head_dim
        angles_BF = 100 * torch.rand(batch, case.rotary_dim // 2, generator=gen)
        weights = [noise(gen, sizes.head_dim).to(device, dtype) for _ in range(2)]
        for i, row in enumerate(case.rows):
            for name in ("K", "V"):
                # Where nothing is written, nothing changes: compared as a whole, so without NaN.
                tensors[i][name].nan_to_num_()
                if not row.padding:
                    tensors[i][name][:, int(rows.facts_BI[i, Fact.WRITE_SLOT])] = torch.nan
        return RopeAppendInputs(
            case,
            tensors,
            rows,
            torch.randn(batch, width, generator=gen).to(device, dtype),
            angles_BF.cos().to(device),
            angles_BF.sin().to(device),
            (weights[0], weights[1]) if case.norms else None,
        )

    def run(self, inputs: RopeAppendInputs) -> Outputs:
        launch, q_BND = self._prepared(inputs)
        launch()
        return {"q": q_BND} | _caches(inputs)

    def launch(self, inputs: RopeAppendInputs) -> Callable[[], object]:
        return self._prepared(inputs)[0]

    def _prepared(self, inputs: RopeAppendInputs) -> tuple[Callable[[], object], Tensor]:
        from shadowkv.ops.triton.pointwise import rope_append

        case, sizes = inputs.case, inputs.case.sizes
        heads = sizes.kv_heads * sizes.group
        q_BND = inputs.qkv_BX.new_full((len(case.rows), heads, sizes.head_dim), torch.nan)
        q_norm_D, k_norm_D = inputs.norms or (None, None)
        launch = partial(
            rope_append,
            inputs.rows,
            inputs.qkv_BX,
            inputs.cos_BF,
            inputs.sin_BF,
            sizes.kv_heads,
            sizes.head_dim,
            case.rotary_dim,
            case.interleaved,
            q_norm_D,
            k_norm_D,
            EPS,
            q_BND,
        )
        return launch, q_BND

    def reference(self, inputs: RopeAppendInputs) -> Outputs:
        q_BND, k_BKD, v_BKD = _split(inputs)
        if inputs.norms is not None:
            q_BND, k_BKD = (rms_norm(x, w) for x, w in zip((q_BND, k_BKD), inputs.norms, strict=True))
        case = inputs.case
        rope = Rope(_unused, int, rotary_dim=case.rotary_dim, interleaved=case.interleaved)
        q_BND, k_BKD = (rope.turn(x, inputs.cos_BF[:, None], inputs.sin_BF[:, None]) for x in (q_BND, k_BKD))
        caches = _caches(inputs)
        for i, slot in _written(inputs):
            caches[f"K.{i}"][:, slot], caches[f"V.{i}"][:, slot] = k_BKD[i], v_BKD[i]
        return {"q": q_BND} | caches

    def truth(self, inputs: RopeAppendInputs) -> dict[str, Bounded]:
        """Two products and a sum in float32, rounded once; values are copied."""
        q, k = self._before(inputs)
        cos, sin = (Bounded.exact(x[:, None]) for x in (inputs.cos_BF, inputs.sin_BF))
        return self._stored(inputs, *(turned(x, cos, sin, inputs.case.interleaved) for x in (q, k)))

    def faults(self, inputs: RopeAppendInputs) -> dict[str, Outputs]:
        dtype = inputs.qkv_BX.dtype
        beside = replace(inputs, cos_BF=inputs.cos_BF.roll(1, 0), sin_BF=inputs.sin_BF.roll(1, 0))
        found = {
            LEFT_OUT: self.truth(replace(inputs, sin_BF=last_zeroed(inputs.sin_BF, 1))),
            ONE_OFF: self.truth(beside),
        }
        if dtype != torch.float32:
            narrow = replace(inputs, cos_BF=inputs.cos_BF.to(dtype), sin_BF=inputs.sin_BF.to(dtype))
            found["cos and sin are kept in the storage dtype"] = self.truth(narrow)
        return {fault: values_of(truth) for fault, truth in found.items()}

    def _before(self, inputs: RopeAppendInputs) -> tuple[Bounded, Bounded]:
        """Queries and keys before they are turned."""
        dtype = inputs.qkv_BX.dtype
        q, k = (Bounded.exact(x) for x in _split(inputs)[:2])
        if inputs.norms is None:
            return q, k
        return normed(q, inputs.norms[0], dtype), normed(k, inputs.norms[1], dtype)

    def _stored(self, inputs: RopeAppendInputs, q: Bounded, k: Bounded) -> dict[str, Bounded]:
        """Queries, and the caches with these keys in their slots."""
        dtype, v_BKD = inputs.qkv_BX.dtype, _split(inputs)[2]
        caches = {name: Bounded.exact(held) for name, held in _caches(inputs).items()}
        for i, slot in _written(inputs):
            caches[f"K.{i}"].put((slice(None), slot), k.rounded(dtype)[i])
            caches[f"V.{i}"].put((slice(None), slot), Bounded.exact(v_BKD[i]))
        return {"q": q.rounded(dtype)} | caches

    def traffic(self, case: RopeAppendCase, dtype: torch.dtype) -> Traffic:
        sizes, batch = case.sizes, len(case.rows)
        elements = batch * sizes.kv_heads * (sizes.group + 2) * sizes.head_dim
        return Traffic(2 * elements * dtype.itemsize + 4 * batch * case.rotary_dim, flops=3 * elements)


def _split(inputs: RopeAppendInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, N, D], keys and values [B, K, D]."""
    sizes, batch = inputs.case.sizes, len(inputs.case.rows)
    fused_BXD = inputs.qkv_BX.view(batch, -1, sizes.head_dim)
    heads = sizes.kv_heads * sizes.group
    q_BND, k_BKD, v_BKD = torch.split(fused_BXD, [heads, sizes.kv_heads, sizes.kv_heads], dim=1)
    return q_BND, k_BKD, v_BKD


def _written(inputs: RopeAppendInputs) -> list[tuple[int, int]]:
    """Rows that get a key and a value, and the slots."""
    slots = inputs.rows.facts_BI[:, Fact.WRITE_SLOT].tolist()
    return [(i, slot) for i, slot in enumerate(slots) if slot >= 0]


def _unused(length_tokens: int) -> tuple[Tensor, float]:
    """Angles are given; nobody asks for frequencies."""
    raise NotImplementedError


def _caches(inputs: RopeAppendInputs) -> Outputs:
    return {f"{name}.{i}": row[name] for i, row in enumerate(inputs.tensors) for name in ("K", "V")}
