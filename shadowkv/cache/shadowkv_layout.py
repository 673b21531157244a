"""Where ShadowKV keeps what: the exact region's partition and the tensors of one sequence. Arithmetic only."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.cache.base import Geometry, Price
from shadowkv.cache.index import make_index
from shadowkv.cache.layout import Region, bytes_by_kind
from shadowkv.config import ShadowKVConfig

PAPER_RANK_SHARE = 160 / 1024
"""Rank over K*D in arXiv 2410.21465 (Llama-3.1-8B)."""
MIN_DEFAULT_RANK = 64


def ranks(geometry: Geometry, config: ShadowKVConfig) -> tuple[int, ...]:
    """Directions kept by layer, clipped to the dimensions there are."""
    rank = config.rank
    if rank is None:
        rank = max(MIN_DEFAULT_RANK, round(PAPER_RANK_SHARE * geometry.key_dim))
    by_layer = rank if isinstance(rank, tuple) else (rank,) * geometry.layers
    return tuple(min(r, geometry.key_dim) for r in by_layer)


@dataclass(frozen=True)
class ExactRegion:
    """Token slots per KV head: [outliers | resident chunks | recent window]. Sizes in tokens.

    Where there are fewer outliers than there is room for, the resident chunks begin earlier.
    """

    outlier: int
    resident_size: int
    window: int
    fits: int
    """A sequence of at most so many tokens is attended exactly here, before it is compressed."""
    whole: int
    """A sequence that is opened for at most so many gets as many slots, and is never compressed."""

    @classmethod
    def of(cls, config: ShadowKVConfig) -> "ExactRegion":
        size = config.chunk_tokens
        outlier, resident = config.outlier_chunks * size, config.resident_chunks * size
        window = config.recent_chunks * size
        fits = outlier + resident + window if config.exact_while_fits else window
        return cls(outlier, resident, window, fits, max(fits, config.dense_tokens or 0))

    def compressible(self, capacity_tokens: int) -> bool:
        """Whether a sequence opened for so many tokens can outgrow its slots."""
        return capacity_tokens > self.whole

    def dense_limit(self, capacity_tokens: int) -> int:
        """The most tokens that such a sequence attends to exactly, without compression."""
        return self.fits if self.compressible(capacity_tokens) else capacity_tokens

    @property
    def slots(self) -> int:
        return self.outlier + self.resident_size + self.window

    @property
    def recent(self) -> slice:
        return slice(self.outlier + self.resident_size, self.slots)

    def window_slots(self, positions: Tensor) -> Tensor:
        """The slots of tokens in the window's ring, by their positions."""
        return positions % self.window + (self.outlier + self.resident_size)

    def window_positions(self, tokens: int, device: torch.device) -> Tensor:
        """The latest position below ``tokens`` that each slot of the ring may hold, [W] (may be negative)."""
        slots_W = torch.arange(self.window, device=device)
        return tokens - 1 - (tokens - 1 - slots_W) % self.window


def sequence_regions(
    geometry: Geometry, config: ShadowKVConfig, capacity_tokens: int
) -> tuple[list[Region], list[Region]]:
    """Tensors of one sequence on the device and on the host.

    One that can never outgrow the exact region needs nothing else.
    """
    exact = ExactRegion.of(config)
    layers, heads, dim, dtype = geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.dtype
    compressible = exact.compressible(capacity_tokens)
    exact_shape = (layers, heads, exact.slots if compressible else capacity_tokens, dim)
    device = [
        Region("exact_k", "exact region", exact_shape, dtype),
        Region("exact_v", "exact region", exact_shape, dtype),
        Region("rope_rows", "bookkeeping", (capacity_tokens,), torch.int32),
        Region("counters", "bookkeeping", (layers, 3), torch.int64),
    ]
    if not compressible:
        return device, []
    size, slots = config.chunk_tokens, config.resident_chunks
    chunks = -(-capacity_tokens // size)
    device += [
        Region("resident_ids", "bookkeeping", (layers, heads, slots), torch.int32),
        Region("last_used", "bookkeeping", (layers, heads, slots), torch.int32),
        Region("slot_of_chunk", "bookkeeping", (layers, heads, chunks), torch.int32),
    ]
    for layer, rank in enumerate(ranks(geometry, config)):
        device += [
            Region(f"coeff.{layer}", "coefficients", (chunks, size, rank), dtype),
            Region(f"basis.{layer}", "bases", (heads, dim, rank), dtype),
            Region(f"mean.{layer}", "bases", (heads, dim), torch.float32),
        ]
    device += make_index(config.index).regions(geometry, chunks)
    values = Region("values", "values", (layers, heads, chunks, size, dim), dtype)
    return (device, [values]) if config.value_store == "host" else ([*device, values], [])


def sequence_price(geometry: Geometry, config: ShadowKVConfig, capacity_tokens: int) -> Price:
    """Bytes by kind; the exact region's are shown by what they hold once the sequence is compressed."""
    on_device, on_host = sequence_regions(geometry, config, capacity_tokens)
    device, exact = bytes_by_kind(on_device), ExactRegion.of(config)
    region_bytes = device.pop("exact region")
    if not exact.compressible(capacity_tokens):
        return Price({"exact tokens": region_bytes} | device, {})
    outliers = region_bytes * exact.outlier // exact.slots
    resident = region_bytes * exact.resident_size // exact.slots
    shares = {
        "outliers": outliers,
        "resident chunks": resident,
        "recent window": region_bytes - outliers - resident,
    }
    return Price(shares | device, bytes_by_kind(on_host))
