"""Naive float64 truths of the operations, one loop per axis, and the rule that ours are held to."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

GARBAGE = 1e4
"""What memory that nobody may read is filled with; fits every dtype."""


def relative_error(got: Tensor, exact: Tensor) -> float:
    assert got.shape == exact.shape
    assert torch.isfinite(got).all()
    return float((got.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def assert_as_exact_as(plain: Tensor, got: Tensor, exact: Tensor) -> None:
    """Our error is at most twice that of the plain op of the same dtype.

    The floor is half an ulp: the last rounding, to the dtype of the result, may cost every element so
    much, even where the plain op happens to hit the representable neighbour exactly.
    """
    assert got.dtype == plain.dtype
    floor = torch.finfo(got.dtype).eps / 2
    assert relative_error(got, exact) <= 2 * relative_error(plain, exact) + floor


def naive_attention(q_NTD: Tensor, k_KED: Tensor, v_KED: Tensor, allowed_KTE: Tensor) -> Tensor:
    """Attention row by row over the allowed slots only; zeros where there is none. float64."""
    heads, tokens, dim = q_NTD.shape
    group = heads // k_KED.shape[0]
    out = torch.zeros(heads, tokens, dim, dtype=torch.float64, device=q_NTD.device)
    for n in range(heads):
        for t in range(tokens):
            seen = allowed_KTE[n // group, t].nonzero().flatten()
            if len(seen):
                k, v = k_KED[n // group, seen].double(), v_KED[n // group, seen].double()
                weights = torch.softmax(k @ q_NTD[n, t].double() / math.sqrt(dim), dim=0)
                out[n, t] = weights @ v
    return out


def plain_attention(q_NTD: Tensor, k_KED: Tensor, v_KED: Tensor, allowed_KTE: Tensor) -> Tensor:
    """The textbook: matmul, softmax, matmul, all in the inputs' dtype."""
    group = q_NTD.shape[0] // k_KED.shape[0]
    k, v = k_KED.repeat_interleave(group, 0), v_KED.repeat_interleave(group, 0)
    scores = q_NTD @ k.mT / math.sqrt(q_NTD.shape[-1])
    hidden = ~allowed_KTE.repeat_interleave(group, 0)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1) @ v


def torch_attention(q_NTD: Tensor, k_KED: Tensor, v_KED: Tensor, allowed_KTE: Tensor) -> Tensor:
    """PyTorch's own op over repeated heads, for what is built on it: some of its kernels round more."""
    group = q_NTD.shape[0] // k_KED.shape[0]
    k, v, allowed = (x.repeat_interleave(group, 0) for x in (k_KED, v_KED, allowed_KTE))
    return torch.nn.functional.scaled_dot_product_attention(q_NTD[None], k[None], v[None], attn_mask=allowed)[0]


def worse(exact: Tensor, *plain: Tensor) -> Tensor:
    """Of several plain ops the one with the larger error."""
    return max(plain, key=lambda got: relative_error(got, exact))


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
