"""Which bytes of an arena are whose: contiguous extents, first fit, merged when freed. Knows no torch."""

from bisect import bisect_left, insort
from dataclasses import dataclass

from shadowkv.errors import CapacityError

ALIGN_BYTES = 256
"""Every extent starts and ends at a multiple of this (the alignment that CUDA allocations have)."""


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, order=True)
class Extent:
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


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

    def reserve(self, size_bytes: int, what: str) -> Extent:
        """As :meth:`allocate`, but raises CapacityError with the figures."""
        extent = self.allocate(size_bytes)
        if extent is None:
            raise CapacityError(
                f"{what} needs {size_bytes:,} bytes; {self.free_bytes:,} of {self.size_bytes:,} are free, "
                f"the largest piece has {self.largest_free_bytes:,}"
            )
        return extent

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
