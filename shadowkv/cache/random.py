"""The floor of a budget: units are drawn at random."""

import torch
from torch import Tensor

from shadowkv.cache.base import Geometry
from shadowkv.cache.index import TableIndex
from shadowkv.cache.oracle import ExactScores
from shadowkv.cache.selective import SelectiveCache, SelectiveSequence
from shadowkv.cache.selective_step import SelectiveStep
from shadowkv.config import RandomConfig
from shadowkv.ops.rows import Fact, LayerRows

FIRST_MIX, SECOND_MIX = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""SplitMix64's two multipliers (Steele, Lea and Flood, 2014), as signed integers."""
STEP = -0x61C8864680B583EB
"""SplitMix64's increment: 2^64 over the golden ratio, odd."""


def draw(seed: int, layer: int, tokens_B: Tensor, kv_heads: int, units: int) -> Tensor:
    """Uniform numbers in [0, 1) that follow from the arguments alone, the same on every device, [B, K, C] in float32.

    A hash of seed, layer, length, KV head and unit, so that a captured step can draw them.
    """
    device = tokens_B.device
    heads_K, units_C = (torch.arange(count, device=device) for count in (kv_heads, units))
    start_B = _mixed(_mixed(tokens_B.long() * STEP + seed % 2**63) * STEP + layer)
    start_BK = _mixed(start_B[:, None] * STEP + heads_K)
    drawn_BKC = _mixed(start_BK[:, :, None] + (units_C + 1) * STEP)
    return (drawn_BKC >> 40 & (1 << 24) - 1).float() / (1 << 24)


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, whose products wrap as unsigned ones do."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * FIRST_MIX
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * SECOND_MIX
    return x ^ (x >> 31 & (1 << 33) - 1)


class RandomCache(SelectiveCache[RandomConfig]):
    """A bound and no method. Sequences of one length draw the same units, whatever batch they are in."""

    name = "random"

    @classmethod
    def index_of(cls, geometry: Geometry, config: RandomConfig) -> TableIndex:
        return ExactScores(config.chunk_tokens)  # keeps nothing, and is not asked

    def scores(self, layer: int, seq: SelectiveSequence, units: int, q_NTD: Tensor, selectable_KC: Tensor) -> Tensor:
        tokens_B = torch.tensor([seq.tokens], device=q_NTD.device)
        scores_KC = draw(self.config.selection_seed, layer, tokens_B, self.geometry.kv_heads, units)[0]
        return scores_KC.masked_fill(~selectable_KC, -torch.inf)

    def step_scores(self, layer: int, rows: LayerRows, q_BND: Tensor, step: SelectiveStep, open_BKC: Tensor) -> Tensor:
        tokens_B = rows.facts_BI[:, Fact.TOKENS]
        return draw(self.config.selection_seed, layer, tokens_B, self.geometry.kv_heads, open_BKC.shape[2])
