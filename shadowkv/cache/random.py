"""The floor of a budget: units are drawn at random."""

import torch
from torch import Tensor

from shadowkv.cache.base import Geometry
from shadowkv.cache.index import Index
from shadowkv.cache.oracle import ExactScores
from shadowkv.cache.selective import SelectiveCache, SelectiveSequence
from shadowkv.config import RandomConfig

MIX = 1_000_003
"""A prime: layers and lengths below it give seeds of their own."""


def draw(seed: int, layer: int, tokens: int, shape: tuple[int, int]) -> Tensor:
    """Uniform numbers that follow from the arguments alone, on the CPU, so that every device has the same."""
    mixed = ((seed * MIX + layer) * MIX + tokens) % 2**63
    return torch.rand(shape, generator=torch.Generator().manual_seed(mixed))


class RandomCache(SelectiveCache[RandomConfig]):
    """A bound and no method. Sequences of one length draw the same units, whatever batch they are in."""

    name = "random"

    @classmethod
    def index_of(cls, geometry: Geometry, config: RandomConfig) -> Index:
        return ExactScores(config.chunk_tokens)  # keeps nothing, and is not asked

    def scores(self, layer: int, seq: SelectiveSequence, units: int, q_NTD: Tensor, selectable_KC: Tensor) -> Tensor:
        shape = (self.geometry.kv_heads, units)
        scores_KC = draw(self.config.selection_seed, layer, seq.tokens, shape).to(q_NTD.device)
        return scores_KC.masked_fill(~selectable_KC, -torch.inf)
