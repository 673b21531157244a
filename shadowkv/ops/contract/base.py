"""What every kernel promises: cases, a plain-PyTorch truth, and the bytes and operations it takes.

Tests, ``shadowkv check`` and ``shadowkv bench kernels`` go through these entries and know no kernel by name.

The rule that a kernel is held to: outputs that are ``exact`` equal plain PyTorch's to the last bit; in all others each
element may miss the float64 truth by what its own arithmetic can lose, which :mod:`bounds` adds up step by step. How
much PyTorch itself misses the truth is told beside it and decides nothing.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from shadowkv.ops.contract.bounds import Bounded

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
    """Outputs that must equal the reference's to the last bit; each element of the others has a bound of its own."""

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
    def reference(self, inputs: InputsT) -> Outputs:
        """In plain PyTorch, in the arithmetic of the inputs' dtype."""

    def truth(self, inputs: InputsT) -> dict[str, Bounded]:
        """All outputs that are not exact, worked out in float64 with what the kernel's arithmetic may lose."""
        return {}

    @abstractmethod
    def faults(self, inputs: InputsT) -> dict[str, Outputs]:
        """What kernels with a known fault would leave, by the name of the fault: outputs in any float dtype.

        Each has to be refused in at least one case of every dtype in which it is named.
        """

    @abstractmethod
    def traffic(self, case: CaseT, dtype: torch.dtype) -> Traffic:
        """The least that the case costs."""


@dataclass(frozen=True)
class Deviation:
    """One output of a kernel against the truth.

    ``share``: the largest error of an element as a share of what that element may lose; for exact outputs infinite if
    any entry differs. ``plain``: the same of plain PyTorch, as information.
    """

    output: str
    share: float
    plain: float
    words: str

    @property
    def right(self) -> bool:
        return self.share <= 1


def deviations(
    op: Op[CaseT, InputsT], case: CaseT, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> list[Deviation]:
    """How far every output of a kernel is from the truth."""
    got = op.run(op.make(case, device, dtype, seed))
    truth = op.truth(op.make(case, device, dtype, seed))
    return judged(got, truth, op.reference(op.make(case, device, dtype, seed)), op.exact)


def judged(got: Outputs, truth: dict[str, Bounded], plain: Outputs, exact: frozenset[str]) -> list[Deviation]:
    """Results against the truth, or against plain PyTorch where they are exact. Shapes are compared too."""
    found = []
    for name, usual in plain.items():
        have = got[name]
        if have.shape != usual.shape:
            words = f"{name}: shape {tuple(have.shape)}, expected {tuple(usual.shape)}"
            found.append(Deviation(name, float("inf"), 0.0, words))
        elif name in exact:
            wrong = int((have != usual).sum())
            words = f"{name}: {wrong} of {have.numel()} entries differ"
            found.append(Deviation(name, float("inf") if wrong else 0.0, 0.0, words))
        else:
            share, words = truth[name].worst(have)
            found.append(Deviation(name, share, truth[name].worst(usual)[0], f"{name}: {words}"))
    return found


def excess(op: Op[CaseT, InputsT], case: CaseT, device: torch.device, dtype: torch.dtype, seed: int = 0) -> list[str]:
    """Where a kernel is further from the truth than its contract allows, in words; empty when it is right."""
    return [one.words for one in deviations(op, case, device, dtype, seed) if not one.right]
