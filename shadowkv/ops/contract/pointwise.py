"""Contracts of what stands between the matrix products: ``ops.triton.pointwise``."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from shadowkv.ops.contract.base import Op, Outputs, Traffic
from shadowkv.ops.contract.rows import RowSpec, Sizes, make_rows
from shadowkv.ops.rope import Rope
from shadowkv.ops.rows import Fact, LayerRows

EPS = 1e-5


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """In float32 at least, rounded to x's dtype before the weight, as the models do it."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


@dataclass(frozen=True)
class AddNormCase:
    """Rows of M elements, with or without something to add, which may have a norm of its own."""

    label: str
    batch: int
    width: int
    adds: bool = True
    norms_delta: bool = False


AddNormInputs = dict[str, Tensor]


class AddNorm(Op[AddNormCase, AddNormInputs]):
    """Residual addition and the norm after it."""

    name = "add_norm"
    source = "models.layers.rms_norm"

    def cases(self) -> list[AddNormCase]:
        return [
            AddNormCase("plain", 3, 192),
            AddNormCase("first layer", 2, 576, adds=False),
            AddNormCase("sandwich", 4, 1000, norms_delta=True),
            AddNormCase("widest", 1, 16384, norms_delta=True),
        ]

    def bench_cases(self) -> list[AddNormCase]:
        return [AddNormCase(f"{batch} x 4,096", batch, 4096) for batch in (1, 14, 48)]

    def make(self, case: AddNormCase, device: torch.device, dtype: torch.dtype, seed: int = 0) -> AddNormInputs:
        gen = torch.Generator().manual_seed(seed)
        made = {"hidden": torch.randn(case.batch, case.width, generator=gen), "weight": _noise(gen, case.width)}
        if case.adds:
            made["delta"] = torch.randn(case.batch, case.width, generator=gen)
        if case.norms_delta:
            made["delta_norm"] = _noise(gen, case.width)
        return {name: tensor.to(device, dtype) for name, tensor in made.items()}

    def run(self, inputs: AddNormInputs) -> Outputs:
        launch, out_BM = self._prepared(inputs)
        launch()
        return {"hidden": inputs["hidden"], "out": out_BM}

    def launch(self, inputs: AddNormInputs) -> Callable[[], object]:
        return self._prepared(inputs)[0]

    def _prepared(self, inputs: AddNormInputs) -> tuple[Callable[[], object], Tensor]:
        from shadowkv.ops.triton.pointwise import add_norm

        hidden_BM = inputs["hidden"]
        out_BM = torch.full_like(hidden_BM, torch.nan)
        delta_BM, delta_norm_M = inputs.get("delta"), inputs.get("delta_norm")
        return partial(add_norm, hidden_BM, delta_BM, inputs["weight"], EPS, out_BM, delta_norm_M), out_BM

    def reference(self, inputs: AddNormInputs, dtype: torch.dtype) -> Outputs:
        cast = {name: tensor.to(dtype) for name, tensor in inputs.items()}
        hidden_BM = cast["hidden"]
        if "delta" in cast:
            delta_BM = cast["delta"]
            if "delta_norm" in cast:
                delta_BM = _rms_norm(delta_BM, cast["delta_norm"])
            hidden_BM = hidden_BM + delta_BM
        return {"hidden": hidden_BM, "out": _rms_norm(hidden_BM, cast["weight"])}

    def traffic(self, case: AddNormCase, dtype: torch.dtype) -> Traffic:
        elements = case.batch * case.width
        weights = case.width * (2 if case.norms_delta else 1)
        return Traffic(((4 if case.adds else 2) * elements + weights) * dtype.itemsize, flops=6 * elements)


@dataclass(frozen=True)
class GateCase:
    """Rows of an MLP of width F."""

    label: str
    batch: int
    width: int
    activation: str


class Gate(Op[GateCase, tuple[GateCase, Tensor]]):
    """Gated activation."""

    name = "gate"
    source = "models.layers.mlp"

    def cases(self) -> list[GateCase]:
        shapes = {"silu": (3, 1536), "gelu": (2, 1000), "gelu_pytorch_tanh": (1, 2049)}
        return [GateCase(activation, *shape, activation) for activation, shape in shapes.items()]

    def bench_cases(self) -> list[GateCase]:
        return [GateCase(f"{batch} x 14,336", batch, 14336, "silu") for batch in (1, 14, 48)]

    def make(self, case: GateCase, device: torch.device, dtype: torch.dtype, seed: int = 0) -> tuple[GateCase, Tensor]:
        gen = torch.Generator().manual_seed(seed)
        return case, (3 * torch.randn(case.batch, 2 * case.width, generator=gen)).to(device, dtype)

    def run(self, inputs: tuple[GateCase, Tensor]) -> Outputs:
        launch, out_BF = self._prepared(inputs)
        launch()
        return {"out": out_BF}

    def launch(self, inputs: tuple[GateCase, Tensor]) -> Callable[[], object]:
        return self._prepared(inputs)[0]

    def _prepared(self, inputs: tuple[GateCase, Tensor]) -> tuple[Callable[[], object], Tensor]:
        from shadowkv.ops.triton.pointwise import gate

        case, gate_up_BX = inputs
        out_BF = gate_up_BX.new_full((case.batch, case.width), torch.nan)
        return partial(gate, gate_up_BX, out_BF, case.activation), out_BF

    def reference(self, inputs: tuple[GateCase, Tensor], dtype: torch.dtype) -> Outputs:
        case, gate_up_BX = inputs
        gated_BF, up_BF = gate_up_BX.to(dtype).chunk(2, dim=-1)
        if case.activation == "silu":
            return {"out": F.silu(gated_BF) * up_BF}
        how = "tanh" if case.activation == "gelu_pytorch_tanh" else "none"
        return {"out": F.gelu(gated_BF, approximate=how) * up_BF}

    def traffic(self, case: GateCase, dtype: torch.dtype) -> Traffic:
        return Traffic(3 * case.batch * case.width * dtype.itemsize, flops=6 * case.batch * case.width)


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
        weights = [_noise(gen, sizes.head_dim).to(device, dtype) for _ in range(2)]
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

    def reference(self, inputs: RopeAppendInputs, dtype: torch.dtype) -> Outputs:
        case, sizes = inputs.case, inputs.case.sizes
        kv_heads, heads, dim = sizes.kv_heads, sizes.kv_heads * sizes.group, sizes.head_dim
        fused_BXD = inputs.qkv_BX.to(dtype).view(len(case.rows), -1, dim)
        q_BND, k_BKD, v_BKD = torch.split(fused_BXD, [heads, kv_heads, kv_heads], dim=1)
        if inputs.norms is not None:
            q_BND, k_BKD = (_rms_norm(x, w.to(dtype)) for x, w in zip((q_BND, k_BKD), inputs.norms, strict=True))
        q_BND, k_BKD = (_turn(x, inputs) for x in (q_BND, k_BKD))
        caches = {name: held.to(dtype) for name, held in _caches(inputs).items()}
        for i, slot in enumerate(inputs.rows.facts_BI[:, Fact.WRITE_SLOT].tolist()):
            if slot >= 0:
                caches[f"K.{i}"][:, slot], caches[f"V.{i}"][:, slot] = k_BKD[i], v_BKD[i]
        return {"q": q_BND} | caches

    def traffic(self, case: RopeAppendCase, dtype: torch.dtype) -> Traffic:
        sizes, batch = case.sizes, len(case.rows)
        elements = batch * sizes.kv_heads * (sizes.group + 2) * sizes.head_dim
        return Traffic(2 * elements * dtype.itemsize + 4 * batch * case.rotary_dim, flops=3 * elements)


def _turn(x_BXD: Tensor, inputs: RopeAppendInputs) -> Tensor:
    """As the decoder does it; float64 in float64."""
    case = inputs.case
    cos_B1F, sin_B1F = inputs.cos_BF[:, None], inputs.sin_BF[:, None]
    rope = Rope(_unused, int, rotary_dim=case.rotary_dim, interleaved=case.interleaved)
    if x_BXD.dtype != torch.float64:
        return rope.turn(x_BXD, cos_B1F, sin_B1F)
    rotary_BXF, rest_BXF = x_BXD[..., : case.rotary_dim], x_BXD[..., case.rotary_dim :]
    lead = rotary_BXF.shape[:-1]
    pairs = rotary_BXF.reshape(*lead, -1, 2) if case.interleaved else rotary_BXF.reshape(*lead, 2, -1).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos_B1F, sin_B1F))
    return torch.cat([(turned if case.interleaved else turned.mT).flatten(-2), rest_BXF], dim=-1)


def _unused(length_tokens: int) -> tuple[Tensor, float]:
    """Angles are given; nobody asks for frequencies."""
    raise NotImplementedError


def _caches(inputs: RopeAppendInputs) -> Outputs:
    return {f"{name}.{i}": row[name] for i, row in enumerate(inputs.tensors) for name in ("K", "V")}


def _noise(gen: torch.Generator, width: int) -> Tensor:
    """Weights of a norm."""
    return 1 + 0.1 * torch.randn(width, generator=gen)
