"""How far rounding may move attention and whole models, whatever the order in which sums are made.

One attention is worked out with bounds, as kernels are (``shadowkv.ops.contract.bounds``). Through the layers of a
model such bounds grow far beyond what ever happens; there :class:`OtherRounding` makes the errors on purpose, one in
every operation.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shadowkv.ops.contract.bounds import ACCUMULATOR, FUNCTION, Bounded
from tests.ops.truth import FAST_EXP

ROTATION = 8 * ACCUMULATOR
"""What a rotation by RoPE may lose, as a share of the vector's length: cos, sin, their factor, a product and a sum lose
less than five units in each of two terms, whose magnitudes together are at most sqrt(2) times the length."""


def attention(
    q_NTD: Tensor,
    k_KSD: Tensor,
    v_KSD: Tensor,
    seen_KTS: Tensor | None = None,
    keys_off_KS: Tensor | float = 0.0,
) -> Bounded:
    """Attention scaled by 1/sqrt(D), [N, T, D], in the queries' dtype.

    Rounded as textbook code and fused kernels may: queries and keys each scaled by half, logits and weights in the
    storage dtype.

    Args:
        seen_KTS: which keys a query sees; by default the queries are the last tokens, and causal.
        keys_off_KS: how far each key may be from the one given, in length.
    """
    dtype, (heads, tokens, dim), (kv_heads, context, _) = q_NTD.dtype, q_NTD.shape, k_KSD.shape
    if seen_KTS is None:
        seen_KTS = torch.ones(tokens, context, dtype=torch.bool, device=q_NTD.device).tril(context - tokens)[None]
    q_KGTD = Bounded.exact(q_NTD.reshape(kv_heads, heads // kv_heads, tokens, dim))
    k_K1SD, v_K1SD = (Bounded.exact(x[:, None]) for x in (k_KSD, v_KSD))
    q, k = ((x * dim**-0.25).rounded(dtype) for x in (q_KGTD, k_K1SD))
    logits_KGTS = (q @ k.moved(lambda x: x.mT)).rounded(dtype)
    off = torch.as_tensor(keys_off_KS, dtype=torch.float64, device=q_NTD.device).expand(kv_heads, context)
    more_KGTS = q_KGTD.value.norm(dim=-1, keepdim=True) * off[:, None, None] / math.sqrt(dim)
    logits_KGTS = Bounded(logits_KGTS.value, logits_KGTS.error + more_KGTS)
    logits_KGTS = logits_KGTS.masked_fill((~seen_KTS[:, None]).expand_as(logits_KGTS.value), -torch.inf)
    weights = (logits_KGTS - logits_KGTS.amax(-1, keepdim=True)).exp().loosened(FAST_EXP).rounded(dtype)
    mean_KGTD = (weights @ v_K1SD / weights.sum(-1, keepdim=True)).rounded(dtype)
    return mean_KGTD.moved(lambda x: x.reshape(q_NTD.shape))


def share(known: Bounded) -> float:
    """What may be lost, of the result: both as lengths over all elements."""
    return float(known.error.norm() / known.value.norm())


class OtherRounding(TorchDispatchMode):
    """Moves what every operation gives, to one side or the other by chance, by the most that rounding may.

    A sum of n products in any order is off by n roundings of partial sums, none of which is larger than the sum of
    the products' magnitudes. Their signs are not all the same: sqrt(n) of them are what is to be expected in the
    worst of orders (Higham and Mary, 2019); those that libraries take are better by an order of magnitude.
    Functions lose what kernels may lose in them, and what is stored in half precision half of its last place.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple) else out
        if not isinstance(first, Tensor) or not first.is_floating_point() or not first.numel():
            return out
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        by = _moved_by(func._schema.name.removeprefix("aten::"), given, first)
        if by is None:
            return out
        sides = 2 * torch.randint(2, first.shape, generator=self.generator).to(first.device) - 1
        moved = (first.double() + sides * by).to(first.dtype)
        moved = torch.where(first.isfinite(), moved, first)
        return (moved, *out[1:]) if isinstance(out, tuple) else moved


def allowance(run: Callable[[], Tensor], draws: int = 4) -> float:
    """The most that any number of what ``run`` gives moves under :class:`OtherRounding`, and as much again."""
    plain = run().double()
    others = []
    for seed in range(draws):
        with OtherRounding(seed):
            others.append(run().double())
    return 2 * max(float((other - plain).abs().max()) for other in others)


PRODUCTS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "matmul": ("self", "other"),
    "addmm": ("mat1", "mat2", "self"),
    "baddbmm": ("batch1", "batch2", "self"),
    "linear": ("input", "weight", "bias"),
}
"""The operands of products, and what is added to them."""
FUNCTIONS = {"exp", "cos", "sin", "log", "rsqrt", "silu", "gelu", "tanh", "sigmoid"}
STORED = {"add", "sub", "mul", "div", "_to_copy"}


def _moved_by(name: str, given: dict[str, Any], out: Tensor) -> Tensor | None:
    """How far what the operation gives may be off; None where it is the same everywhere."""
    stored, step = (torch.finfo(x).eps / 2 for x in (out.dtype, torch.promote_types(out.dtype, torch.float32)))
    size = out.double().abs()
    in_half = stored * size if stored > step else torch.zeros_like(size)
    if name in PRODUCTS:
        left, right, *more = (given.get(key) for key in PRODUCTS[name])
        x, y = left.double().abs(), right.double().abs()
        sums = x @ (y.mT if name == "linear" else y)
        sums = sums + (more[0].double().abs() if more and more[0] is not None else 0)
        return math.sqrt(x.shape[-1]) * step * sums + in_half
    if "scaled_dot_product" in name:
        return _attention_moved_by(given, step) + in_half
    if name in ("sum", "mean"):
        x, dims = given["self"].double().abs(), given.get("dim")
        sums = x.sum(dims or None, keepdim=given.get("keepdim", False))
        terms = x.numel() / size.numel()
        return math.sqrt(terms) * step * (sums / terms if name == "mean" else sums) + in_half
    if name in ("_softmax", "_log_softmax", "logsumexp"):
        terms = given["self"].shape[given["dim"] if isinstance(given["dim"], int) else given["dim"][0]]
        return (math.sqrt(terms) + 4) * step * (size if name == "_softmax" else 1 + size) + in_half
    if name in FUNCTIONS:
        return FUNCTION / ACCUMULATOR * 2 * step * size + in_half
    return in_half if name in STORED and stored > step else None


def _attention_moved_by(given: dict[str, Any], step: float) -> Tensor:
    """Of logits with D terms, and of weighted sums over S tokens."""
    q, k, v = (given[key].double() for key in ("query", "key", "value"))
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    scale, mask = given.get("scale") or 1 / math.sqrt(q.shape[-1]), given.get("attn_mask")
    logits = q @ k.mT * scale
    if given.get("is_causal"):
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        assert mask.dtype == torch.bool
        logits = logits.masked_fill(~mask, -torch.inf)
    weights = logits.softmax(-1)
    off = math.sqrt(q.shape[-1]) * step * scale * (weights * (q.abs() @ k.abs().mT)).sum(-1, keepdim=True)
    lost = 2 * off + (math.sqrt(k.shape[-2]) + 4) * step + FAST_EXP / ACCUMULATOR * 2 * step
    return lost * (weights @ v.abs())
