"""Which part of a decode step a kernel belongs to, by its name, and how long each part keeps the GPU busy."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PARTS = ("select", "keys", "values", "attention", "linears", "rest")
"""Of a step, in the order of the report."""

BY_FRAGMENT: tuple[tuple[str, str], ...] = (
    ("score", "select"),
    ("choose", "select"),
    ("overwrite_logits", "select"),
    ("rebuild", "keys"),
    ("landmark", "keys"),
    ("join", "keys"),
    ("fetch", "values"),
    ("attend", "attention"),
    ("attention", "attention"),
    ("flash", "attention"),
    ("fmha", "attention"),
    ("sdpa", "attention"),
    ("merge_runs", "attention"),
    ("gemm", "linears"),
    ("gemv", "linears"),
    ("nvjet", "linears"),
    ("cutlass", "linears"),
    ("splitk", "linears"),
    ("xmma", "linears"),
    ("add_norm", "rest"),
    ("rope_append", "rest"),
    ("_gate", "rest"),
)
"""Pieces of kernel names, in lower case; the first that is found decides. Whatever has none is ``rest``, too."""

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
"""What the profiler calls work on the device."""


@dataclass(frozen=True)
class Busy:
    """One kernel's stay on the device, in microseconds."""

    name: str
    start: float
    end: float


def known_part(kernel: str) -> str | None:
    """The part that the table gives a kernel, if it knows it."""
    name = kernel.lower()
    return next((part for fragment, part in BY_FRAGMENT if fragment in name), None)


def part_of(kernel: str) -> str:
    """The part of a step that a kernel belongs to."""
    return known_part(kernel) or "rest"


def read_trace(path: Path) -> list[Busy]:
    """The device's work in a trace that the profiler has written."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [
        Busy(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in GPU_CATEGORIES
    ]


def covered_us(stays: Iterable[Busy]) -> float:
    """The time in which at least one of them is on the device."""
    total, reached = 0.0, float("-inf")
    for stay in sorted(stays, key=lambda one: one.start):
        if stay.end > reached:
            total += stay.end - max(stay.start, reached)
            reached = stay.end
    return total


@dataclass(frozen=True)
class PartTimes:
    """Busy milliseconds of a step by part. Parts that run side by side add up to more than ``busy_ms``."""

    by_part_ms: dict[str, float]
    busy_ms: float
    """In which anything runs."""
    kernels: float
    """Launched in a step."""
    unmatched: tuple[str, ...]
    """Names of the longest kernels that no fragment knows, for whoever keeps the table."""


def split_by_part(stays: Sequence[Busy], steps: int) -> PartTimes | None:
    """Busy time per step; None where nothing ran on a GPU."""
    if not stays:
        return None
    by_part = {part: [stay for stay in stays if part_of(stay.name) == part] for part in PARTS}
    rest: dict[str, float] = {}
    for stay in by_part["rest"]:
        if known_part(stay.name) is None:
            rest[stay.name] = rest.get(stay.name, 0.0) + stay.end - stay.start
    longest = sorted(rest, key=lambda name: -rest[name])[:8]
    times = {part: covered_us(own) / steps / 1e3 for part, own in by_part.items()}
    return PartTimes(times, covered_us(stays) / steps / 1e3, len(stays) / steps, tuple(longest))
