"""Naive float64 truths of the operations, one loop per axis, with what float32 may lose in them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shadowkv.ops.contract.bounds import Bounded

GARBAGE = 1e4
"""What memory that nobody may read is filled with; fits every dtype."""


FAST_EXP = 20 * 2.0**-23
"""What the exponential of PyTorch's fused attention on CPUs may lose: 20 units in the last place, as Sleef calls it."""


def assert_within(got: Tensor, truth: Bounded) -> None:
    """No element misses the truth by more than the arithmetic may lose."""
    share, words = truth.worst(got)
    assert share <= 1, words


def naive_attention(
    q_NTD: Tensor, k_KED: Tensor, v_KED: Tensor, allowed_KTE: Tensor, *, exact_products: bool = False
) -> Bounded:
    """Attention row by row over the allowed slots only; zeros where there is none.

    Rounded as textbook code and fused kernels may: queries and keys each scaled by half, scores and weights in the
    storage dtype. ``exact_products``: of integers whose sums float32 holds, scaled afterwards, in float32.
    """
    heads, tokens, dim = q_NTD.shape
    group, dtype = heads // k_KED.shape[0], q_NTD.dtype
    out = Bounded.full((heads, tokens, dim), 0.0, q_NTD.device)
    for n in range(heads):
        for t in range(tokens):
            seen = allowed_KTE[n // group, t].nonzero().flatten()
            if not len(seen):
                continue
            q_1D, k_SD, v_SD = (
                Bounded.exact(x) for x in (q_NTD[n, t][None], k_KED[n // group, seen], v_KED[n // group, seen])
            )
            if exact_products:
                score_1S = Bounded.exact(q_1D.value @ k_SD.value.T) * (1 / math.sqrt(dim))
            else:
                q_1D, k_SD = ((x * dim**-0.25).rounded(dtype) for x in (q_1D, k_SD))
                score_1S = (q_1D @ k_SD.moved(torch.t)).rounded(dtype)
            weight_1S = (score_1S - score_1S.amax(1, keepdim=True)).exp().loosened(FAST_EXP).rounded(dtype)
            mean_1D = weight_1S @ v_SD / weight_1S.sum(1, keepdim=True)
            out.put((n, t), mean_1D.rounded(dtype)[0])
    return out


def log_shares(logits_KGC: Bounded, selectable_KC: Tensor) -> Bounded:
    """Logarithms of the softmax over the selectable chunks, the largest of a group: [K, C]."""
    found = logits_KGC.masked_fill(~selectable_KC[:, None], -torch.inf)
    return (found - log_sum_exp(found, 2)).amax(1)


def log_sum_exp(x: Bounded, dim: int) -> Bounded:
    """Along an axis, which is kept; of finite numbers at least one."""
    top = x.amax(dim, keepdim=True)
    return (x - top).exp().sum(dim, keepdim=True).function(torch.log) + top


def causal(tokens: int, context: int, kv_heads: int, device: torch.device) -> Tensor:
    """[K, T, S]: token t of the last T sees everything up to itself."""
    allowed = torch.zeros(kv_heads, tokens, context, dtype=torch.bool, device=device)
    for t in range(tokens):
        allowed[:, t, : context - tokens + t + 1] = True
    return allowed


def strided(x: Tensor) -> Tensor:
    """The same values with every axis spread out in memory, between garbage."""
    wide = torch.full([2 * n for n in x.shape], GARBAGE, dtype=x.dtype, device=x.device)
    view = wide[tuple(slice(1, None, 2) for _ in x.shape)]
    view.copy_(x)
    return view


def transposed(x: Tensor) -> Tensor:
    """The same values with the memory order of the axes reversed."""
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "strided": strided,
    "transposed": transposed,
}
