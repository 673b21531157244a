"""Numbers with a bound on what floating-point arithmetic may have made of them.

A kernel is held to its own arithmetic, and not to what another library happens to lose on one processor. A contract
works a result out in float64, in the steps that the kernel takes, and every step adds the most that float32 may lose
in it: whatever the order of a sum, with fused multiply-adds or without, on tensor cores or on a CPU. What
remains is the largest error that a right kernel can have, for each element.

Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition: sections 2.2 (one operation), 3.1 (sums
and products in any order) and 3.3 (running error bounds).
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor

ROUNDOFF = 2.0**-24
"""The most that one float32 operation loses, as a share of its result."""
ACCUMULATOR = 2.0**-23
"""The most that a sum in float32 loses with each of its terms. It is twice the roundoff, since tensor cores cut where
others round (Fasi, Higham, Mikaitis, Pranesh: Numerical behavior of NVIDIA tensor cores, PeerJ CS 2021)."""
FUNCTION = 4 * 2.0**-23
"""The most that exp, log, erf, a root or a quotient loses: four units in the last place. CUDA's approximations state
two (CUDA C++ Programming Guide, mathematical functions), vector libraries of CPUs up to four."""
SMALLEST = 2.0**-126
"""The smallest normal float32; whatever is below it may become zero."""

Place = int | slice | Tensor | EllipsisType | None
Index = Place | tuple[Place, ...]


def _lost(size: Tensor, share: float) -> Tensor:
    """A share of a magnitude. Infinities are exact, so they lose nothing."""
    return torch.where(size.isfinite(), share * size, 0.0)


def _lost_in_sums(terms: int) -> float:
    """What a sum of so many terms may lose, as a share of the sum of their magnitudes."""
    return terms * ACCUMULATOR / (1 - terms * ACCUMULATOR)


@dataclass(frozen=True)
class Bounded:
    """Exact values, and the most by which float32 may miss each. Both float64, of one shape."""

    value: Tensor
    error: Tensor

    @classmethod
    def exact(cls, x: Tensor) -> "Bounded":
        """Numbers that are given, in any dtype."""
        return cls(x.double(), torch.zeros_like(x, dtype=torch.float64))

    @classmethod
    def full(cls, shape: tuple[int, ...], value: float, device: torch.device) -> "Bounded":
        """One exact number everywhere."""
        return cls.exact(torch.full(shape, value, dtype=torch.float64, device=device))

    @property
    def size(self) -> Tensor:
        """The largest magnitude that each may have."""
        return self.value.abs() + self.error

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Bounded":
        """The same numbers in other places: a reshape, a permutation."""
        return Bounded(move(self.value), move(self.error))

    def __getitem__(self, index: Index) -> "Bounded":
        return Bounded(self.value[index], self.error[index])

    def worst(self, have: Tensor) -> tuple[float, str]:
        """The largest share of its bound that an element of a result takes, and the element in words.

        At most 1 if the result is right. Infinities, and numbers that nothing is lost in, must be equal.
        """
        assert have.shape == self.value.shape
        if not have.numel():
            return 0.0, "empty"
        error = (have.double() - self.value).abs().masked_fill(have.double() == self.value, 0)
        error = error.nan_to_num(nan=torch.inf, posinf=torch.inf)
        share = torch.where(error == 0, 0.0, error / self.error).flatten()
        at = int(share.argmax())
        most, allowed = float(error.flatten()[at]), float(self.error.flatten()[at])
        return float(share[at]), f"error {most:.3g}, allowed {allowed:.3g}, in element {at} of {have.numel()}"

    def put(self, index: Index, numbers: "Bounded") -> None:
        """Write numbers into these, in place."""
        self.value[index], self.error[index] = numbers.value, numbers.error

    def masked_fill(self, mask: Tensor, value: float) -> "Bounded":
        """An exact number where the mask is true."""
        return Bounded(self.value.masked_fill(mask, value), self.error.masked_fill(mask, 0))

    def loosened(self, share: float) -> "Bounded":
        """The same values with an error that is larger by a share of them."""
        return Bounded(self.value, self.error + _lost(self.size, share))

    def rounded(self, dtype: torch.dtype) -> "Bounded":
        """After one rounding to a dtype."""
        info = torch.finfo(dtype)
        vanishes = max(info.tiny * info.eps / 2, SMALLEST)
        return Bounded(self.value, self.error + vanishes).loosened(info.eps / 2)

    def __neg__(self) -> "Bounded":
        return Bounded(-self.value, self.error)

    def __add__(self, other: "Bounded | float") -> "Bounded":
        more = _bounded(other, self.value)
        return Bounded(self.value + more.value, self.error + more.error).loosened(ROUNDOFF)

    def __sub__(self, other: "Bounded") -> "Bounded":
        return self + -other

    def __mul__(self, other: "Bounded | float") -> "Bounded":
        more = _bounded(other, self.value)
        value, error = self.value * more.value, self.value.abs() * more.error + self.error * more.size
        return Bounded(value, error.masked_fill(value.isinf(), 0)).loosened(ROUNDOFF)

    def __truediv__(self, other: "Bounded | float") -> "Bounded":
        by = _bounded(other, self.value)
        value = self.value / by.value
        error = (self.error + value.abs() * by.error) / (by.value.abs() - by.error)
        return Bounded(value, error).loosened(FUNCTION)

    def __matmul__(self, other: "Bounded") -> "Bounded":
        """A matrix product whose K terms are added up in float32 in any order."""
        error = self.error @ other.size + self.value.abs() @ other.error
        lost = _lost_in_sums(self.value.shape[-1]) * (self.size @ other.size)
        return Bounded(self.value @ other.value, error + lost)

    def sum(self, dim: int, *, keepdim: bool = False) -> "Bounded":
        """A sum in float32 in any order."""
        lost = _lost_in_sums(self.value.shape[dim]) * self.size
        return Bounded(self.value.sum(dim, keepdim=keepdim), (self.error + lost).sum(dim, keepdim=keepdim))

    def amax(self, dim: int, *, keepdim: bool = False) -> "Bounded":
        """The largest: a maximum moves no further than what it is taken of."""
        return Bounded(self.value.amax(dim, keepdim=keepdim), self.error.amax(dim, keepdim=keepdim))

    def function(self, of: Callable[[Tensor], Tensor]) -> "Bounded":
        """A monotonic function of each."""
        value = of(self.value)
        moved = torch.maximum(
            (of(self.value + self.error) - value).abs(), (of(self.value - self.error) - value).abs()
        ).nan_to_num(nan=0.0)  # of infinities
        return Bounded(value, moved + SMALLEST).loosened(FUNCTION)

    def exp(self) -> "Bounded":
        """As float32 has it, by a power of two: its argument is multiplied by a rounded log2(e), and rounded."""
        return self.loosened(2 * ROUNDOFF).function(torch.exp)


def _bounded(x: "Bounded | float", like: Tensor) -> Bounded:
    """A number of the program's text is rounded to float32."""
    if isinstance(x, Bounded):
        return x
    return Bounded.full((), x, like.device).loosened(ROUNDOFF)


def concatenated(parts: list[Bounded], dim: int) -> Bounded:
    """Numbers side by side along an axis."""
    return Bounded(torch.cat([part.value for part in parts], dim), torch.cat([part.error for part in parts], dim))


def stacked(parts: list[Bounded], dim: int) -> Bounded:
    """Numbers side by side along a new axis."""
    return Bounded(torch.stack([part.value for part in parts], dim), torch.stack([part.error for part in parts], dim))
