"""Full attention: every key and value stays on the device, exact. The baseline and the truth."""

from collections.abc import Sequence as Seq

from torch import Tensor

from shadowkv.cache.base import DENSE_APPEND_TOKENS, Cache, CachedSequence, CacheStats, Geometry, Price, require_finite
from shadowkv.cache.layout import Region
from shadowkv.cache.pool import Reservation
from shadowkv.cache.step import DecodeStep, attention_regions, table_regions
from shadowkv.config import FullConfig
from shadowkv.ops.rows import Address, RowFacts
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
        return table_regions(geometry.layers, max_rows) + attention_regions(geometry, max_rows, capacity_tokens)

    def make_step(self, max_rows: int, capacity_tokens: int) -> DecodeStep:
        return FullStep(self, max_rows, capacity_tokens)

    def stats(self, seq: CachedSequence) -> CacheStats:
        g = self.geometry
        held = 2 * seq.tokens * g.layers * g.key_dim * g.dtype.itemsize
        return CacheStats(
            self.name, "exact", seq.tokens, seq.price.device_bytes, seq.price.host_bytes, resident_bytes=held
        )


class FullStep(DecodeStep):
    """A sequence is one ring that never comes round."""

    def __init__(self, cache: FullCache, max_rows: int, capacity_tokens: int) -> None:
        self.geometry = cache.geometry
        regions = cache.step_regions(cache.geometry, cache.config, max_rows, capacity_tokens)
        columns = {Address.K: "k", Address.V: "v"}
        device = cache.device_arena.device
        super().__init__(cache.geometry.layers, max_rows, columns, regions or [], capacity_tokens, device)

    def facts(self, seq: CachedSequence) -> RowFacts:
        slots = seq.tensors["k"].shape[2]
        return RowFacts(tokens=seq.tokens, write_slot=seq.tokens - 1, slots=slots, ring_slots=slots)

    def attend(self, layer: int, q_BND: Tensor, out_BND: Tensor) -> None:
        from shadowkv.ops.triton.attention import attend

        rows, heads, kv_heads = q_BND.shape[0], self.geometry.heads, self.geometry.kv_heads
        scratch = self.attention_scratch(rows, kv_heads, heads)
        attend(self.layer(layer, rows), q_BND, kv_heads, 1, None, out_BND, scratch)

    def finish(self) -> None:
        """Nothing is left running."""
