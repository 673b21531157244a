"""One allocation of bytes on a device or in (pinned) host memory, carved into typed tensors."""

import math

import torch
from torch import Tensor

from shadowkv.cache.pool import Extent, Extents


class Arena(Extents):
    """A fixed number of bytes of real memory and the ledger of who has which.

    Args:
        pinned: page-locked host memory, which the GPU can copy from without waiting.
    """

    def __init__(self, size_bytes: int, device: torch.device | str, *, pinned: bool = False) -> None:
        super().__init__(size_bytes)
        self.device = torch.device(device)
        self.pinned = pinned
        self._bytes = torch.empty(self.size_bytes, dtype=torch.uint8, device=self.device, pin_memory=pinned)

    def carve(self, extent: Extent, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over the extent's bytes from ``offset`` (a multiple of the item size) on."""
        size = math.prod(shape) * dtype.itemsize
        assert offset + size <= extent.size, "tensor reaches over its extent"
        start = extent.start + offset
        return self._bytes[start : start + size].view(dtype).view(shape)
