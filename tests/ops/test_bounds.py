"""Bounds of float32 arithmetic: what float32 really loses stays inside, and what is too much falls outside."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shadowkv.ops.contract.bounds import ROUNDOFF, Bounded, concatenated, stacked
from shadowkv.ops.contract.faults import narrow_product, narrow_sum, tf32_product
from tests.ops.truth import assert_within

N = 300


def added(x: Tensor, order: Tensor) -> Tensor:
    """The float32 sum of a vector, one term after the other."""
    total = torch.zeros(())
    for term in x[order]:
        total = total + term
    return total


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "forward": lambda x: torch.arange(len(x)),
    "backward": lambda x: torch.arange(len(x)).flip(0),
    "largest first": lambda x: x.abs().argsort(descending=True),
    "smallest first": lambda x: x.abs().argsort(),
    "signs apart": lambda x: x.argsort(),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spread", [1.0, 8.0], ids=["alike", "of many sizes"])
def test_a_sum_in_any_order(order: str, spread: float) -> None:
    x = torch.randn(N) * torch.exp2(spread * torch.randn(N))
    assert_within(added(x, ORDERS[order](x)), Bounded.exact(x).sum(0))
    assert_within(x.sum(), Bounded.exact(x).sum(0))


def test_the_worst_sum_comes_near_its_bound() -> None:
    """Each of many small terms is lost beside a large one, so no smaller rule would do for every order."""
    x = torch.cat([torch.ones(1), torch.full((N - 1,), ROUNDOFF)])
    bounded = Bounded.exact(x).sum(0)
    lost, _ = bounded.worst(added(x, torch.arange(N)))
    assert 0.4 < lost <= 0.5  # half, since tensor cores may cut where this has rounded


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6), min_size=4, max_size=4),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_a_chain_of_operations(numbers: list[float], dtype: torch.dtype) -> None:
    a, b, c, d = (torch.tensor([x], dtype=torch.float32) for x in numbers)
    e, f, g, h = (Bounded.exact(x) for x in (a, b, c, d))
    shrunk = 1e-3
    assert_within((a + b) * c - d, (e + f) * g - h)
    assert_within(a * shrunk - b * b, e * shrunk - f * f)
    assert_within(a / (b * b + 1), e / (f * f + 1.0))
    assert_within((a * 1e-5).exp(), (e * 1e-5).exp())
    assert_within((a * a + 1).rsqrt(), (e * e + 1.0).function(torch.rsqrt))
    assert_within((a * shrunk).to(dtype).float() * b, (e * shrunk).rounded(dtype) * f)


def test_products_of_matrices() -> None:
    a, b = torch.randn(5, 40), torch.randn(40, 7)
    right = Bounded.exact(a) @ Bounded.exact(b)
    assert_within(a @ b, right)
    assert_within(
        (a.half() @ b.half()).float(), (Bounded.exact(a.half()) @ Bounded.exact(b.half())).rounded(torch.float16)
    )
    for wrong in (tf32_product(a, b), narrow_product(a, b, torch.float16), a[:, 1:] @ b[1:], right.value + 1e-4):
        assert right.worst(wrong)[0] > 1


def test_errors_pass_through_products() -> None:
    """What a factor has lost may be lost in the same direction everywhere."""
    a, b = torch.randn(5, 40), torch.randn(40, 7)
    halved = a.half()
    lost = Bounded.exact(a).rounded(torch.float16) @ Bounded.exact(b)
    assert_within(halved.double() @ b.double(), lost)
    assert (Bounded.exact(a) @ Bounded.exact(b)).worst(halved.double() @ b.double())[0] > 1


def test_infinities_and_exact_numbers_must_be_equal() -> None:
    truth = Bounded.exact(torch.tensor([1.0, -torch.inf, 0.0]))
    assert truth.worst(torch.tensor([1.0, -torch.inf, 0.0]))[0] == 0
    for wrong in (
        [1.0, -torch.inf, 1e-30],
        [1.0, -1e30, 0.0],
        [torch.nan, -torch.inf, 0.0],
        [torch.inf, -torch.inf, 0],
    ):
        share, words = truth.worst(torch.tensor(wrong))
        assert share == torch.inf
        assert words.endswith("of 3")
    assert (truth * 3.0 + 1.0).error.isfinite().all()
    assert truth.exp().value[1] == 0


def test_nan_is_never_right() -> None:
    wide = Bounded(torch.zeros(2, dtype=torch.float64), torch.full((2,), 1e9, dtype=torch.float64))
    assert wide.worst(torch.tensor([0.0, 5e8]))[0] == 0.5
    assert wide.worst(torch.tensor([0.0, torch.nan]))[0] == torch.inf


def test_small_numbers_may_vanish() -> None:
    """Half of float16's smallest number is lost to zero, and so is what float32 does not hold."""
    small = torch.tensor([2.0**-25, -(2.0**-26)])
    assert_within(small.half(), Bounded.exact(small).rounded(torch.float16))
    assert_within(torch.tensor([0.0]), Bounded.exact(torch.tensor([-200.0])).exp())


def test_maxima_and_places() -> None:
    x = Bounded(*torch.tensor([[[1.0, 3.0], [2.0, -1.0]], [[0.5, 0.1], [0.1, 9.0]]], dtype=torch.float64))
    top = x.amax(1)
    assert top.value.tolist() == [3, 2]
    assert top.error.tolist() == [0.5, 9]
    assert x[0].error.tolist() == [0.5, 0.1]
    assert concatenated([x, x], 1).error.shape == (2, 4)
    assert stacked([x, x], 0).value.shape == (2, 2, 2)
    x.put((0, slice(None)), Bounded.exact(torch.tensor([7.0, 8.0])))
    assert x.error.tolist() == [[0, 0], [0.1, 9]]
    filled = x.masked_fill(torch.tensor([[True, False], [False, True]]), -1.0)
    assert filled.value.tolist() == [[-1, 8], [2, -1]]
    assert filled.error.tolist() == [[0, 0], [0.1, 0]]


def test_a_sum_in_a_narrow_dtype_stops_growing() -> None:
    """float16 does not tell 2048 and 2049 apart."""
    assert narrow_sum(torch.ones(3000), 0, torch.float16) == 2048
