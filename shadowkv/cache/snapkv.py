"""SnapKV: the prompt's tokens that its last queries attend to most are kept, all others are dropped.

Source: arXiv 2404.14469. Its rule is for one KV head per query head; here the weights are averaged over the
query heads of a KV head. The generated tokens and later turns are all kept, and the prompt's choice is final.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shadowkv.cache.base import DENSE_APPEND_TOKENS, Cache, CachedSequence, CacheStats, Geometry, Price, require_finite
from shadowkv.cache.dense_step import DenseStep, dense_step_regions
from shadowkv.cache.layout import Region
from shadowkv.cache.pool import Reservation
from shadowkv.cache.step import DecodeStep
from shadowkv.config import SnapKVConfig
from shadowkv.errors import CapacityError
from shadowkv.ops.attention import group_queries
from shadowkv.ops.rows import RowFacts
from shadowkv.ops.select import top_chunks
from shadowkv.ops.views import DenseView, View


@dataclass(eq=False)
class SnapSequence(CachedSequence):
    """``dropped`` counts the prompt's tokens that are not kept."""

    dropped: int = 0


def observed_weights(q_NWD: Tensor, k_KSD: Tensor) -> Tensor:
    """Attention that the last W positions pay to each token before them, summed, [K, S-W] in float32.

    The mean over the query heads of each KV head. Shapes: q [N, W, D]; k [K, S, D].
    """
    kv_heads, context, dim = k_KSD.shape
    heads, window, _ = q_NWD.shape
    group = heads // kv_heads
    causal_WS = torch.ones(window, context, dtype=torch.bool, device=k_KSD.device).tril(context - window)
    unseen_QS = ~causal_WS.repeat(group, 1)
    summed: list[Tensor] = []
    for q_QD, k_SD in zip(group_queries(q_NWD, kv_heads), k_KSD, strict=True):  # by head: bounds the workspace
        logits_QS = (q_QD.float() @ k_SD.float().mT / math.sqrt(dim)).masked_fill_(unseen_QS, -torch.inf)
        weights_QS = torch.softmax(logits_QS, dim=-1)[:, : context - window]
        summed.append(weights_QS.reshape(group, window, -1).sum(dim=1).mean(dim=0))
    return torch.stack(summed)


class SnapKVCache(Cache[SnapKVConfig, SnapSequence]):
    """Slots per KV head: [kept tokens of the prompt in their order | all later tokens]."""

    name = "snapkv"

    @classmethod
    def _slots(cls, config: SnapKVConfig, capacity_tokens: int) -> int:
        return min(capacity_tokens, config.budget_tokens + config.generated_tokens)

    @classmethod
    def regions(
        cls, geometry: Geometry, config: SnapKVConfig, capacity_tokens: int
    ) -> tuple[list[Region], list[Region]]:
        shape = (geometry.layers, geometry.kv_heads, cls._slots(config, capacity_tokens), geometry.head_dim)
        return [Region(name, "keys and values", shape, geometry.dtype) for name in ("k", "v")], []

    @property
    def append_tokens(self) -> int:
        return DENSE_APPEND_TOKENS

    @property
    def prompt_queries(self) -> int:
        return self.config.window_tokens

    def _new_sequence(
        self, reservation: Reservation, owns_memory: bool, price: Price, tensors: dict[str, Tensor]
    ) -> SnapSequence:
        return SnapSequence(reservation, owns_memory, price, tensors)

    def _copy_lengths(self, source: SnapSequence, target: SnapSequence) -> None:
        target.tokens, target.dropped = source.tokens, source.dropped

    def _check_slots(self, capacity_tokens: int, dropped: int) -> None:
        """What a sequence may still grow to has slots: nothing runs out half-way."""
        slots = self._slots(self.config, capacity_tokens)
        if capacity_tokens - dropped > slots:
            raise CapacityError(
                f"a sequence reserved for {capacity_tokens} tokens, {dropped} of them dropped, has room for {slots}; "
                f"generated_tokens is {self.config.generated_tokens}: raise it, or reserve less"
            )

    def fork(self, seq: SnapSequence, capacity: int | Reservation) -> SnapSequence:
        self._check_slots(capacity if isinstance(capacity, int) else capacity.capacity_tokens, seq.dropped)
        return super().fork(seq, capacity)

    def begin_prompt(self, seq: SnapSequence, tokens: int) -> None:
        self._check_prompt(seq, tokens)
        dropped = max(tokens - self.config.budget_tokens, 0)
        self._check_slots(seq.capacity_tokens, dropped)
        seq.tokens, seq.dropped = tokens, dropped

    def take_layer(
        self,
        layer: int,
        seq: SnapSequence,
        k_pre_SKD: Tensor,
        k_KSD: Tensor,
        v_KSD: Tensor,
        q_NWD: Tensor | None = None,
    ) -> None:
        require_finite(layer, k_KSD)
        held = slice(seq.tokens - seq.dropped)
        if not seq.dropped:
            seq.tensors["k"][layer, :, held], seq.tensors["v"][layer, :, held] = k_KSD, v_KSD
            return
        assert q_NWD is not None, "snapkv needs the prompt's last queries"
        kept_KE = self._choose(q_NWD, k_KSD)
        heads_K1 = torch.arange(k_KSD.shape[0], device=k_KSD.device)[:, None]
        seq.tensors["k"][layer, :, held] = k_KSD[heads_K1, kept_KE]
        seq.tensors["v"][layer, :, held] = v_KSD[heads_K1, kept_KE]

    def _choose(self, q_NWD: Tensor, k_KSD: Tensor) -> Tensor:
        """Positions that are kept, ascending: [K, budget]."""
        config, context = self.config, k_KSD.shape[1]
        weights_KS = observed_weights(q_NWD, k_KSD)
        pooled_KS = F.max_pool1d(weights_KS, config.pool_tokens, stride=1, padding=config.pool_tokens // 2)
        window = q_NWD.shape[1]
        best_KE = top_chunks(pooled_KS, config.budget_tokens - window).sort(dim=1).values
        window_W = torch.arange(context - window, context, device=k_KSD.device)
        return torch.cat([best_KE, window_W.expand(best_KE.shape[0], -1)], dim=1)

    def extend(self, seqs: Seq[SnapSequence], tokens: int, rope_lengths: Seq[int] | None = None) -> None:
        self._check_room(seqs, tokens)
        for seq in seqs:
            seq.tokens += tokens

    def append(self, layer: int, seqs: Seq[SnapSequence], k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        for seq, k_KTD, v_KTD in zip(seqs, k_BKTD, v_BKTD, strict=True):
            held = seq.tokens - seq.dropped
            new = slice(held - k_KTD.shape[1], held)
            seq.tensors["k"][layer, :, new] = k_KTD
            seq.tensors["v"][layer, :, new] = v_KTD

    def view(self, layer: int, seqs: Seq[SnapSequence], q_BNTD: Tensor) -> list[View]:
        views: list[View] = []
        for seq in seqs:
            held = slice(seq.tokens - seq.dropped)  # what is kept stands before the queries: causal as it is
            views.append(DenseView(seq.tensors["k"][layer, :, held], seq.tensors["v"][layer, :, held]))
        return views

    @classmethod
    def step_regions(
        cls, geometry: Geometry, config: SnapKVConfig, max_rows: int, capacity_tokens: int
    ) -> list[Region] | None:
        return dense_step_regions(geometry, max_rows, cls._slots(config, capacity_tokens))

    def make_step(self, max_rows: int, capacity_tokens: int) -> DecodeStep:
        return DenseStep(self, max_rows, self._slots(self.config, capacity_tokens), _facts)

    def stats(self, seq: SnapSequence) -> CacheStats:
        g = self.geometry
        return CacheStats(
            method=self.name,
            attention="sparse" if seq.dropped else "exact",
            tokens=seq.tokens,
            device_bytes=seq.price.device_bytes,
            host_bytes=seq.price.host_bytes,
            resident_bytes=2 * (seq.tokens - seq.dropped) * g.layers * g.key_dim * g.dtype.itemsize,
        )


def _facts(seq: SnapSequence) -> RowFacts:
    """What was dropped lies before the first slot of a ring that never comes round."""
    return RowFacts(
        tokens=seq.tokens,
        write_slot=seq.tokens - seq.dropped - 1,
        slots=seq.tensors["k"].shape[2],
        ring_start=-seq.dropped,
        ring_slots=seq.capacity_tokens,
        first=seq.dropped,
    )
