"""What ShadowKV has counted for a sequence, in words and bytes."""

from typing import TYPE_CHECKING

import torch

from shadowkv.cache.base import CacheStats
from shadowkv.ops.select import EMPTY

if TYPE_CHECKING:
    from shadowkv.cache.shadowkv import ShadowKVCache, ShadowSequence


def sequence_stats(cache: "ShadowKVCache", seq: "ShadowSequence") -> CacheStats:
    """See :meth:`Cache.stats`."""
    counts = seq.tensors["counters"].tolist()
    hits, misses, fetched = (sum(column) for column in zip(*counts, strict=True))
    size, g = cache.config.chunk_tokens, cache.geometry
    chunk_bytes = size * g.head_dim * g.dtype.itemsize
    if seq.compressed:
        always = (seq.outliers + (seq.tokens / size - seq.context_chunks)) * g.layers * g.kv_heads
        held = always + int((seq.tensors["resident_ids"] != EMPTY).sum())
    else:
        held = seq.tokens / size * g.layers * g.kv_heads
    return CacheStats(
        method=cache.name,
        attention="sparse" if seq.compressed else "exact",
        tokens=seq.tokens,
        device_bytes=seq.price.device_bytes,
        host_bytes=seq.price.host_bytes,
        hits=hits,
        misses=misses,
        hit_rates=[hit / (hit + miss) for hit, miss, _ in counts] if hits + misses else [],
        fetched_chunks=fetched,
        fetched_bytes=fetched * chunk_bytes,
        resident_bytes=round(2 * held * chunk_bytes),
        rank=list(cache.ranks) if seq.compressed else [],
        energy=torch.stack(seq.energy).tolist() if seq.energy else [],
    )
