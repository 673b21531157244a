"""Every kernel against the float64 truth of its contract, on the user's own device."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from importlib.util import find_spec
from typing import Any

import torch

from shadowkv.engine.placement import use_device
from shadowkv.errors import ConfigError
from shadowkv.ops.contract.base import Op, deviations

Report = Callable[[str, int, int], None]

GPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTERPRETED_DTYPES = (torch.float32, torch.float16)
"""The interpreter's matrix products of bfloat16 are wrong, whatever the kernel."""


def interpreted() -> bool:
    """Whether Triton runs kernels through its interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def require_kernels(device: torch.device) -> None:
    """Refuse a device on which kernels cannot run.

    Raises:
        ConfigError: Triton is missing, or compiles for no such device.
    """
    if find_spec("triton") is None:
        raise ConfigError("the kernels need the package triton, which is not installed")
    if device.type != "cuda" and not interpreted():
        raise ConfigError(
            f"kernels cannot be compiled for {device}; set TRITON_INTERPRET=1 before the command to run them through "
            "Triton's interpreter (slow, float32 and float16 only), or name a GPU with --device"
        )


def dtypes_for(device: torch.device) -> tuple[torch.dtype, ...]:
    """What kernels are checked in on this device."""
    return INTERPRETED_DTYPES if device.type != "cuda" or interpreted() else GPU_DTYPES


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16``, without the package."""
    return str(dtype).removeprefix("torch.")


def case_name(case: object) -> str:
    """What a case calls itself, or its fields: those that differ from their defaults, equal rows counted."""
    name = getattr(case, "label", None) or getattr(case, "name", None)
    return name if isinstance(name, str) else _shown(case)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        alike = bool(value) and all(one == value[0] for one in value) and (len(value) > 1 or is_dataclass(value[0]))
        return f"{len(value)} x {_nested(value[0])}" if alike else f"({', '.join(_nested(one) for one in value)})"
    if is_dataclass(value) and not isinstance(value, type):
        pairs = [(item, getattr(value, item.name)) for item in fields(value)]
        return ", ".join(f"{item.name}={_nested(own)}" for item, own in pairs if own != item.default)
    return str(value)


def _nested(value: object) -> str:
    return f"({_shown(value)})" if is_dataclass(value) else _shown(value)


@dataclass
class Checked:
    """One operation in one dtype.

    ``worst``: the largest error of an element as a share of what its arithmetic may lose. ``plain``: the same of plain
    PyTorch on this device, as information; it takes other steps, which may lose more.
    """

    op: str
    dtype: str
    cases: int = 0
    passed: int = 0
    worst: float = 0.0
    plain: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return self.passed == self.cases

    def to_dict(self) -> dict[str, object]:
        """For JSON; a share that is not finite is null."""
        shares = {"worst": self.worst, "plain": self.plain}
        return asdict(self) | {name: share if share < float("inf") else None for name, share in shares.items()}


COLUMNS = ("op", "dtype", "cases", "passed", "worst error / allowed", "plain PyTorch's")


def cells(result: Checked) -> list[str]:
    """A row of the table under :data:`COLUMNS`."""
    return [
        result.op,
        result.dtype,
        str(result.cases),
        str(result.passed),
        f"{result.worst:.2f}",
        f"{result.plain:.2f}",
    ]


def check_op(op: Op[Any, Any], device: torch.device, dtype: torch.dtype) -> Checked:
    """All cases of one operation. A kernel that raises has failed, and says how."""
    result = Checked(op.name, dtype_name(dtype))
    for case in op.cases():
        result.cases += 1
        try:
            found = deviations(op, case, device, dtype)
        except Exception as error:  # whatever a compiler or a driver raises, the other kernels are checked
            result.worst = float("inf")
            result.failures.append(f"{case_name(case)}: {type(error).__name__}: {error}")
            continue
        wrong = [one.words for one in found if not one.right]
        result.worst = max([result.worst, *(one.share for one in found)])
        result.plain = max([result.plain, *(one.plain for one in found)])
        result.passed += not wrong
        if wrong:
            result.failures.append(f"{case_name(case)}: {'; '.join(wrong)}")
    return result


def check_ops(ops: Sequence[Op[Any, Any]], device: torch.device, report: Report) -> list[Checked]:
    """Every operation in every dtype that the device runs.

    Raises:
        ConfigError: the device runs no kernels.
    """
    require_kernels(device)
    use_device(device)
    pairs = [(op, dtype) for op in ops for dtype in dtypes_for(device)]
    results = []
    for done, (op, dtype) in enumerate(pairs):
        report("checks", done, len(pairs))
        results.append(check_op(op, device, dtype))
    report("checks", len(pairs), len(pairs))
    return results


def choose_ops(ops: Sequence[Op[Any, Any]], names: str | None) -> list[Op[Any, Any]]:
    """The operations of a list of names with commas, or all.

    Raises:
        ConfigError: no such operation.
    """
    if names is None:
        return list(ops)
    by_name = {op.name: op for op in ops}
    for name in names.split(","):
        if name not in by_name:
            raise ConfigError(f"there is no operation {name!r}; there are: {', '.join(by_name)}")
    return [by_name[name] for name in dict.fromkeys(names.split(","))]
