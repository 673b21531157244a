"""What kernels with a known fault would leave: the means to make such results.

Every contract lists faults that its rule has to refuse, so that no bound is so wide that it would let a wrong kernel
pass. They are worked out in float64, and only the fault itself sets them apart from the truth.
"""

import torch
from torch import Tensor

from shadowkv.ops.contract.bounds import Bounded

LEFT_OUT = "a term, token or chunk is left out"
NARROW_SUM = "a sum is kept in the storage dtype"
TF32 = "float32 is multiplied as TF32"
ONE_OFF = "the chunk, element or row beside the right one is taken"


def values_of(truth: dict[str, Bounded]) -> dict[str, Tensor]:
    """The exact values of a truth, which was perhaps worked out from altered inputs."""
    return {name: bounded.value for name, bounded in truth.items()}


def narrow_sum(terms: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """A sum term by term, rounded to the dtype after each, in float64."""
    total = torch.zeros_like(terms.select(dim, 0), dtype=dtype)
    for term in terms.unbind(dim):
        total = (total.double() + term).to(dtype)
    return total.double()


def narrow_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix product whose sums are kept in the dtype: [..., M, K] by [..., K, N], in float64."""
    return narrow_sum(a.double()[..., :, None, :] * b.double().mT[..., None, :, :], -1, dtype)


def tf32_product(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product of what TF32 keeps of its factors, in float64."""
    return _tf32(a) @ _tf32(b)


def _tf32(x: Tensor) -> Tensor:
    """Float32 with ten bits after the point, rounded."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).double()


def coarse_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[str, Tensor]:
    """The usual way to lose precision in a product of factors of this dtype: its name, and the product."""
    if dtype == torch.float32:
        return TF32, tf32_product(a, b)
    return NARROW_SUM, narrow_product(a, b, dtype)


def last_zeroed(x: Tensor, dim: int) -> Tensor:
    """The same numbers, but 0 in the last place of an axis."""
    out = x.clone()
    out.select(dim, -1).zero_()
    return out
