"""Times every kernel that passes its check, beside the least time that its bytes and operations allow."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shadowkv.bench.ceilings import Ceilings
from shadowkv.bench.checks import Checked, case_name, check_op, dtype_name
from shadowkv.bench.statistics import Spread
from shadowkv.bench.timing import Stopwatch
from shadowkv.ops.contract.base import Op, Traffic

Report = Callable[[str, int, int], None]

MOST_COPIES = 8
COPIES_BYTES = 512 << 20
"""Kernels are timed on several sets of inputs one after the other, which move about so many bytes together."""
INPUT_BYTES = 4 << 30
"""And take at most so many, unless a single one does; much of them is not touched by a run."""


@dataclass(frozen=True)
class Timed:
    """One kernel (or a library's) at one size."""

    op: str
    case: str
    dtype: str
    by: str
    """shadowkv, or the library that is compared with."""
    spread: Spread
    traffic: Traffic
    least_ms: float
    """What the bytes and operations take at the measured ceilings."""
    limit: str
    """Which ceiling that is."""

    @property
    def share(self) -> float:
        """How much of the ceiling is reached."""
        return self.least_ms / self.spread.median_ms

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self) | {"share": self.share}


COLUMNS = ("op", "case", "by", "ms: median (10 % to 90 %)", "HBM bytes", "bus bytes", "GFLOP", "least ms", "share of")


def cells(row: Timed) -> list[str]:
    """A row of the table under :data:`COLUMNS`."""
    traffic = row.traffic
    numbers = [f"{traffic.device_bytes:,}", f"{traffic.bus_bytes:,}", f"{traffic.flops / 1e9:.3g}"]
    return [
        f"{row.op} {row.dtype}",
        row.case,
        row.by,
        row.spread.text(),
        *numbers,
        f"{row.least_ms:.4g}",
        f"{row.share:.0%} {row.limit}",
    ]


def timed(
    op: str, case: str, dtype: torch.dtype, by: str, spread: Spread, traffic: Traffic, ceilings: Ceilings
) -> Timed:
    """A time beside the longest of its bounds."""
    bounds = ceilings.bounds_ms(traffic)
    limit = max(bounds, key=lambda name: bounds[name])
    return Timed(op, case, dtype_name(dtype), by, spread, traffic, bounds[limit], limit)


def tensors_of(value: object) -> list[Tensor]:
    """Every tensor inside nested dataclasses, lists, tuples and dicts, each once."""
    found: dict[int, Tensor] = {}

    def visit(part: object) -> None:
        if isinstance(part, Tensor):
            found[id(part)] = part
        elif is_dataclass(part) and not isinstance(part, type):
            for item in fields(part):
                visit(getattr(part, item.name))
        elif isinstance(part, dict):
            for item in part.values():
                visit(item)
        elif isinstance(part, (list, tuple)):
            for item in part:
                visit(item)

    visit(value)
    return list(found.values())


class Restorer:
    """Puts back what a kernel's first run has changed in its inputs, so that every run does the same work."""

    def __init__(self, inputs: object, run: Callable[[], object], device: torch.device) -> None:
        # Of what is on the host, kernels only read; it may be gigabytes of locked memory.
        on_device = [t for t in tensors_of(inputs) if t.device.type == device.type and t.is_contiguous()]
        before = [tensor.clone() for tensor in on_device]
        run()
        self._kept = [
            (tensor, old)
            for tensor, old in zip(on_device, before, strict=True)
            if not torch.equal(_bits(tensor), _bits(old))
        ]

    def __call__(self) -> None:
        for tensor, old in self._kept:
            tensor.copy_(old)


def _bits(tensor: Tensor) -> Tensor:
    """The bytes, since NaN equals nothing."""
    return tensor.reshape(-1).view(torch.uint8)


def copies_for(traffic: Traffic, input_bytes: int) -> int:
    """How many sets of inputs a kernel is timed on: many small ones, a single large one."""
    by_traffic = COPIES_BYTES // max(traffic.device_bytes + traffic.bus_bytes, 1)
    return max(1, min(MOST_COPIES, by_traffic, INPUT_BYTES // max(input_bytes, 1)))


def prepared(op: Op[Any, Any], inputs: object, device: torch.device) -> tuple[Callable[[], object], Restorer]:
    """What is timed, the kernels that a run launches without the outputs that it allocates and poisons; and how
    to put its inputs back."""
    from shadowkv.ops.triton.launches import recorded

    with recorded() as launches:
        restorer = Restorer(inputs, partial(op.run, inputs), device)

    def launch() -> None:
        for one in launches:
            one()

    return launch if launches else partial(op.run, inputs), restorer


def time_case(op: Op[Any, Any], case: object, dtype: torch.dtype, watch: Stopwatch, ceilings: Ceilings) -> Timed:
    """One kernel at one size."""
    traffic = op.traffic(case, dtype)
    made = [op.make(case, watch.device, dtype)]
    copies = copies_for(traffic, sum(tensor.nbytes for tensor in tensors_of(made)))
    made += [op.make(case, watch.device, dtype, seed) for seed in range(1, copies)]
    pairs = [prepared(op, inputs, watch.device) for inputs in made]

    def restore() -> None:
        for _, restorer in pairs:
            restorer()

    spread = watch.time([launch for launch, _ in pairs], before=restore)
    return timed(op.name, case_name(case), dtype, "shadowkv", spread, traffic, ceilings)


@dataclass
class KernelRun:
    """All times; the operations that failed their check and were not timed; and what went wrong in timing others."""

    rows: list[Timed] = field(default_factory=list)
    refused: list[Checked] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def time_ops(
    ops: Sequence[Op[Any, Any]], dtype: torch.dtype, watch: Stopwatch, ceilings: Ceilings, report: Report
) -> KernelRun:
    """Check each operation, then time it at its sizes; one that fails its check is refused."""
    result = KernelRun()
    for done, op in enumerate(ops):
        report("kernels", done, len(ops))
        checked = check_op(op, watch.device, dtype)
        if not checked.right:
            result.refused.append(checked)
            continue
        for case in op.bench_cases():
            try:
                result.rows.append(time_case(op, case, dtype, watch, ceilings))
            except RuntimeError as error:  # out of memory, or work that cannot be captured; the others are timed
                result.broken.append(f"{op.name}, {case_name(case)}: {error}")
            torch.cuda.empty_cache()
    report("kernels", len(ops), len(ops))
    return result
