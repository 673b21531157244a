"""StreamingLLM: the first tokens and the latest ones are attended, everything else is dropped.

Source: arXiv 2309.17453. Positions are those inside the cache, as in section 3.2: a token's distance to the
query is the number of kept tokens between them. The window's keys are as far from the query as they were in
the text, so only the sinks are rotated anew. The prompt's own attention is exact, as under every method.

The window is a ring with room for one block of appended tokens more, so that the first query of a block
still finds the whole of its window.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from shadowkv.cache.base import Cache, CachedSequence, CacheStats, Geometry, Price, require_finite
from shadowkv.cache.dense_step import DenseStep, dense_step_regions
from shadowkv.cache.layout import Region
from shadowkv.cache.pool import Reservation
from shadowkv.cache.step import DecodeStep
from shadowkv.config import StreamingConfig
from shadowkv.ops.rows import RowFacts
from shadowkv.ops.views import DenseView, SlotView, View


@dataclass(eq=False)
class StreamingSequence(CachedSequence):
    """``row`` is the RoPE row of the tokens added last. Once a step by kernels has turned the sinks (``turned``), their
    slots hold them at the positions of that step, and as they came they are in a place of their own."""

    row: int = 0
    turned: bool = False


class StreamingCache(Cache[StreamingConfig, StreamingSequence]):
    """Slots per KV head: [sinks | ring]. The memory does not grow with the context."""

    name = "streaming"

    @classmethod
    def _ring(cls, config: StreamingConfig) -> int:
        return config.budget_tokens - config.sink_tokens + config.query_block_tokens - 1

    @classmethod
    def regions(
        cls, geometry: Geometry, config: StreamingConfig, capacity_tokens: int
    ) -> tuple[list[Region], list[Region]]:
        slots = config.sink_tokens + min(capacity_tokens, cls._ring(config))
        shape = (geometry.layers, geometry.kv_heads, slots, geometry.head_dim)
        sinks = (geometry.layers, geometry.kv_heads, config.sink_tokens, geometry.head_dim)
        return [
            *(Region(name, "keys and values", shape, geometry.dtype) for name in ("k", "v")),
            Region("sinks", "keys and values", sinks, geometry.dtype),
            Region("sink_rows", "bookkeeping", (config.sink_tokens,), torch.int32),
        ], []

    @property
    def append_tokens(self) -> int:
        return self.config.query_block_tokens

    def _new_sequence(
        self, reservation: Reservation, owns_memory: bool, price: Price, tensors: dict[str, Tensor]
    ) -> StreamingSequence:
        tensors["sink_rows"].zero_()
        return StreamingSequence(reservation, owns_memory, price, tensors)

    def _copy_lengths(self, source: StreamingSequence, target: StreamingSequence) -> None:
        target.tokens, target.row, target.turned = source.tokens, source.row, source.turned

    def _positions(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=self.device_arena.device)

    def _slots(self, positions: Tensor) -> Tensor:
        """The token at position p of the ring is in slot p mod ring, after the sinks."""
        sinks = self.config.sink_tokens
        return torch.where(positions < sinks, positions, sinks + positions % self._ring(self.config))

    def _slot(self, position: int) -> int:
        sinks = self.config.sink_tokens
        return position if position < sinks else sinks + position % self._ring(self.config)

    def _grow(self, seq: StreamingSequence, tokens: int, row: int) -> None:
        seq.tensors["sink_rows"][seq.tokens : seq.tokens + tokens] = row
        seq.tokens, seq.row = seq.tokens + tokens, row

    def begin_prompt(self, seq: StreamingSequence, tokens: int) -> None:
        self._check_prompt(seq, tokens)
        self._grow(seq, tokens, self.rope.row(tokens))

    def take_layer(
        self,
        layer: int,
        seq: StreamingSequence,
        k_pre_SKD: Tensor,
        k_KSD: Tensor,
        v_KSD: Tensor,
        q_NWD: Tensor | None = None,
    ) -> None:
        require_finite(layer, k_KSD)
        sinks, latest = self.config.sink_tokens, seq.tokens - self._ring(self.config)
        sinks = min(sinks, seq.tokens)
        kept = torch.cat([self._positions(0, sinks), self._positions(max(sinks, latest), seq.tokens)])
        slots = self._slots(kept)
        seq.tensors["k"][layer][:, slots] = k_KSD[:, kept]
        seq.tensors["v"][layer][:, slots] = v_KSD[:, kept]

    def extend(self, seqs: Seq[StreamingSequence], tokens: int, rope_lengths: Seq[int] | None = None) -> None:
        self._check_room(seqs, tokens)
        for i, seq in enumerate(seqs):
            length = rope_lengths[i] if rope_lengths is not None else seq.tokens + tokens
            self._grow(seq, tokens, self.rope.row(length))

    def append(self, layer: int, seqs: Seq[StreamingSequence], k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        for seq, k_KTD, v_KTD in zip(seqs, k_BKTD, v_BKTD, strict=True):
            slots = self._slots(self._positions(seq.tokens - k_KTD.shape[1], seq.tokens))
            seq.tensors["k"][layer][:, slots] = k_KTD
            seq.tensors["v"][layer][:, slots] = v_KTD

    def view(self, layer: int, seqs: Seq[StreamingSequence], q_BNTD: Tensor) -> list[View]:
        return [self._view_one(layer, seq, q_NTD.shape[1]) for seq, q_NTD in zip(seqs, q_BNTD, strict=True)]

    def _view_one(self, layer: int, seq: StreamingSequence, tokens: int) -> View:
        k_KED, v_KED = seq.tensors["k"][layer], seq.tensors["v"][layer]
        if seq.tokens <= self.config.budget_tokens:
            slots = self._slots(self._positions(0, seq.tokens))
            return DenseView(k_KED[:, slots], v_KED[:, slots])
        sinks, kv_heads = self.config.sink_tokens, k_KED.shape[0]
        queries_T = self._positions(seq.tokens - tokens, seq.tokens)
        # Every query of the block has its own distance to the sinks, and so its own copy of them.
        sinks_O, row = self._positions(0, sinks), torch.full((1,), seq.row, device=k_KED.device)
        dropped_T = (queries_T + 1 - self.config.budget_tokens).clamp_min(0)
        as_they_came = seq.tensors["sinks"][layer] if seq.turned else k_KED[:, :sinks]
        plain_KOD = self.rope.unrotate(as_they_came.float(), sinks_O, seq.tensors["sink_rows"])
        plain_KTOD = plain_KOD[:, None].expand(-1, tokens, -1, -1)
        turned_KTOD = self.rope.rotate(plain_KTOD, sinks_O + dropped_T[:, None], row).to(k_KED.dtype)
        oldest = max(sinks, int(seq.tokens - tokens + 1 - self.config.budget_tokens + sinks))
        ring_W = self._positions(oldest, seq.tokens)
        slots_W = self._slots(ring_W)
        k_all = torch.cat([turned_KTOD.flatten(1, 2), k_KED[:, slots_W]], dim=1)
        v_all = torch.cat([v_KED[:, :sinks].repeat(1, tokens, 1), v_KED[:, slots_W]], dim=1)
        own_TTO = torch.eye(tokens, dtype=torch.bool, device=k_KED.device)[..., None] & (
            sinks_O <= queries_T[:, None, None]
        )
        window = self.config.budget_tokens - sinks
        seen_TW = (ring_W <= queries_T[:, None]) & (ring_W > queries_T[:, None] - window)
        allowed_TE = torch.cat([own_TTO.flatten(1), seen_TW], dim=1)
        return SlotView(k_all, v_all, allowed_TE.expand(kv_heads, -1, -1))

    @classmethod
    def step_regions(
        cls, geometry: Geometry, config: StreamingConfig, max_rows: int, capacity_tokens: int
    ) -> list[Region] | None:
        return [
            *dense_step_regions(geometry, max_rows, config.budget_tokens),
            *_sink_regions(geometry, config, max_rows),
        ]

    def make_step(self, max_rows: int, capacity_tokens: int) -> DecodeStep:
        return StreamingStep(self, max_rows)

    def row_facts(self, seq: StreamingSequence) -> RowFacts:
        """What kernels need to know of a sequence, with its newest token in place."""
        config, tokens = self.config, seq.tokens
        return RowFacts(
            tokens=tokens,
            write_slot=self._slot(tokens - 1),
            slots=seq.tensors["k"].shape[2],
            outlier_tokens=min(config.sink_tokens, tokens),
            ring_start=config.sink_tokens,
            ring_slots=self._ring(config),
            first=min(max(config.sink_tokens, tokens - config.budget_tokens + config.sink_tokens), tokens),
        )

    def stats(self, seq: StreamingSequence) -> CacheStats:
        g = self.geometry
        held = min(seq.tokens, self.config.sink_tokens + self._ring(self.config))
        return CacheStats(
            method=self.name,
            attention="sparse" if seq.tokens > self.config.budget_tokens else "exact",
            tokens=seq.tokens,
            device_bytes=seq.price.device_bytes,
            host_bytes=seq.price.host_bytes,
            resident_bytes=2 * held * g.layers * g.key_dim * g.dtype.itemsize,
        )


def _sink_regions(geometry: Geometry, config: StreamingConfig, max_rows: int) -> list[Region]:
    shape = (geometry.layers, max_rows, geometry.kv_heads, config.sink_tokens, geometry.head_dim)
    return [
        Region("sinks", "step", shape, geometry.dtype),
        Region("sink_rows", "step", (max_rows, config.sink_tokens), torch.int32),
    ]


class StreamingStep(DenseStep):
    """Before the step the sinks are turned to their places in the window, those of all rows and layers together."""

    def __init__(self, cache: StreamingCache, max_rows: int) -> None:
        self.cache = cache
        self._copied: list[StreamingSequence] = []
        more = _sink_regions(cache.geometry, cache.config, max_rows)
        super().__init__(cache, max_rows, cache.config.budget_tokens, cache.row_facts, more)

    def load(self, seqs: Seq[CachedSequence], token_ids: Seq[int], rope_rows: Seq[int]) -> None:
        super().load(seqs, token_ids, rope_rows)
        config, mine = self.cache.config, cast("list[StreamingSequence]", list(seqs))
        sinks, full = config.sink_tokens, [seq for seq in mine if seq.tokens > config.budget_tokens]
        if not full or not sinks:
            return
        kept_LBKOD, rows_BO = self.scratch["sinks"], self.scratch["sink_rows"]
        if full != self._copied:
            for i, seq in enumerate(full):
                if not seq.turned:
                    seq.tensors["sinks"].copy_(seq.tensors["k"][:, :, :sinks])
                    seq.turned = True
                kept_LBKOD[:, i].copy_(seq.tensors["sinks"])
                rows_BO[i].copy_(seq.tensors["sink_rows"])
            self._copied = full
        numbers_2B = torch.tensor([[seq.tokens - config.budget_tokens for seq in full], [seq.row for seq in full]])
        dropped_B11, row_B11 = numbers_2B.to(kept_LBKOD.device, non_blocking=True)[:, :, None, None]
        sinks_O, some = torch.arange(sinks, device=kept_LBKOD.device), slice(len(full))
        rope = self.cache.rope
        plain_LBKOD = rope.unrotate(kept_LBKOD[:, some].float(), sinks_O, rows_BO[some, None])
        turned_LBKOD = rope.rotate(plain_LBKOD, sinks_O + dropped_B11, row_B11)
        for i, seq in enumerate(full):
            seq.tensors["k"][:, :, :sinks] = turned_LBKOD[:, i]
