"""Which bytes of an arena are whose: contiguous extents, first fit, merged when freed. Knows no torch."""

from bisect import bisect_left, insort
from dataclasses import dataclass

ALIGN_BYTES = 256
"""Every extent starts and ends at a multiple of this (the alignment that CUDA allocations have)."""


def aligned(size_bytes: int) -> int:
    """A size rounded up to the next boundary that an extent can start at."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, order=True)
class Extent:
    """A run of bytes in an arena."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class Reservation:
    """All the memory of one sequence, for its whole life. ``host`` is None when it keeps nothing there."""

    capacity_tokens: int
    device: Extent
    host: Extent | None


class Extents:
    """Ledger of a range of ``size_bytes`` bytes."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // ALIGN_BYTES * ALIGN_BYTES
        self._free = [Extent(0, self.size_bytes)] if self.size_bytes else []
        self._used: set[Extent] = set()

    @property
    def free_bytes(self) -> int:
        return sum(extent.size for extent in self._free)

    @property
    def used_bytes(self) -> int:
        return self.size_bytes - self.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        return max((extent.size for extent in self._free), default=0)

    def allocate(self, size_bytes: int) -> Extent | None:
        """The lowest free extent of this size (rounded up to the alignment), or None."""
        size = aligned(max(size_bytes, 1))
        for i, hole in enumerate(self._free):
            if hole.size >= size:
                extent = Extent(hole.start, size)
                rest = Extent(hole.start + size, hole.size - size)
                self._free[i : i + 1] = [rest] if rest.size else []
                self._used.add(extent)
                return extent
        return None

    def describe_free(self) -> str:
        return (
            f"{self.free_bytes:,} of {self.size_bytes:,} bytes are free, the largest piece has "
            f"{self.largest_free_bytes:,}"
        )

    def free(self, extent: Extent) -> None:
        assert extent in self._used, f"{extent} is not allocated"
        self._used.remove(extent)
        i = bisect_left(self._free, extent)
        start, stop = extent.start, extent.stop
        if i < len(self._free) and self._free[i].start == stop:
            stop = self._free.pop(i).stop
        if i > 0 and self._free[i - 1].stop == start:
            start = self._free.pop(i - 1).start
        insort(self._free, Extent(start, stop - start))


def reserve(
    device: Extents, host: Extents, capacity_tokens: int, device_bytes: int, host_bytes: int
) -> Reservation | None:
    """Both extents or neither; no host extent when no host byte is needed."""
    on_device = device.allocate(device_bytes)
    if on_device is None:
        return None
    on_host = host.allocate(host_bytes) if host_bytes else None
    if host_bytes and on_host is None:
        device.free(on_device)
        return None
    return Reservation(capacity_tokens, on_device, on_host)


def release(device: Extents, host: Extents, reservation: Reservation) -> None:
    """Give both extents back."""
    device.free(reservation.device)
    if reservation.host is not None:
        host.free(reservation.host)
