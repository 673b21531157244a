"""Named tensors of one sequence inside its extent. Prices and allocations come from the same list."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.cache.arena import Arena
from shadowkv.cache.pool import Extent, aligned


@dataclass(frozen=True)
class Region:
    """One tensor. ``kind`` is the line of the memory plan that its bytes are counted under."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return aligned(math.prod(self.shape) * self.dtype.itemsize)


def bytes_by_kind(regions: Sequence[Region]) -> dict[str, int]:
    """Bytes of the regions of each kind, as a price lists them."""
    kinds: dict[str, int] = {}
    for region in regions:
        kinds[region.kind] = kinds.get(region.kind, 0) + region.size_bytes
    return kinds


def total_bytes(regions: Sequence[Region]) -> int:
    """Bytes of all regions together."""
    return sum(region.size_bytes for region in regions)


def carve(arena: Arena, extent: Extent, regions: Sequence[Region]) -> dict[str, Tensor]:
    """The regions' tensors, one after the other in the extent."""
    tensors, offset = {}, 0
    for region in regions:
        tensors[region.name] = arena.carve(extent, offset, region.shape, region.dtype)
        offset += region.size_bytes
    return tensors


def copy_by_head(source: Tensor, target: Tensor) -> None:
    """Copy [K, ...] head by head: contiguous copies to pinned memory need no staging buffer. Done when it returns."""
    for from_head, to_head in zip(source, target, strict=True):
        to_head.copy_(from_head, non_blocking=True)
    if source.is_cuda and not target.is_cuda:
        torch.cuda.current_stream(source.device).synchronize()


def copy_overlap(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    """Copy what both have: tensors of the same name may differ in the length of their axes."""
    for name, from_tensor in source.items():
        if name in target:
            to_tensor = target[name]
            common = tuple(slice(min(a, b)) for a, b in zip(from_tensor.shape, to_tensor.shape, strict=True))
            to_tensor[common].copy_(from_tensor[common])
