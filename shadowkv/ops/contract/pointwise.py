"""Contracts of norms and gates between the matrix products: ``ops.triton.pointwise``."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from shadowkv.ops.contract.base import Op, Outputs, Traffic
from shadowkv.ops.contract.bounds import Bounded
from shadowkv.ops.contract.faults import LEFT_OUT, NARROW_SUM, ONE_OFF, narrow_sum, values_of

EPS = 1e-5


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """In float32, rounded to x's dtype before the weight, as the models do it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def mean_square(x: Bounded) -> Bounded:
    """Over the last axis, which is kept: a sum in float32."""
    return (x * x).sum(-1, keepdim=True) / x.value.shape[-1]


def normed(x: Bounded, weight: Tensor, dtype: torch.dtype, square: Bounded | None = None) -> Bounded:
    """:func:`rms_norm` with the roundings that it has. ``square``: the mean square, where it is not that of x."""
    square = mean_square(x) if square is None else square
    scale = (square + EPS).function(torch.rsqrt)
    return ((x * scale).rounded(dtype) * Bounded.exact(weight)).rounded(dtype)


def noise(gen: torch.Generator, width: int) -> Tensor:
    """Weights of a norm."""
    return 1 + 0.1 * torch.randn(width, generator=gen)


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
            AddNormCase("narrowest", 5, 40),
        ]

    def bench_cases(self) -> list[AddNormCase]:
        return [AddNormCase(f"{batch} x 4,096", batch, 4096) for batch in (1, 14, 48)]

    def make(self, case: AddNormCase, device: torch.device, dtype: torch.dtype, seed: int = 0) -> AddNormInputs:
        gen = torch.Generator().manual_seed(seed)
        made = {"hidden": torch.randn(case.batch, case.width, generator=gen), "weight": noise(gen, case.width)}
        if case.adds:
            made["delta"] = torch.randn(case.batch, case.width, generator=gen)
        if case.norms_delta:
            made["delta_norm"] = noise(gen, case.width)
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

    def reference(self, inputs: AddNormInputs) -> Outputs:
        hidden_BM = inputs["hidden"]
        if "delta" in inputs:
            delta_BM = inputs["delta"]
            if "delta_norm" in inputs:
                delta_BM = rms_norm(delta_BM, inputs["delta_norm"])
            hidden_BM = hidden_BM + delta_BM
        return {"hidden": hidden_BM, "out": rms_norm(hidden_BM, inputs["weight"])}

    def truth(self, inputs: AddNormInputs) -> dict[str, Bounded]:
        """A sum that is stored rounded, and the norm of what is stored."""
        hidden = self._sum(inputs)
        return {"hidden": hidden, "out": normed(hidden, inputs["weight"], inputs["hidden"].dtype)}

    def faults(self, inputs: AddNormInputs) -> dict[str, Outputs]:
        truth, weight_M, dtype = self.truth(inputs), inputs["weight"], inputs["hidden"].dtype
        hidden = truth["hidden"]
        width = hidden.value.shape[1]
        fewer = mean_square(hidden[:, 1:]) * ((width - 1) / width)
        made = {
            LEFT_OUT: normed(hidden, weight_M, dtype, fewer),
            ONE_OFF: normed(hidden, weight_M.roll(1), dtype),
        }
        if dtype != torch.float32:
            narrow = narrow_sum(hidden.value.square(), 1, dtype)[:, None] / width
            made[NARROW_SUM] = normed(hidden, weight_M, dtype, Bounded.exact(narrow))
        return {fault: values_of(truth | {"out": out}) for fault, out in made.items()}

    def _sum(self, inputs: AddNormInputs) -> Bounded:
        hidden, dtype = Bounded.exact(inputs["hidden"]), inputs["hidden"].dtype
        if "delta" not in inputs:
            return hidden
        delta = Bounded.exact(inputs["delta"])
        if "delta_norm" in inputs:
            delta = normed(delta, inputs["delta_norm"], dtype)
        return (hidden + delta).rounded(dtype)

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

    def reference(self, inputs: tuple[GateCase, Tensor]) -> Outputs:
        case, gate_up_BX = inputs
        gated_BF, up_BF = gate_up_BX.chunk(2, dim=-1)
        if case.activation == "silu":
            return {"out": F.silu(gated_BF) * up_BF}
        how = "tanh" if case.activation == "gelu_pytorch_tanh" else "none"
        return {"out": F.gelu(gated_BF, approximate=how) * up_BF}

    def truth(self, inputs: tuple[GateCase, Tensor]) -> dict[str, Bounded]:
        """An activation in float32, rounded before it meets the other half, as the models do it."""
        gated, up = (Bounded.exact(x) for x in inputs[1].chunk(2, dim=-1))
        return self._gated(activated(gated, inputs[0].activation), up, inputs[1].dtype)

    def faults(self, inputs: tuple[GateCase, Tensor]) -> dict[str, Outputs]:
        case, gate_up_BX = inputs
        dtype = gate_up_BX.dtype
        gated, up = (Bounded.exact(x) for x in gate_up_BX.chunk(2, dim=-1))
        right = activated(gated, case.activation)
        made = {ONE_OFF: self._gated(right, up.moved(lambda x: x.roll(1, 1)), dtype)}
        if case.activation == "silu":
            ones = torch.ones_like(gated.value)
            terms = torch.stack([ones, torch.exp(-gated.value)])
            made[LEFT_OUT] = self._gated(Bounded.exact(gated.value / terms[1]), up, dtype)
            if dtype != torch.float32:
                narrow = Bounded.exact((gated.value / narrow_sum(terms, 0, dtype)).to(dtype))
                made[NARROW_SUM] = self._gated(narrow, up, dtype)
        return {fault: values_of(out) for fault, out in made.items()}

    def _gated(self, activated: Bounded, up: Bounded, dtype: torch.dtype) -> dict[str, Bounded]:
        return {"out": (activated.rounded(dtype) * up).rounded(dtype)}

    def traffic(self, case: GateCase, dtype: torch.dtype) -> Traffic:
        return Traffic(3 * case.batch * case.width * dtype.itemsize, flops=6 * case.batch * case.width)


def activated(x: Bounded, activation: str) -> Bounded:
    """In the form that does not cancel where x is negative; only gelu has none."""
    if activation == "silu":
        return x / ((-x).exp() + 1.0)
    if activation == "gelu":
        return x * 0.5 * ((x * math.sqrt(0.5)).function(torch.erf) + 1.0)
    z = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
    return x / ((z * -2.0).exp() + 1.0)
