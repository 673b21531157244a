"""Full attention: every key and value stays on the device, exact. The baseline and the truth."""

from collections.abc import Sequence as Seq

from torch import Tensor

from shadowkv.cache.base import DENSE_APPEND_TOKENS, Cache, CachedSequence, CacheStats, Geometry, Price, require_finite
from shadowkv.cache.dense_step import DenseStep, dense_step_regions
from shadowkv.cache.layout import Region
from shadowkv.cache.pool import Reservation
from shadowkv.cache.step import DecodeStep
from shadowkv.config import FullConfig
from shadowkv.ops.rows import RowFacts
from shadowkv.ops.views import DenseView, View


class FullCache(Cache[FullConfig, CachedSequence]):
    """Keys and values of every token, contiguous per sequence, layer and KV head."""

    name = "full"

    @classmethod
    def regions(cls, geometry: Geometry, config: FullConfig, capacity_tokens: int) -> tuple[list[Region], list[Region]]:
        shape = (geometry.layers, geometry.kv_heads, capacity_tokens, geometry.head_dim)
        kind = "keys and values"
        return [Region("k", kind, shape, geometry.dtype), Region("v", kind, shape, geometry.dtype)], []

    @property
    def append_tokens(self) -> int:
        return DENSE_APPEND_TOKENS

    def _new_sequence(
        self, reservation: Reservation, owns_memory: bool, price: Price, tensors: dict[str, Tensor]
    ) -> CachedSequence:
        return CachedSequence(reservation, owns_memory, price, tensors)

    def _copy_lengths(self, source: CachedSequence, target: CachedSequence) -> None:
        target.tokens = source.tokens

    def begin_prompt(self, seq: CachedSequence, tokens: int) -> None:
        self._check_prompt(seq, tokens)
        seq.tokens = tokens

    def take_layer(
        self,
        layer: int,
        seq: CachedSequence,
        k_pre_SKD: Tensor,
        k_KSD: Tensor,
        v_KSD: Tensor,
        q_NWD: Tensor | None = None,
    ) -> None:
        require_finite(layer, k_KSD)
        seq.tensors["k"][layer, :, : seq.tokens] = k_KSD
        seq.tensors["v"][layer, :, : seq.tokens] = v_KSD

    def extend(self, seqs: Seq[CachedSequence], tokens: int, rope_lengths: Seq[int] | None = None) -> None:
        self._check_room(seqs, tokens)
        for seq in seqs:
            seq.tokens += tokens

    def append(self, layer: int, seqs: Seq[CachedSequence], k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        for seq, k_KTD, v_KTD in zip(seqs, k_BKTD, v_BKTD, strict=True):
            new = slice(seq.tokens - k_KTD.shape[1], seq.tokens)
            seq.tensors["k"][layer, :, new] = k_KTD
            seq.tensors["v"][layer, :, new] = v_KTD

    def view(self, layer: int, seqs: Seq[CachedSequence], q_BNTD: Tensor) -> list[View]:
        return [
            DenseView(seq.tensors["k"][layer, :, : seq.tokens], seq.tensors["v"][layer, :, : seq.tokens])
            for seq in seqs
        ]

    @classmethod
    def step_regions(
        cls, geometry: Geometry, config: FullConfig, max_rows: int, capacity_tokens: int
    ) -> list[Region] | None:
        return dense_step_regions(geometry, max_rows, capacity_tokens)

    def make_step(self, max_rows: int, capacity_tokens: int) -> DecodeStep:
        return DenseStep(self, max_rows, capacity_tokens, _facts)

    def stats(self, seq: CachedSequence) -> CacheStats:
        g = self.geometry
        held = 2 * seq.tokens * g.layers * g.key_dim * g.dtype.itemsize
        return CacheStats(
            self.name, "exact", seq.tokens, seq.price.device_bytes, seq.price.host_bytes, resident_bytes=held
        )


def _facts(seq: CachedSequence) -> RowFacts:
    """A sequence is one ring that never comes round."""
    slots = seq.tensors["k"].shape[2]
    return RowFacts(tokens=seq.tokens, write_slot=seq.tokens - 1, slots=slots, ring_slots=slots)
