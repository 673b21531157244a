"""How much memory this process may take: what is free, within the limits set on it."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

DEVICE_SHARE = 0.92
"""Share of the free device memory that is planned with; the rest is for the library's own workspaces."""
HOST_SHARE = 0.8
"""Share of the available host memory that is planned with."""


@dataclass(frozen=True)
class Memory:
    """Bytes to plan with. ``shared`` where the device is the host: then ``device_bytes`` is for both."""

    device_bytes: int
    host_bytes: int
    shared: bool = False


def available_host_bytes() -> int:
    """Free host memory, or what a control group leaves of it."""
    free = _meminfo_available() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([free, *_cgroup_remaining()])


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_remaining() -> list[int]:
    """What control groups (version 2, then 1) still allow; empty where there is no limit."""
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            return [max(int(Path(limit).read_text()) - int(Path(usage).read_text()), 0)]
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return []


def find_memory(device: torch.device, device_bytes: int | None, host_bytes: int | None) -> Memory:
    """What was asked for, or a share of what is free."""
    if device.type == "cuda":
        if device_bytes is None:
            device_bytes = int(torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE)
        if host_bytes is None:
            host_bytes = int(available_host_bytes() * HOST_SHARE)
        return Memory(device_bytes, host_bytes)
    if device_bytes is None and host_bytes is None:
        return Memory(int(available_host_bytes() * HOST_SHARE), 0, shared=True)
    free = int(available_host_bytes() * HOST_SHARE)
    if device_bytes is None:
        device_bytes = max(free - (host_bytes or 0), 0)
    if host_bytes is None:
        host_bytes = max(free - device_bytes, 0)
    return Memory(device_bytes, host_bytes)
