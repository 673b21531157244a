"""Norms, gates, RoPE and cache writes, against float64; through the interpreter on a CPU."""

from typing import Any

import pytest
import torch

from shadowkv.errors import ConfigError
from shadowkv.ops.contract.base import Op, excess
from shadowkv.ops.contract.bounds import Bounded
from shadowkv.ops.contract.pointwise import EPS, AddNorm, Gate, activated
from shadowkv.ops.contract.rope_append import RopeAppend
from shadowkv.ops.triton.pointwise import ACTIVATIONS, add_norm, gate, rope_append
from tests.conftest import DEVICE
from tests.ops.truth import assert_within

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
OPS: list[Op[Any, Any]] = [AddNorm(), Gate(), RopeAppend()]
CASES = [(op, case) for op in OPS for case in op.cases()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "case"), CASES, ids=lambda x: getattr(x, "name", None) or getattr(x, "label", None))
def test_contract(op: Op[Any, Any], case: Any, dtype: torch.dtype, device: torch.device) -> None:
    assert excess(op, case, device, dtype) == []


def test_hidden_is_left_alone_where_nothing_is_added(device: torch.device) -> None:
    case = AddNorm().cases()[1]
    inputs = AddNorm().make(case, device, torch.float32)
    before = inputs["hidden"].clone()
    assert torch.equal(AddNorm().run(inputs)["hidden"], before)


def test_rows_may_be_strided(device: torch.device) -> None:
    case = AddNorm().cases()[2]
    inputs, other = (AddNorm().make(case, device, torch.float32) for _ in range(2))
    expected = AddNorm().run(other)
    wide = {name: torch.full((case.batch, case.width + 24), 7.0, device=device) for name in ("hidden", "delta", "out")}
    hidden_BM, delta_BM, out_BM = (wide[name][:, 8 : case.width + 8] for name in wide)
    hidden_BM.copy_(inputs["hidden"])
    delta_BM.copy_(inputs["delta"])
    add_norm(hidden_BM, delta_BM, inputs["weight"], EPS, out_BM, inputs["delta_norm"])
    assert torch.equal(hidden_BM, expected["hidden"])
    assert torch.equal(out_BM, expected["out"])
    for tensor in wide.values():
        assert bool((tensor[:, :8] == 7).all() and (tensor[:, case.width + 8 :] == 7).all())


def test_activations_of_large_arguments(device: torch.device) -> None:
    """Where exp overflows or vanishes."""
    x_1F = torch.tensor([[-200.0, -20.0, -5.0, 0.0, 5.0, 20.0, 200.0]], device=device)
    for activation in ACTIVATIONS:
        out_1F = torch.full_like(x_1F, torch.nan)
        gate(torch.cat([x_1F, torch.ones_like(x_1F)], 1), out_1F, activation)
        assert_within(out_1F, activated(Bounded.exact(x_1F), activation).rounded(torch.float32))


def test_an_unknown_activation_is_refused(device: torch.device) -> None:
    x_1F = torch.zeros(1, 4, device=device)
    with pytest.raises(ConfigError, match="silu, gelu, gelu_pytorch_tanh"):
        gate(x_1F, x_1F[:, :2], "relu")


def test_queries_may_be_strided_and_other_slots_are_left_alone(device: torch.device) -> None:
    op = RopeAppend()
    case = op.cases()[0]
    inputs, other = (op.make(case, device, torch.float16) for _ in range(2))
    expected = op.run(other)
    sizes, (batch, heads, dim) = case.sizes, expected["q"].shape
    q_BXD = torch.full((batch, heads + 1, dim + 8), 7.0, dtype=torch.float16, device=device)
    rope_append(
        inputs.rows,
        inputs.qkv_BX,
        inputs.cos_BF,
        inputs.sin_BF,
        sizes.kv_heads,
        dim,
        case.rotary_dim,
        case.interleaved,
        None,
        None,
        EPS,
        q_BXD[:, :heads, :dim],
    )
    assert torch.equal(q_BXD[:, :heads, :dim], expected["q"])
    assert bool((q_BXD[:, heads:] == 7).all() and (q_BXD[..., dim:] == 7).all())
    for i, row in enumerate(inputs.tensors):
        assert torch.equal(row["K"], expected[f"K.{i}"])
        assert torch.equal(row["V"], expected[f"V.{i}"])
