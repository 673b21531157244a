"""What every kernel promises: cases, a plain-PyTorch truth, and the bytes and operations it takes.

Tests, ``shadowkv check`` and ``shadowkv bench kernels`` go through these entries and know no kernel by name.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Traffic:
    """What a kernel has to move and to compute at least: HBM bytes, bytes over the bus to the host, operations."""

    device_bytes: int
    bus_bytes: int = 0
    flops: int = 0


CaseT = TypeVar("CaseT")
InputsT = TypeVar("InputsT")


class Op(ABC, Generic[CaseT, InputsT]):
    """One operation with a kernel.

    ``run`` and ``reference`` may write into their inputs, so each gets inputs of its own from the same seed,
    and returns under one name each everything that it has written.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    """Where the arithmetic is defined."""
    exact: ClassVar[frozenset[str]] = frozenset()
    """Outputs that must be equal to the last bit; the others may err at most twice as much as PyTorch."""

    @abstractmethod
    def cases(self) -> list[CaseT]:
        """Small ones, for correctness: every axis's limits, unequal rows, padding rows."""

    @abstractmethod
    def bench_cases(self) -> list[CaseT]:
        """Llama-3.1-8B geometry at the sizes that decoding meets."""

    @abstractmethod
    def make(self, case: CaseT, device: torch.device, dtype: torch.dtype, seed: int = 0) -> InputsT:
        """Inputs on the device; outputs and memory that must not be read hold NaN or a poison value."""

    @abstractmethod
    def run(self, inputs: InputsT) -> Outputs:
        """By the kernel."""

    @abstractmethod
    def reference(self, inputs: InputsT, dtype: torch.dtype) -> Outputs:
        """In plain PyTorch, in the arithmetic of this dtype: the inputs' own, or float64 for the truth."""

    @abstractmethod
    def traffic(self, case: CaseT, dtype: torch.dtype) -> Traffic:
        """The least that the case costs."""


@dataclass(frozen=True)
class Deviation:
    """One output of a kernel against the truth; for exact outputs the errors are entries that differ."""

    output: str
    error: float
    allowed: float
    words: str

    @property
    def right(self) -> bool:
        return self.error <= self.allowed

    @property
    def share(self) -> float:
        """The error as a share of what is allowed; infinite where nothing is allowed and something is wrong."""
        if self.right:
            return self.error / self.allowed if self.allowed else 0.0
        return self.error / self.allowed if self.allowed and self.error == self.error else float("inf")


def deviations(
    op: Op[CaseT, InputsT], case: CaseT, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> list[Deviation]:
    """How far every output of a kernel is from the truth.

    Shapes are compared too. For outputs that are not exact: max |kernel - float64| may be at most twice
    max |PyTorch in the same dtype - float64|, and never needs to be less than one rounding of the largest value.
    """
    got = op.run(op.make(case, device, dtype, seed))
    truth = op.reference(op.make(case, device, dtype, seed), torch.float64)
    usual = op.reference(op.make(case, device, dtype, seed), dtype)
    found = []
    for name, expected in truth.items():
        have = got[name]
        if have.shape != expected.shape:
            words = f"{name}: shape {tuple(have.shape)}, expected {tuple(expected.shape)}"
            found.append(Deviation(name, float("inf"), 0.0, words))
        elif name in op.exact:
            wrong = int((have != usual[name]).sum())
            found.append(Deviation(name, wrong, 0.0, f"{name}: {wrong} of {have.numel()} entries differ"))
        else:
            error, allowed = _errors(have, usual[name], expected)
            found.append(Deviation(name, error, allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"))
    return found


def excess(op: Op[CaseT, InputsT], case: CaseT, device: torch.device, dtype: torch.dtype, seed: int = 0) -> list[str]:
    """Where a kernel is further from the truth than its contract allows, in words; empty when it is right."""
    return [one.words for one in deviations(op, case, device, dtype, seed) if not one.right]


def _errors(have: Tensor, usual: Tensor, expected: Tensor) -> tuple[float, float]:
    """The kernel's error and what it may be. Infinities must stand where the truth has them."""
    if not expected.numel():
        return 0.0, 0.0
    finite = expected.isfinite()
    if not torch.equal(have[~finite].double(), expected[~finite].double()):
        return float("inf"), 0.0
    truth = expected[finite].double()
    if not truth.numel():
        return 0.0, 0.0
    error = float((have[finite].double() - truth).abs().max())
    rounding = float(truth.abs().max()) * torch.finfo(have.dtype).eps / 2
    return error, max(2 * float((usual[finite].double() - truth).abs().max()), rounding)
