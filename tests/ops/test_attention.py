"""Attention of a prompt, of new tokens over a run and over slots, against one row at a time in float64."""

import pytest
import torch
from torch import Tensor

from shadowkv.errors import ShapeError
from shadowkv.ops.attention import (
    decode_attention,
    dense_attention,
    group_queries,
    prefill_attention,
    slot_attention,
)
from shadowkv.ops.views import DenseView, SlotView
from tests.ops.truth import GARBAGE, LAYOUTS, assert_within, causal, naive_attention

GROUPS = [(32, 32), (32, 8), (32, 1), (3, 3), (6, 2), (1, 1)]
WIDTHS = [64, 80, 96, 128, 256]


@pytest.fixture
def draw(device, dtype):
    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, device=device)).to(dtype)

    return normal


def random_slots(kv_heads: int, tokens: int, slots: int, device: torch.device) -> Tensor:
    allowed = torch.rand(kv_heads, tokens, slots, device=device) < 0.4
    allowed[:, :, 0] = True
    return allowed


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_prompt(draw, device, heads, kv_heads, layout):
    make = LAYOUTS[layout]
    q, k, v = (make(draw(n, 37, 64)) for n in (heads, kv_heads, kv_heads))
    allowed = causal(37, 37, kv_heads, device)
    assert_within(prefill_attention(q, k, v), naive_attention(q, k, v, allowed))


@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("tokens", [1, 2, 65])
def test_prompt_of_any_width_and_length(draw, device, dim, tokens):
    q, k, v = (draw(n, tokens, dim) for n in (4, 2, 2))
    allowed = causal(tokens, tokens, 2, device)
    assert_within(prefill_attention(q, k, v), naive_attention(q, k, v, allowed))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_new_tokens_over_a_run(draw, device, heads, kv_heads, tokens, layout):
    make = LAYOUTS[layout]
    q, k, v = make(draw(heads, tokens, 64)), make(draw(kv_heads, 41, 64)), make(draw(kv_heads, 41, 64))
    allowed = causal(tokens, 41, kv_heads, device)
    assert_within(dense_attention(q, k, v), naive_attention(q, k, v, allowed))
    assert torch.equal(decode_attention(q, DenseView(k, v)), dense_attention(q, k, v))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_new_tokens_over_slots(draw, device, heads, kv_heads, tokens, layout):
    make = LAYOUTS[layout]
    q, k, v = make(draw(heads, tokens, 64)), make(draw(kv_heads, 41, 64)), make(draw(kv_heads, 41, 64))
    allowed = make(random_slots(kv_heads, tokens, 41, device))
    assert_within(slot_attention(q, k, v, allowed), naive_attention(q, k, v, allowed))
    assert torch.equal(decode_attention(q, SlotView(k, v, allowed)), slot_attention(q, k, v, allowed))


@pytest.mark.parametrize("dim", WIDTHS)
def test_new_tokens_of_any_width(draw, device, dim):
    q, k, v = draw(4, 2, dim), draw(2, 19, dim), draw(2, 19, dim)
    run, slots = causal(2, 19, 2, device), random_slots(2, 2, 19, device)
    assert_within(dense_attention(q, k, v), naive_attention(q, k, v, run))
    assert_within(slot_attention(q, k, v, slots), naive_attention(q, k, v, slots))


def test_the_last_tokens_of_a_prompt_are_what_the_prompt_gave(draw, device):
    q, k, v = (draw(n, 29, 64) for n in (6, 2, 2))
    allowed = causal(7, 29, 2, device)
    tail = q[:, -7:]
    truth = naive_attention(tail, k, v, allowed)
    for got in (prefill_attention(q, k, v)[:, -7:], dense_attention(tail, k, v), slot_attention(tail, k, v, allowed)):
        assert_within(got, truth)


@pytest.mark.parametrize("garbage", [GARBAGE, torch.inf, -torch.inf, torch.nan])
def test_slots_that_no_query_may_see_may_hold_anything(draw, device, garbage):
    """Fresh memory holds whatever its last owner wrote, such as the bytes of -1, which are a NaN."""
    q, k, v = draw(6, 3, 64), draw(2, 41, 64), draw(2, 41, 64)
    allowed = random_slots(2, 3, 41, device)
    clean = slot_attention(q, k, v, allowed)
    unseen_KE = ~allowed.any(dim=1)
    assert unseen_KE.any()
    k[unseen_KE] = garbage
    v[unseen_KE] = garbage
    assert torch.equal(slot_attention(q, k, v, allowed), clean)


@pytest.mark.parametrize("garbage", [GARBAGE, torch.inf, torch.nan])
def test_keys_hidden_from_one_query_do_not_touch_it(draw, device, garbage):
    """A later token's key may be anything: earlier queries of the same block do not see it."""
    q, k, v = draw(6, 3, 64), draw(2, 41, 64), draw(2, 41, 64)
    allowed = causal(3, 41, 2, device)
    clean = slot_attention(q, k, v, allowed)
    k[:, -1] = garbage
    assert torch.equal(slot_attention(q, k, v, allowed)[:, :2], clean[:, :2])


def test_a_nan_that_may_be_seen_shows(draw, device):
    """Attended NaN is the model's own and must not be covered up."""
    q, k, v = draw(2, 1, 64), draw(2, 9, 64), draw(2, 9, 64)
    allowed = torch.ones(2, 1, 9, dtype=torch.bool, device=device)
    v[0, 4] = torch.nan
    got = slot_attention(q, k, v, allowed)
    assert torch.isnan(got[0]).all()
    assert torch.isfinite(got[1]).all()


@pytest.mark.parametrize("garbage", [0.0, GARBAGE, torch.nan])
def test_a_query_that_may_see_nothing_gives_zeros(draw, device, garbage):
    q, k, v = draw(6, 3, 64), draw(2, 11, 64), draw(2, 11, 64)
    allowed = random_slots(2, 3, 11, device)
    allowed[0, 1] = False
    allowed[1] = False
    k[1], v[1] = garbage, garbage
    got = slot_attention(q, k, v, allowed)
    assert (got[:3, 1] == 0).all()
    assert (got[3:] == 0).all()
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_scores_do_not_overflow(device, dtype):
    """Products of 60 x 60 over 128 dimensions pass float16's 65,504; the scores must live in float32.

    Whole numbers up to 200 are exact in both dtypes, and sums of 128 of their products in float32.
    """
    q, k, v = (torch.randn(n, 33, 128, device=device) for n in (8, 2, 2))
    q, k, v = *((60 * x).round().clamp(-200, 200).to(dtype) for x in (q, k)), v.to(dtype)
    k[:, 5] = q[::4, 20]  # one certain winner far above what the dtype holds
    assert float(q[0, 20].double() @ k[0, 5].double()) > 65504
    allowed = causal(33, 33, 2, device)
    truth = naive_attention(q, k, v, allowed, exact_products=True)
    for got in (prefill_attention(q, k, v), dense_attention(q, k, v), slot_attention(q, k, v, allowed)):
        assert_within(got, truth)


def test_inputs_stay_as_they_are(draw, device):
    q, k, v = draw(4, 3, 64), draw(2, 9, 64), draw(2, 9, 64)
    allowed = random_slots(2, 3, 9, device)
    before = [x.clone() for x in (q, k, v, allowed)]
    slot_attention(q, k, v, allowed)
    dense_attention(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v, allowed), strict=True))


def test_queries_of_a_group_lie_side_by_side():
    q = torch.arange(6 * 2 * 3).reshape(6, 2, 3)
    grouped = group_queries(q, 2)
    assert grouped.shape == (2, 6, 3)
    for n in range(6):
        for t in range(2):
            assert torch.equal(grouped[n // 3, n % 3 * 2 + t], q[n, t])


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((4, 5, 8), (3, 5, 8), (3, 5, 8)),
        ((4, 5, 8), (2, 6, 8), (2, 6, 8)),
        ((4, 5, 8), (2, 5, 8), (2, 5, 4)),
        ((4, 5, 8), (2, 5, 16), (2, 5, 16)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q, k, v):
    with pytest.raises(ShapeError, match="prefill attention of q"):
        prefill_attention(torch.zeros(q), torch.zeros(k), torch.zeros(v))


def test_heads_that_do_not_divide_are_refused():
    q, k = torch.zeros(5, 1, 8), torch.zeros(2, 7, 8)
    with pytest.raises(ShapeError, match="5 query heads"):
        dense_attention(q, k, k)
    with pytest.raises(ShapeError, match="5 query heads"):
        slot_attention(q, k, k, torch.ones(2, 1, 7, dtype=torch.bool))
