"""What ShadowKV's settings leave open and the machine decides: from bytes, and from times that were measured."""

from dataclasses import replace

import torch

from shadowkv.cache.base import Geometry
from shadowkv.cache.shadowkv_layout import ExactRegion
from shadowkv.config import ShadowKVConfig

SPARSE_LAYER_SECONDS = 40e-6
"""What choosing, fetching and merging take in one layer, however few the rows: launches and latencies, measured on an
H200. Dense attention has none of it, so that it is faster where it reads less than this costs."""
RESIDENT_MULTIPLES = (4, 3, 2)
"""Times the budget that the resident set may grow to with memory that is spare. Beyond four times hit rates hardly
rise."""
MEASURED_BYTES = 256 << 20


def device_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy inside the device's memory reads and writes, measured."""
    source = torch.zeros(MEASURED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    target.copy_(source)
    start.record()
    for _ in range(4):
        target.copy_(source)
    stop.record()
    stop.synchronize()
    return 8 * MEASURED_BYTES / (float(start.elapsed_time(stop)) / 1000)


def dense_tokens(geometry: Geometry, config: ShadowKVConfig, batch: int, bandwidth: float) -> int:
    """The longest sequence whose dense attention takes no longer than the sparse one, ``batch`` at a time.

    Dense attention reads every key and value. The sparse one reads the index and the exact region, and takes
    SPARSE_LAYER_SECONDS in each layer besides.
    """
    vector_bytes = geometry.key_dim * geometry.dtype.itemsize
    dense, index = 2 * vector_bytes, vector_bytes / config.chunk_tokens
    fixed = SPARSE_LAYER_SECONDS * bandwidth / batch + dense * ExactRegion.of(config).slots
    return int(fixed / (dense - index)) if dense > index else 0


def with_larger_resident_sets(config: ShadowKVConfig) -> list[ShadowKVConfig]:
    """The same settings with resident sets that spare memory may be used for, largest first."""
    if config.resident_tokens is not None or config.attend != "selected" or not config.reuse:
        return []
    return [replace(config, resident_tokens=times * config.budget_tokens) for times in RESIDENT_MULTIPLES]
