"""One allocation of bytes on a device or in (pinned) host memory, carved into typed tensors."""

import math
import mmap
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from shadowkv.cache.pool import Extent, Extents
from shadowkv.errors import CapacityError


class Arena(Extents):
    """A fixed number of bytes of real memory and the ledger of who has which.

    Args:
        pinned: page-locked host memory, which the GPU can copy from without waiting.

    Raises:
        CapacityError: the memory is not there, or the system does not lock that much.
    """

    def __init__(self, size_bytes: int, device: torch.device | str, *, pinned: bool = False) -> None:
        super().__init__(size_bytes)
        self.device = torch.device(device)
        self.pinned = pinned and self.size_bytes > 0
        try:
            if self.pinned:
                self._bytes = _in_large_pages(self.size_bytes)
            else:
                self._bytes = torch.empty(self.size_bytes, dtype=torch.uint8, device=self.device)
        except (RuntimeError, OSError) as error:  # out of memory, on any device
            raise CapacityError(
                f"{self.size_bytes:,} bytes could not be allocated on {self.device}; lower the batch or the context"
            ) from error
        if self.pinned:
            _pin(self._bytes)

    def carve(self, extent: Extent, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over the extent's bytes from ``offset`` (a multiple of the item size) on."""
        size = math.prod(shape) * dtype.itemsize
        assert offset + size <= extent.size, "tensor reaches over its extent"
        start = extent.start + offset
        return self._bytes[start : start + size].view(dtype).view(shape)


def _in_large_pages(size_bytes: int) -> Tensor:
    """Host memory that is there already: written to by all threads, in pages of 2 MiB where the system has them.

    Locking pages that nobody has touched makes and clears them one by one in one thread: 12 GiB took 3.3 s on an
    H200's host, and 0.4 s this way.
    """
    pages = mmap.mmap(-1, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).zero_()


def _pin(memory: Tensor) -> None:
    """Lock memory that is there already. PyTorch's own pinned allocator rounds up to a power of two, which
    can be twice what a plan has counted."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    failed = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if failed:
        raise CapacityError(
            f"{memory.nbytes:,} bytes of host memory could not be page-locked (CUDA error {failed}); lower the host "
            "memory or the batch, or raise the limit on locked memory (ulimit -l)"
        )
    weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr())
