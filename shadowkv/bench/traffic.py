"""The bytes that a decode step has to read and write at least, by what they are. Arithmetic only."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from shadowkv.cache.shadowkv_layout import ExactRegion, ranks
from shadowkv.config import CacheConfig, FullConfig, ShadowKVConfig
from shadowkv.models.spec import ModelSpec
from shadowkv.ops.contract.base import Traffic


@dataclass(frozen=True)
class Step:
    """One step of a batch. ``fetched_chunks`` are summed over sequences, layers and KV heads."""

    batch: int
    tokens: int
    itemsize: int
    fetched_chunks: float = 0.0


def full_kv_bytes(spec: ModelSpec, step: Step) -> int:
    """Keys and values of every token: what full attention reads."""
    return 2 * step.batch * step.tokens * spec.layers * spec.kv_rows * step.itemsize


def weight_bytes(spec: ModelSpec, itemsize: int) -> int:
    """The weights, once; of an embedding that is no output head too, only the batch's rows are read."""
    table = 0 if spec.tied_embeddings else spec.vocab * spec.hidden
    return (spec.parameters() - table) * itemsize


Kinds = tuple[dict[str, int], int]
"""Bytes on the device by kind, and over the bus."""


def _full(spec: ModelSpec, config: CacheConfig, step: Step) -> Kinds:
    return {"keys and values": full_kv_bytes(spec, step)}, 0


def _shadowkv(spec: ModelSpec, config: CacheConfig, step: Step) -> Kinds:
    assert isinstance(config, ShadowKVConfig)
    exact, size = ExactRegion.of(config), config.chunk_tokens
    if not exact.compressible(step.tokens):
        return _full(spec, config, step)
    pairs = step.batch * spec.layers * spec.kv_heads
    vector = spec.head_dim * step.itemsize
    chunks = max(step.tokens // size - config.local_chunks, 0)
    outliers = min(config.outlier_chunks, chunks)
    wanted = config.resident_chunks if config.attend == "resident" else config.budget_chunks
    attended = (outliers + min(wanted, chunks - outliers)) * size
    # The window holds its local chunks after a flush and is full before the next.
    recent = (config.local_chunks + config.recent_chunks) * size // 2
    by_layer = ranks(spec.geometry(spec.dtype), config)
    mean_rank = sum(by_layer) / spec.layers
    fetched_tokens = step.fetched_chunks * size
    bases = step.batch * sum(by_layer) * spec.kv_rows * step.itemsize
    # A (sequence, layer, head) without a miss reads no basis; with one, all of its head's.
    touched = min(1.0, step.fetched_chunks / pairs)
    device = {
        "index": pairs * chunks * vector,
        "attended keys and values": 2 * pairs * (attended + recent) * vector,
        "coefficients and bases": math.ceil(fetched_tokens * mean_rank * step.itemsize + touched * bases),
        "fetched keys and values, written": math.ceil(2 * fetched_tokens * vector),
    }
    on_host = config.value_store == "host"
    crossing = math.ceil(fetched_tokens * vector)
    if not on_host:
        device["values, read"] = crossing
    return device, crossing if on_host else 0


ACCOUNTS: dict[type, Callable[[ModelSpec, CacheConfig, Step], Kinds]] = {
    FullConfig: _full,
    ShadowKVConfig: _shadowkv,
}
"""Methods whose bytes are counted; of others no floor is reported."""


@dataclass(frozen=True)
class StepTraffic:
    """Least bytes of one step: on the device by kind, and over the bus."""

    device: dict[str, int]
    bus_bytes: int

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def total(self) -> Traffic:
        """Without its kinds."""
        return Traffic(self.device_bytes, self.bus_bytes)


def step_traffic(spec: ModelSpec, config: CacheConfig, step: Step) -> StepTraffic | None:
    """The account of a method, or None where there is none."""
    account = ACCOUNTS.get(type(config))
    if account is None:
        return None
    kinds, crossing = account(spec, config, step)
    return StepTraffic({"weights": weight_bytes(spec, step.itemsize)} | kinds, crossing)
