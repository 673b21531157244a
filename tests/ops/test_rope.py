"""Rotation against complex multiplication in float64: layouts, partial rotary, factors, rows."""

import pytest
import torch
from torch import Tensor

from shadowkv.ops.contract.bounds import Bounded
from shadowkv.ops.contract.rotation import cos_sin, turned, turned_back
from shadowkv.ops.rope import FIRST_ROWS, Rope
from tests.ops.truth import LAYOUTS, assert_within


def frequencies(rotary_dim: int, base: float = 10000.0) -> Tensor:
    return 1.0 / base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def make(device, rotary_dim: int, *, interleaved: bool = False, factor: float = 1.0) -> Rope:
    return Rope(
        lambda length: (frequencies(rotary_dim), factor),
        lambda length: 0,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        device=device,
    )


def naive_rotate(x: Tensor, angles: Tensor, factor: Tensor, interleaved: bool) -> Tensor:
    """Each pair (a, b) as the complex number a + ib, times factor * exp(i angle). float64."""
    half = angles.shape[-1]
    out = x.double().clone()
    for f in range(half):
        i, j = (2 * f, 2 * f + 1) if interleaved else (f, half + f)
        turned = torch.complex(x[..., i].double(), x[..., j].double())
        turned = turned * factor * torch.exp(1j * angles[..., f].double())
        out[..., i], out[..., j] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (80, 32), (96, 96), (128, 64), (256, 64), (8, 2)])
@pytest.mark.parametrize("factor", [1.0, 1.37])
def test_rotation(device, dtype, dim, rotary_dim, interleaved, factor, layout):
    rope = make(device, rotary_dim, interleaved=interleaved, factor=factor)
    x = LAYOUTS[layout](torch.randn(3, 50, dim, device=device).to(dtype))
    positions = torch.randint(0, 4000, (50,), device=device)
    rows = torch.full((50,), rope.row(50), device=device, dtype=torch.int32)
    # float32 is where every model makes its angles: they are the truth here, not their rounding.
    angles = positions.float()[:, None] * frequencies(rotary_dim).to(device)
    error = turned(Bounded.exact(x), *cos_sin(positions, rows, rope), interleaved).rounded(dtype).error
    got = rope.rotate(x, positions, rows)
    assert_within(got, Bounded(naive_rotate(x, angles, rope.table.factor_X[0].double(), interleaved), error))
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (80, 32)])
@pytest.mark.parametrize("factor", [1.0, 0.5, 1.37])
def test_unrotate_undoes_rotate(device, dtype, dim, rotary_dim, interleaved, factor):
    rope = make(device, rotary_dim, interleaved=interleaved, factor=factor)
    x = torch.randn(3, 50, dim, device=device).to(dtype)
    positions = torch.arange(50, device=device) * 977
    rows = torch.full((50,), rope.row(1), device=device)
    rotated = rope.rotate(x, positions, rows)
    angles = positions.float()[:, None] * frequencies(rotary_dim).to(device)
    # What is undone is the rotation of what was stored, so the truth starts from its rounded values.
    exact = naive_rotate(rotated, -angles, 1 / rope.table.factor_X[0].double(), interleaved)
    error = turned_back(Bounded.exact(rotated), positions, rows, rope).rounded(dtype).error
    assert_within(rope.unrotate(rotated, positions, rows), Bounded(exact, error))


def test_rotation_is_relative(device):
    """The product of a query and a key depends on their distance alone, up to the angles' rounding."""
    rope = make(device, 32)
    q, k = torch.randn(2, 32, device=device, dtype=torch.float32)
    row = torch.tensor(rope.row(1), device=device)
    products = [
        rope.rotate(q, torch.tensor(at + 9, device=device), row) @ rope.rotate(k, torch.tensor(at, device=device), row)
        for at in (0, 1, 500, 5000)
    ]
    # An angle near 5,000 is rounded to 5000 * eps / 2, twice per product, against norms of q and k.
    limit = 2 * 5000 * torch.finfo(torch.float32).eps * q.norm() * k.norm()
    assert all(abs(p - products[0]) <= limit for p in products)


def growing(device, recompute: bool = False) -> Rope:
    """One row up to 10 tokens, then one per length."""
    return Rope(
        lambda length: (frequencies(16, 100.0 * max(length, 10)), 1.0 + max(length, 10) / 100),
        lambda length: length if length > 10 else 0,
        rotary_dim=16,
        interleaved=False,
        recompute_on_switch=recompute,
        device=device,
    )


def test_rows_are_made_once_and_stay(device):
    rope = growing(device)
    assert [rope.row(n) for n in (3, 10, 12, 11, 12, 1)] == [0, 0, 1, 2, 1, 0]
    positions, rows = torch.arange(4, device=device), torch.tensor([0, 1, 2, 1], device=device)
    before = rope.cos_sin(positions, rows)
    rope.row(99)
    assert all(torch.equal(a, b) for a, b in zip(before, rope.cos_sin(positions, rows), strict=True))


def test_the_table_stays_in_place_until_it_is_full(device):
    rope = growing(device)
    table = rope.table
    for i in range(FIRST_ROWS):
        assert rope.row(10 + i) == i
    assert rope.table.inv_freq_XF is table.inv_freq_XF
    assert len(table.factor_X) == FIRST_ROWS
    assert rope.row(99) == FIRST_ROWS
    grown = rope.table
    assert torch.equal(grown.inv_freq_XF[:FIRST_ROWS], table.inv_freq_XF)
    assert torch.equal(grown.inv_freq_XF[FIRST_ROWS], frequencies(16, 9900.0).to(device))
    assert not grown.inv_freq_XF[FIRST_ROWS + 1 :].any()
    assert not grown.factor_X[FIRST_ROWS + 1 :].any()
    assert len(grown.factor_X) == 2 * FIRST_ROWS
    assert (grown.interleaved, grown.rotary_dim) == (False, 16)


def test_rows_may_be_added_in_and_out_of_inference_mode(device):
    rope = growing(device)
    with torch.inference_mode():
        for i in range(FIRST_ROWS + 1):
            rope.row(10 + i)
    assert rope.row(99) == FIRST_ROWS + 1


def test_each_position_has_its_own_row(device, dtype):
    rope = growing(device)
    lengths = [5, 12, 300, 12]
    rows = torch.tensor([rope.row(n) for n in lengths], device=device)
    x = torch.randn(2, 4, 24, device=device).to(dtype)
    positions = torch.tensor([4, 11, 299, 7], device=device)
    got = rope.rotate(x, positions, rows)
    for i, length in enumerate(lengths):
        inv_freq = frequencies(16, 100.0 * max(length, 10)).to(device)
        # The table holds the factor in float32.
        factor, angles = torch.tensor(1.0 + max(length, 10) / 100).double(), positions[i].float() * inv_freq
        exact = naive_rotate(x[:, i], angles, factor, False)
        error = turned(Bounded.exact(x[:, i]), *cos_sin(positions[i], rows[i], rope), False).rounded(dtype).error
        assert_within(got[:, i], Bounded(exact, error))


def test_a_change_of_row_makes_keys_stale_only_where_the_model_says_so(device):
    assert not growing(device).must_recompute(5, 50)
    stale = growing(device, recompute=True)
    assert stale.must_recompute(10, 11)
    assert not stale.must_recompute(3, 10)
    assert not stale.must_recompute(12, 12)
