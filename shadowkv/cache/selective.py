"""What methods share that keep every key and value exactly and attend to a selection of them.

Tokens are selected by *units* of neighbours. Sinks (the first units), the recent tokens and the incomplete
unit are always attended; of the other complete units, a method's scores choose a budget per KV head. While
the budget covers all of them the view is dense and exact, and nothing is indexed. Knows no method's scores.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from shadowkv.cache.arena import Arena
from shadowkv.cache.base import Cache, CachedSequence, CacheStats, Geometry, Price, require_finite
from shadowkv.cache.index import TableIndex
from shadowkv.cache.layout import Region, copy_by_head
from shadowkv.cache.pool import Reservation
from shadowkv.cache.recorded import Found, Once, RecordedPrompt
from shadowkv.cache.selective_step import SelectiveStep, selective_step_regions
from shadowkv.cache.step import DecodeStep
from shadowkv.config import SelectiveConfig
from shadowkv.ops.chunks import split_chunks
from shadowkv.ops.rope import Rope
from shadowkv.ops.rows import LayerRows
from shadowkv.ops.select import chunk_scores, top_chunks
from shadowkv.ops.views import DenseView, SlotView, View

INDEXED_TOKENS = 65536
"""Tokens of a layer that are indexed at a time, of all layers together: bounds the workspace."""


@dataclass(eq=False)
class SelectiveSequence(CachedSequence):
    """``indexed_units`` is 0 until the first selection; ``fetched_tokens`` is summed over layers and KV heads."""

    indexed_units: int = 0
    fetched_tokens: int = 0


SelectiveT = TypeVar("SelectiveT", bound=SelectiveConfig)


class SelectiveCache(Cache[SelectiveT, SelectiveSequence]):
    """Exact keys on the device, exact values there or on the host, and an index over units of them."""

    def __init__(self, geometry: Geometry, config: SelectiveT, rope: Rope, device: Arena, host: Arena) -> None:
        super().__init__(geometry, config, rope, device, host)
        self.index = self.index_of(geometry, config)

    # What a method says.

    @classmethod
    @abstractmethod
    def index_of(cls, geometry: Geometry, config: SelectiveT) -> TableIndex:
        """What units are ranked by."""

    @classmethod
    def always_units(cls, config: SelectiveT) -> int:
        """Units per KV head that are attended without being selected."""
        return config.sink_units

    def always(self, layer: int, seq: SelectiveSequence) -> Tensor:
        """Their ids, [K, O] (int64)."""
        sinks_O = torch.arange(self.config.sink_units, device=self.device_arena.device)
        return sinks_O.expand(self.geometry.kv_heads, -1)

    def begin_selection(self, tensors: dict[str, Tensor], k_KSD: Tensor, once: Once) -> None:
        """Learn from the keys that there are when units are selected for the first time, before they are indexed.

        Args:
            tensors: the sequence's, [1, K, ...], of the KV heads of some layers together.
            k_KSD: their keys.
            once: does what depends on these keys alone, or takes it from the prompt's record.
        """

    def scores(self, layer: int, seq: SelectiveSequence, units: int, q_NTD: Tensor, selectable_KC: Tensor) -> Tensor:
        """[K, C] over the first ``units`` units, -inf where not selectable."""
        return chunk_scores(self.index.logits(layer, seq.tensors, units, q_NTD), selectable_KC)

    def chosen_units(self, scores_KC: Tensor) -> int:
        """How many of the units with these scores are chosen per KV head, at most the budget."""
        return self.config.budget_units

    def ranking_queries(self, layer: int, q_BNTD: Tensor) -> Tensor:
        """What units are ranked with, where it is not the queries that attend."""
        return q_BNTD

    # What a method says about its step by kernels.

    @classmethod
    def entries_per_unit(cls, config: SelectiveT) -> int:
        """Entries of the index's table that a unit's logit is the log-sum-exp of."""
        return 1

    @classmethod
    def kept_for_steps(cls) -> tuple[str, ...]:
        """Names of small tensors of a sequence, [layers, ...], that :meth:`step_always` or the index needs."""
        return ()

    def step_always(self, layer: int, kept: Mapping[str, Tensor], rows: int) -> Tensor:
        """:meth:`always` of all rows, [rows, K, O]."""
        sinks_O = torch.arange(self.config.sink_units, device=self.device_arena.device)
        return sinks_O.expand(rows, self.geometry.kv_heads, -1)

    def step_scores(self, layer: int, rows: LayerRows, q_BND: Tensor, step: SelectiveStep, open_BKC: Tensor) -> Tensor:
        """:meth:`scores` of all rows, [B, K, C] in float32; of units that are not open, anything."""
        return step.shares(layer, rows, q_BND, open_BKC)

    # Memory.

    @classmethod
    def context_units(cls, config: SelectiveT, tokens: int) -> int:
        """Complete units older than the recent tokens, for queries that ``tokens`` tokens stand before."""
        return max(tokens - config.recent_tokens, 0) // config.unit_tokens

    @classmethod
    def selects(cls, config: SelectiveT, units: int) -> bool:
        return units > cls.always_units(config) + config.budget_units

    @classmethod
    def regions(cls, geometry: Geometry, config: SelectiveT, capacity_tokens: int) -> tuple[list[Region], list[Region]]:
        shape = (geometry.layers, geometry.kv_heads, capacity_tokens, geometry.head_dim)
        keys, values = Region("k", "keys", shape, geometry.dtype), Region("v", "values", shape, geometry.dtype)
        if not cls.selects(config, cls.context_units(config, capacity_tokens)):
            return [keys, values], []
        index = cls.index_of(geometry, config).regions(geometry, -(-capacity_tokens // config.unit_tokens))
        device = [keys, *index, *cls.more_regions(geometry, config)]
        return (device, [values]) if config.value_store == "host" else ([*device, values], [])

    @classmethod
    def more_regions(cls, geometry: Geometry, config: SelectiveT) -> list[Region]:
        """What a method keeps besides its index."""
        return []

    @property
    def append_tokens(self) -> int:
        return self.config.query_block_tokens

    def _new_sequence(
        self, reservation: Reservation, owns_memory: bool, price: Price, tensors: dict[str, Tensor]
    ) -> SelectiveSequence:
        return SelectiveSequence(reservation, owns_memory, price, tensors)

    def _copy_lengths(self, source: SelectiveSequence, target: SelectiveSequence) -> None:
        target.tokens, target.indexed_units = source.tokens, source.indexed_units
        target.fetched_tokens = source.fetched_tokens

    # Prompt and new tokens.

    def begin_prompt(self, seq: SelectiveSequence, tokens: int) -> None:
        self._check_prompt(seq, tokens)
        seq.tokens = tokens
        if self.selects(self.config, self.context_units(self.config, tokens)):
            seq.indexed_units = tokens // self.config.unit_tokens

    def take_layer(
        self,
        layer: int,
        seq: SelectiveSequence,
        k_pre_SKD: Tensor,
        k_KSD: Tensor,
        v_KSD: Tensor,
        q_NWD: Tensor | None = None,
    ) -> None:
        require_finite(layer, k_KSD)
        seq.tensors["k"][layer, :, : seq.tokens] = k_KSD
        copy_by_head(v_KSD, seq.tensors["v"][layer, :, : seq.tokens])
        if seq.indexed_units and layer == self.geometry.layers - 1:
            self._index(seq, 0)

    def take_prompt(self, seq: SelectiveSequence, prompt: RecordedPrompt) -> None:
        """All layers in one copy."""
        self.begin_prompt(seq, prompt.tokens)
        seq.tensors["k"][:, :, : seq.tokens] = prompt.k_LKSD
        copy_by_head(prompt.v_LKSD.flatten(0, 1), seq.tensors["v"].flatten(0, 1)[:, : seq.tokens])
        if seq.indexed_units:
            self._index(seq, 0, prompt)

    def extend(self, seqs: Seq[SelectiveSequence], tokens: int, rope_lengths: Seq[int] | None = None) -> None:
        self._check_room(seqs, tokens)
        for seq in seqs:
            units, first = self.context_units(self.config, seq.tokens), seq.indexed_units
            if self.selects(self.config, units) and units > first:
                seq.indexed_units = seq.tokens // self.config.unit_tokens
                self._index(seq, first)
            seq.tokens += tokens

    def _index(self, seq: SelectiveSequence, first: int, prompt: RecordedPrompt | None = None) -> None:
        """Index the units from ``first`` on, of as many layers at a time as bounds the workspace."""
        size, stop = self.config.unit_tokens, seq.indexed_units
        layers = max(INDEXED_TOKENS // ((stop - first) * size), 1)
        for start in range(self.config.dense_layers, self.geometry.layers, layers):
            some = slice(start, start + layers)
            tensors = {name: t[some].flatten(0, 1)[None] for name, t in seq.tensors.items() if name != "v"}
            k_KSD = tensors["k"][0]
            if first == 0:
                self.begin_selection(tensors, k_KSD[:, : seq.tokens], _once_for(some, prompt))
            self.index.write(0, tensors, first, split_chunks(k_KSD[:, first * size : stop * size], size))

    def append(self, layer: int, seqs: Seq[SelectiveSequence], k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        for seq, k_KTD, v_KTD in zip(seqs, k_BKTD, v_BKTD, strict=True):
            new = slice(seq.tokens - k_KTD.shape[1], seq.tokens)
            seq.tensors["k"][layer, :, new] = k_KTD
            seq.tensors["v"][layer, :, new] = v_KTD

    def view(self, layer: int, seqs: Seq[SelectiveSequence], q_BNTD: Tensor) -> list[View]:
        ranking_BNTD = self.ranking_queries(layer, q_BNTD)
        return [self._view_one(layer, seq, q_NTD) for seq, q_NTD in zip(seqs, ranking_BNTD, strict=True)]

    def _view_one(self, layer: int, seq: SelectiveSequence, q_NTD: Tensor) -> View:
        config, device, tokens = self.config, q_NTD.device, q_NTD.shape[1]
        k_KSD, v_KSD = (seq.tensors[name][layer, :, : seq.tokens] for name in ("k", "v"))
        units = self.context_units(config, seq.tokens - tokens)
        if layer < config.dense_layers or not self.selects(config, units):
            self._count_fetch(seq, v_KSD)
            return DenseView(k_KSD, v_KSD.to(device))
        kv_heads, size = k_KSD.shape[0], config.unit_tokens
        always_KO = self.always(layer, seq)
        selectable_KC = torch.ones(kv_heads, units, dtype=torch.bool, device=device).scatter(1, always_KO, False)
        scores_KC = self.scores(layer, seq, units, q_NTD, selectable_KC)
        chosen_KP = top_chunks(scores_KC, self.chosen_units(scores_KC))
        units_KP = torch.cat([always_KO, chosen_KP], dim=1)
        tokens_KE = (units_KP[..., None] * size + torch.arange(size, device=device)).flatten(1)
        recent_W = torch.arange(units * size, seq.tokens, device=device)
        queries_T = torch.arange(seq.tokens - tokens, seq.tokens, device=device)
        allowed_KTE = torch.ones(kv_heads, tokens, tokens_KE.shape[1] + len(recent_W), dtype=torch.bool, device=device)
        allowed_KTE[:, :, tokens_KE.shape[1] :] = recent_W <= queries_T[:, None]
        slots_KE = torch.cat([tokens_KE, recent_W.expand(kv_heads, -1)], dim=1)
        heads_K1 = torch.arange(kv_heads, device=device)[:, None]
        v_KED = v_KSD[heads_K1.to(v_KSD.device), slots_KE.to(v_KSD.device)]
        self._count_fetch(seq, v_KED)
        return SlotView(k_KSD[heads_K1, slots_KE], v_KED.to(device), allowed_KTE)

    def count_step(self, seq: SelectiveSequence) -> None:
        """What a step by kernels fetches for a sequence, its newest token included."""
        if seq.reservation.host is None:
            return
        config, g = self.config, self.geometry
        units = self.context_units(config, seq.tokens - 1)
        attended, dense = seq.tokens, g.layers
        if self.selects(config, units):
            dense = min(config.dense_layers, g.layers)
            picks = self.always_units(config) + config.budget_units
            attended = (picks - units) * config.unit_tokens + seq.tokens
        seq.fetched_tokens += g.kv_heads * (dense * seq.tokens + (g.layers - dense) * attended)

    def _count_fetch(self, seq: SelectiveSequence, v_KSD: Tensor) -> None:
        if seq.reservation.host is not None:
            seq.fetched_tokens += v_KSD.shape[0] * v_KSD.shape[1]

    @classmethod
    def step_regions(
        cls, geometry: Geometry, config: SelectiveT, max_rows: int, capacity_tokens: int
    ) -> list[Region] | None:
        return selective_step_regions(cls, geometry, config, max_rows, capacity_tokens)

    def make_step(self, max_rows: int, capacity_tokens: int) -> DecodeStep | None:
        return SelectiveStep(self, max_rows, capacity_tokens)

    def stats(self, seq: SelectiveSequence) -> CacheStats:
        g = self.geometry
        vector_bytes = g.head_dim * g.dtype.itemsize
        stores = 1 if seq.reservation.host is not None else 2
        return CacheStats(
            method=self.name,
            attention="sparse" if seq.indexed_units else "exact",
            tokens=seq.tokens,
            device_bytes=seq.price.device_bytes,
            host_bytes=seq.price.host_bytes,
            fetched_bytes=seq.fetched_tokens * vector_bytes,
            resident_bytes=stores * seq.tokens * g.layers * g.kv_heads * vector_bytes,
        )


def _once_for(layers: slice, prompt: RecordedPrompt | None) -> Once:
    """For some of the layers; without a record, the work is done."""

    def once(key: Hashable, work: Callable[[], Found]) -> Found:
        return work() if prompt is None else prompt.once((key, layers.start, layers.stop), work)

    return once
