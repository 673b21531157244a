"""A driver whose every key, value and query is known, and what a view lets each query attend to.

A value's first number is its token's position, so that attended tokens can be read off a view.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shadowkv.cache.base import Cache, CachedSequence
from shadowkv.ops.contract.bounds import Bounded
from shadowkv.ops.views import DenseView, View
from tests import rounding

Array = NDArray[np.float64]


@dataclass
class Told:
    """One sequence and everything that it was given, by layer. Shapes: [K or N, S, D]."""

    cache: Cache
    seq: CachedSequence
    pre: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)  # the prompt's
    q_pre: list[Tensor] = field(default_factory=list)  # the last step's
    ranking: list[Tensor] = field(default_factory=list)  # the last step's queries that tokens are ranked with

    @classmethod
    def prompt(cls, cache: Cache, tokens: int, capacity: int) -> "Told":
        told = cls(cache, cache.open(capacity))
        cache.begin_prompt(told.seq, tokens)
        g = cache.geometry
        for layer in range(g.layers):
            pre, v = told._new_keys(0, tokens)
            k, q = told._turn(pre, 0), told._turn(told._normal(g.heads, tokens), 0)
            told.pre.append(pre)
            told.k.append(k)
            told.v.append(v)
            told.q.append(q)
            wanted = cache.prompt_queries
            cache.take_layer(layer, told.seq, pre.transpose(0, 1), k, v, q[:, -wanted:] if wanted else None)
        return told

    def step(self, tokens: int = 1) -> list[tuple[Tensor, View]]:
        """By layer, the queries [N, T, D] and what they may attend to."""
        g, first = self.cache.geometry, self.seq.tokens
        self.cache.extend([self.seq], tokens)
        self.q_pre, self.ranking, found = [], [], []
        for layer in range(g.layers):
            pre, v = self._new_keys(first, tokens)
            q_pre = self._normal(g.heads, tokens)
            k, q = self._turn(pre, first), self._turn(q_pre, first)
            for known, new in ((self.pre, pre), (self.k, k), (self.v, v)):
                known[layer] = torch.cat([known[layer], new], dim=1)
            self.q_pre.append(q_pre)
            self.cache.append(layer, [self.seq], k[None], v[None])
            self.ranking.append(q)
            if self.cache.foresees and layer:  # something else than what attends
                self.ranking[layer] = self._turn(self._normal(g.heads, tokens), first)
                self.cache.foresee(layer, self.ranking[layer][None])
            (view,) = self.cache.view(layer, [self.seq], q[None])
            found.append((q, view))
        return found

    def _normal(self, heads: int, tokens: int) -> Tensor:
        return 1.5 * torch.randn(heads, tokens, self.cache.geometry.head_dim, device=self.cache.device_arena.device)

    def _new_keys(self, first: int, tokens: int) -> tuple[Tensor, Tensor]:
        g = self.cache.geometry
        v = self._normal(g.kv_heads, tokens)
        v[..., 0] = torch.arange(first, first + tokens)
        return self._normal(g.kv_heads, tokens), v

    def _turn(self, x: Tensor, first: int) -> Tensor:
        positions = torch.arange(first, first + x.shape[1], device=x.device)
        return self.cache.rope.rotate(x, positions, torch.full_like(positions, self.cache.rope.row(1)))


def attended(view: View, tokens: int) -> list[list[list[int]]]:
    """Positions by KV head and query, in order; one that is attended twice is there twice."""
    if isinstance(view, DenseView):
        at = view.v_KSD[..., 0].long().tolist()
        return [[sorted(head[: len(head) - tokens + t + 1]) for t in range(tokens)] for head in at]
    return [[sorted(view.v_KED[h, row, 0].long().tolist()) for row in head] for h, head in enumerate(view.allowed_KTE)]


def attention(q_NTD: Tensor, k_KSD: Tensor, v_KSD: Tensor, seen: list[list[list[int]]]) -> Bounded:
    """Of each query over the positions that it sees."""
    seen_KTS = torch.zeros(len(seen), q_NTD.shape[1], k_KSD.shape[1], dtype=torch.bool)
    for head, queries in enumerate(seen):
        for t, positions in enumerate(queries):
            seen_KTS[head, t, positions] = True
    return rounding.attention(q_NTD, k_KSD, v_KSD, seen_KTS.to(q_NTD.device))


def log_scores(logits_GTC: Array) -> Array:
    """The log of: softmax over the units, summed over tokens, maximum over the group, [C]."""
    weights = np.exp(logits_GTC - logits_GTC.max(-1, keepdims=True))
    return np.log((weights / weights.sum(-1, keepdims=True)).sum(1).max(0))


class CloseCallError(Exception):
    """A decision that rounding could turn."""


def best(scores: Array, candidates: list[int], count: int, off: float) -> list[int]:
    """The best candidates, by scores that rounding may move by ``off`` each.

    Raises:
        CloseCallError: it could turn the choice.
    """
    order = sorted(range(len(candidates)), key=lambda i: -scores[i])
    if 0 < count < len(order) and scores[order[count - 1]] - scores[order[count]] <= 2 * off:
        raise CloseCallError
    return sorted(candidates[i] for i in order[:count])
