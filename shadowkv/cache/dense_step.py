"""The decoding step of methods that attend to everything they keep: keys and values in the order of their slots."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shadowkv.cache.base import Cache, CachedSequence, Geometry
from shadowkv.cache.layout import Region
from shadowkv.cache.step import DecodeStep, attention_regions, table_regions
from shadowkv.ops.rows import Address, RowFacts


def dense_step_regions(geometry: Geometry, max_rows: int, most_tokens: int) -> list[Region]:
    """What a step works in whose rows attend to at most ``most_tokens`` tokens."""
    return table_regions(geometry.layers, max_rows) + attention_regions(geometry, max_rows, most_tokens)


class DenseStep(DecodeStep):
    """A sequence's tensors ``k`` and ``v`` are [layers, K, SLOTS, D].

    Args:
        facts_of: what kernels need to know of a sequence.
        most_tokens: that a row attends to.
        more: what a method works in besides.
    """

    def __init__(
        self,
        cache: Cache[Any, Any],
        max_rows: int,
        most_tokens: int,
        facts_of: Callable[[Any], RowFacts],
        more: Sequence[Region] = (),
    ) -> None:
        self.geometry = cache.geometry
        self._facts_of = facts_of
        regions = [*dense_step_regions(cache.geometry, max_rows, most_tokens), *more]
        columns = {Address.K: "k", Address.V: "v"}
        super().__init__(cache.geometry.layers, max_rows, columns, regions, most_tokens, cache.device_arena.device)

    def facts(self, seq: CachedSequence) -> RowFacts:
        return self._facts_of(seq)

    def attend(self, layer: int, q_BND: Tensor, out_BND: Tensor) -> None:
        from shadowkv.ops.triton.attention import attend

        rows, heads, kv_heads = q_BND.shape[0], self.geometry.heads, self.geometry.kv_heads
        scratch = self.attention_scratch(rows, kv_heads, heads)
        attend(self.layer(layer, rows), q_BND, kv_heads, 1, None, out_BND, scratch)

    def finish(self) -> None:
        """Nothing is left running."""
