"""Chunks that join the context against the plain un-rotation, projection and means."""

import pytest
import torch

from shadowkv.ops.contract.base import excess
from shadowkv.ops.contract.bounds import Bounded
from shadowkv.ops.contract.join import JoinCase, JoinContext, WriteLandmarks
from shadowkv.ops.contract.rotation import cos_sin, turned, turned_back
from shadowkv.ops.contract.rows import Sizes
from shadowkv.ops.rows import Address
from tests.conftest import DEVICE
from tests.ops.truth import assert_within

DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])
OPS = [JoinContext(), WriteLandmarks()]
CASES = OPS[0].cases()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_join(op, case, device, dtype):
    assert excess(op, case, device, dtype) == []


def test_blocks_of_tokens_and_directions_cover_everything(device, monkeypatch):
    from shadowkv.ops.triton import join

    monkeypatch.setattr(join, "BLOCK_TOKENS", 16)
    monkeypatch.setattr(join, "BLOCK_RANK", 16)
    monkeypatch.setattr(join, "TILE_ELEMENTS", 512)
    case = JoinCase(CASES[0].specs[:1], (5,), Sizes(2, 1, 64, 8, 0), (40, 24))
    for op in OPS:
        assert excess(op, case, device, torch.float16) == []


def test_what_is_joined_comes_back(device):
    """Coefficients in a full basis, rebuilt and rotated, are the keys of the window."""
    case = CASES[0]
    inputs = OPS[0].make(case, device, torch.float32)
    full = case.sizes.kv_heads * case.sizes.head_dim
    _, positions_S, slots_S = inputs.leaving(0)
    held = inputs.by_layer[0][0]
    basis_XX = exactly_orthonormal(full).to(device)
    coeff_CLX = torch.full((case.specs[0].chunks + case.joins[0], case.sizes.chunk_tokens, full), torch.nan).to(device)
    inputs.address_LBX[0, 0, Address.BASIS] = basis_XX.data_ptr()
    inputs.address_LBX[0, 0, Address.COEFF] = coeff_CLX.data_ptr()
    inputs.address_LBX[0, 1:] = inputs.address_LBX[1:].zero_()[0, 1:]
    inputs.chunk_count_B[1:] = 0
    inputs.ranks_X[0], inputs.ranks_X[1:] = full, 0
    from shadowkv.ops.triton.join import join_context

    sizes = case.sizes
    shape = (sizes.chunk_tokens, sizes.kv_heads, sizes.head_dim)
    tables = (inputs.address_LBX[:1].contiguous(), inputs.facts_BI, inputs.first_chunk_B, inputs.chunk_count_B)
    join_context(*tables, inputs.ranks_X[:1], full, inputs.rope.table, *shape, torch.float32, max(case.joins))
    rope_rows_S = held[Address.ROPE_ROWS][positions_S]
    k_pre_SX = coeff_CLX.flatten(0, 1)[positions_S] @ basis_XX.T
    k_pre_KSD = k_pre_SX.unflatten(1, shape[1:]).transpose(0, 1) + held[Address.MEAN][:, None]
    k_KSD = inputs.rope.rotate(k_pre_KSD, positions_S, rope_rows_S)

    # The same way with the error of each step.
    mean_K1D, basis = Bounded.exact(held[Address.MEAN][:, None]), Bounded.exact(basis_XX)
    kept_KSD = Bounded.exact(held[Address.K][:, slots_S])
    centred_KSD = turned_back(kept_KSD, positions_S, rope_rows_S, inputs.rope) - mean_K1D
    coeff_SX = centred_KSD.moved(lambda x: x.transpose(0, 1).flatten(1)) @ basis
    back_SX = coeff_SX.rounded(torch.float32) @ basis.moved(torch.t)
    back_KSD = back_SX.moved(lambda x: x.unflatten(1, shape[1:]).transpose(0, 1)) + mean_K1D
    back_KSD = turned(back_KSD, *cos_sin(positions_S, rope_rows_S, inputs.rope), case.interleaved)
    assert_within(k_KSD, Bounded(kept_KSD.value, back_KSD.error))


def exactly_orthonormal(width: int) -> torch.Tensor:
    """Signs over 8 in blocks of 64, the rows mixed: float32 holds it without an error."""
    block = torch.ones(1, 1)
    for _ in range(6):
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block / 8] * (width // 64))[torch.randperm(width)].contiguous()
