"""The subspace against numpy's SVD in float64: optimal, repeatable, clipped, centred or not."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from shadowkv.errors import NumericsError, ShapeError
from shadowkv.ops.contract.bounds import ROUNDOFF, Bounded, stacked
from shadowkv.ops.lowrank import SLICE_TOKENS, find_subspace, project, rebuild, wider
from tests.ops.truth import LAYOUTS, assert_within

HEADS, DIM = 3, 16
ENERGY = 1e-6
"""Of a share of 1: the promise of this op, some float32 roundings wide."""


def keys(device, dtype, tokens: int, *, bias: float = 0.0, decay: float = 0.85) -> Tensor:
    """Keys whose singular values fall off, as real ones do."""
    width = HEADS * DIM
    turn, _ = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64))
    x = torch.randn(tokens, width, dtype=torch.float64) * decay ** torch.arange(width) @ turn
    x = x + bias * torch.randn(width, dtype=torch.float64)
    return x.to(device, dtype).reshape(tokens, HEADS, DIM)


def svd_energy(x_SKD: Tensor, rank: int, centre: bool) -> float:
    """The share of the squared norm that the best subspace of this rank keeps."""
    x = x_SKD.double().flatten(1).cpu().numpy()
    x = x - x.mean(0) if centre else x
    squares = np.linalg.svd(x, compute_uv=False) ** 2
    return float(squares[:rank].sum() / squares.sum()) if squares.sum() > 0 else 1.0


def kept_energy(x_SKD: Tensor, basis_KDR: Tensor, centre: bool) -> float:
    """The share that the basis' span keeps, however far its columns are from orthonormal."""
    x = x_SKD.double().flatten(1)
    x = x - x.mean(0) if centre else x
    span, _ = torch.linalg.qr(basis_KDR.double().flatten(0, 1))
    return float((x @ span).square().sum() / x.square().sum())


def skew(basis_XR: Tensor) -> float:
    """How far columns are from orthonormal."""
    b = basis_XR.double()
    return float((b.T @ b - torch.eye(b.shape[1], device=b.device, dtype=b.dtype)).abs().max())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("centre", [False, True], ids=["plain", "centred"])
@pytest.mark.parametrize("rank", [1, 5, 24, 47, 48, 500])
def test_the_subspace_is_the_best_one(device, dtype, rank, centre, layout):
    x = LAYOUTS[layout](keys(device, dtype, 300))
    found = find_subspace(x, rank, centre=centre)
    columns = min(rank, HEADS * DIM)
    assert found.basis_KDR.shape == (HEADS, DIM, columns)
    assert found.basis_KDR.dtype == found.mean_KD.dtype == torch.float32
    best = svd_energy(x, rank, centre)
    assert abs(kept_energy(x, found.basis_KDR, centre) - best) < ENERGY
    # Unit columns, each element rounded to float32: by Cauchy-Schwarz their products miss twice the roundoff.
    eps = torch.finfo(torch.float32).eps
    assert skew(found.basis_KDR.flatten(0, 1)) <= 2 * eps
    # An element of the Gram matrix misses S roundoffs of its terms' magnitudes, so the whole matrix S roundoffs of its
    # trace, and R eigenvalues together sqrt(R) times that (Ky Fan); so does the trace. The share is rounded to float32.
    assert abs(float(found.energy) - best) <= 2 * math.sqrt(columns) * 300 * torch.finfo(wider(dtype)).eps + eps


def test_directions_come_strongest_first(device, dtype):
    x = keys(device, dtype, 300)
    coeff = project(x, *find_subspace(x, 20, centre=True)[:2]).double()
    norms = coeff.norm(dim=0)
    assert (norms[1:] <= norms[:-1]).all()


@pytest.mark.parametrize("bias", [0.0, 10.0])
def test_the_mean_is_taken_out_only_when_centred(device, dtype, bias):
    x = keys(device, dtype, 200, bias=bias)
    mean = Bounded.exact(x).sum(0) / 200
    if wider(dtype) == torch.float64:
        mean = Bounded.exact(mean.value).loosened(200 * torch.finfo(torch.float64).eps)
    assert_within(find_subspace(x, 4, centre=True).mean_KD, mean.rounded(torch.float32))
    assert (find_subspace(x, 4, centre=False).mean_KD == 0).all()


def test_a_bias_costs_no_rank_when_centred(device):
    """Rank 6 keys plus a bias ten times their size need rank 6 centred, and 7 otherwise."""
    low = torch.randn(200, 6, device=device, dtype=torch.float64) @ torch.randn(6, 48, device=device).double()
    x = (low + 10 * torch.randn(48, device=device) * low.abs().mean()).float().reshape(200, HEADS, DIM)
    assert float(find_subspace(x, 6, centre=True).energy) > 1 - ENERGY
    uncentred = find_subspace(x, 6, centre=False)
    residual = x.double().flatten(1) - (x.double().flatten(1) @ uncentred.basis_KDR.flatten(0, 1).double()) @ (
        uncentred.basis_KDR.flatten(0, 1).double().T
    )
    centred_norm = (x.double() - x.double().mean(0)).norm()
    assert residual.norm() > 0.05 * centred_norm


@pytest.mark.parametrize("centre", [False, True], ids=["plain", "centred"])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_fewer_tokens_than_rank(device, dtype, tokens, centre):
    """S tokens span at most S directions, so a larger rank loses nothing but rounding."""
    x = keys(device, dtype, tokens)
    found = find_subspace(x, 20, centre=centre)
    assert found.basis_KDR.shape == (HEADS, DIM, 20)
    assert abs(float(found.energy) - 1) < ENERGY
    basis_XR, mean_X = found.basis_KDR.flatten(0, 1), found.mean_KD.flatten()
    back = project(x, found.basis_KDR, found.mean_KD).float() @ basis_XR.T + mean_X
    coeff = ((Bounded.exact(x.flatten(1)) - Bounded.exact(mean_X)) @ Bounded.exact(basis_XR)).rounded(dtype)
    lost = (coeff @ Bounded.exact(basis_XR.T) + Bounded.exact(mean_X)).error
    # Besides, the basis and the mean are rounded to float32: each direction is off by a roundoff, on both ways.
    limit = lost.norm() + (2 * math.sqrt(20) + 1) * ROUNDOFF * x.double().norm()
    assert (back.double() - x.double().flatten(1)).norm() <= limit


@pytest.mark.parametrize("centre", [False, True], ids=["plain", "centred"])
def test_keys_without_energy(device, dtype, centre):
    zeros = torch.zeros(9, HEADS, DIM, device=device, dtype=dtype)
    found = find_subspace(zeros, 5, centre=centre)
    assert float(found.energy) == 1.0
    assert torch.isfinite(found.basis_KDR).all()
    assert (project(zeros, found.basis_KDR, found.mean_KD) == 0).all()


@pytest.mark.parametrize("centre", [False, True], ids=["plain", "centred"])
def test_more_tokens_than_a_slice(device, dtype, centre):
    """Sums over several slices are the sums over all."""
    x = keys(device, dtype, 2 * SLICE_TOKENS + 5, bias=0.3)
    found = find_subspace(x, 9, centre=centre)
    assert abs(kept_energy(x, found.basis_KDR, centre) - svd_energy(x, 9, centre)) < ENERGY
    coeff = project(x, found.basis_KDR, found.mean_KD)
    assert coeff.shape == (x.shape[0], 9)
    parts = [project(part, found.basis_KDR, found.mean_KD) for part in x.split(SLICE_TOKENS)]
    assert torch.equal(coeff, torch.cat(parts))


def test_the_same_keys_give_the_same_bits(device, dtype):
    x = keys(device, dtype, 300)
    first, second = find_subspace(x, 20, centre=True), find_subspace(x.clone(), 20, centre=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_projection_and_rebuilding(device, dtype, layout):
    make = LAYOUTS[layout]
    x = make(keys(device, dtype, 60, bias=0.5))
    found = find_subspace(x, 12, centre=True)
    basis, mean = make(found.basis_KDR.to(dtype)), make(found.mean_KD)
    coeff = project(x, basis, mean)
    centred = (Bounded.exact(x) - Bounded.exact(mean)).moved(lambda y: y.flatten(1))
    assert_within(coeff, (centred @ Bounded.exact(basis.flatten(0, 1))).rounded(dtype))

    chunk, head = torch.tensor([3, 0, 14, 3], device=device), torch.tensor([0, 2, 2, 1], device=device)
    coeff_MLR, basis_MDR, mean_MD = make(coeff.reshape(15, 4, 12)[chunk]), make(basis[head]), make(mean[head])
    exact = [
        Bounded.exact(coeff_MLR[m]) @ Bounded.exact(basis[h].T) + Bounded.exact(mean[h])
        for m, h in enumerate(head.tolist())
    ]
    got = rebuild(coeff_MLR, basis_MDR, mean_MD)
    assert got.dtype == torch.float32
    assert_within(got, stacked(exact, 0))


def test_no_chunk_to_rebuild(device, dtype):
    coeff, basis = torch.empty(0, 4, 5, device=device, dtype=dtype), torch.empty(0, DIM, 5, device=device, dtype=dtype)
    assert rebuild(coeff, basis, torch.empty(0, DIM, device=device)).shape == (0, 4, DIM)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("centre", [False, True], ids=["plain", "centred"])
def test_keys_that_are_not_numbers_are_refused(device, dtype, value, centre):
    x = keys(device, dtype, 20)
    x[7, 1, 3] = value
    with pytest.raises(NumericsError, match="NaN or infinite"):
        find_subspace(x, 4, centre=centre)


@pytest.mark.parametrize("shape", [(0, 3, 16), (20, 48), (1, 20, 3, 16)])
def test_shapes_that_are_not_keys_are_refused(device, shape):
    with pytest.raises(ShapeError, match=r"needs \[S, K, D\]"):
        find_subspace(torch.zeros(shape, device=device), 4, centre=True)


def test_sums_are_wider_than_their_terms():
    assert wider(torch.bfloat16) == wider(torch.float16) == torch.float32
    assert wider(torch.float32) == torch.float64
