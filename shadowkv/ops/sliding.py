"""Logits whose selection changes by a known share from step to step, whatever the queries are.

For benchmarks with random queries, whose selections would have a hit rate that no model has. The chunks are
laid on a circle in a fixed scattered order; the best ones are those behind a point that moves backwards a little
with every step. So as many as it passes join the selection, and as many leave it at the other end: what comes
next was never the second best, which a larger resident set might hold already.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GOLDEN = 0.6180339887498949
LOGIT_STEPS = 64
"""Neighbours on the circle differ by the inverse of this: exact in float32 on a circle of 2**24 places."""
OUT_OF_REACH = 1e30
"""A log-sum-exp beside which every logit is nothing."""
SHARES = 1024
"""Chunks that are new in a step are given in this fraction of a chunk."""


@dataclass(frozen=True)
class Circle:
    """A power of two of places, and how far apart neighbouring chunks and heads are on it."""

    places: int
    stride: int

    @classmethod
    def of(cls, chunk_capacity: int) -> "Circle":
        """Room for every chunk. An odd stride reaches each place once; the golden ratio spreads evenly."""
        places = max(1 << (chunk_capacity - 1).bit_length(), 2)
        return cls(places, int(places * GOLDEN) | 1)

    def start(self, step: int, new_per_1024: int, chunks: int) -> int:
        """The first place of a step's selection, where ``new_per_1024 / 1024`` chunks are new in each."""
        return -(step * new_per_1024 * self.places // (SHARES * chunks)) % self.places


def new_chunks(select: int, hit_rate: float) -> int:
    """In :data:`SHARES` of a chunk: how many of ``select`` chunks are new in each step."""
    return round((1 - hit_rate) * select * SHARES)


def sliding_logits(
    circle: Circle, kv_heads: int, chunks: int, step: int, new_per_1024: int, device: torch.device
) -> Tensor:
    """Logits [K, C] in float32 of the first ``chunks`` chunks; at most 0, and no two of a head are equal."""
    chunk_1C = torch.arange(chunks, device=device)[None]
    head_K1 = torch.arange(kv_heads, device=device)[:, None]
    # Heads stand a quarter of the stride's reach apart, so that they select different chunks.
    place_KC = (chunk_1C + head_K1 * (circle.places // 4 + 1)) * circle.stride % circle.places
    distance_KC = (place_KC - circle.start(step, new_per_1024, chunks)) % circle.places
    return -distance_KC.float() / LOGIT_STEPS
