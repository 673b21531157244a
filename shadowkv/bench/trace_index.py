"""An index whose selections have a hit rate that was asked for, after all the work of a real one.

With random weights queries select at random, and a benchmark's hit rate would be no model's. This one scores
as its inner index does, and then puts logits in place whose selection keeps a known share from step to step
(``ops.sliding``). Results made with it are labelled.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shadowkv.cache.base import Geometry
from shadowkv.cache.index import BatchIndex, Joining
from shadowkv.cache.layout import Region
from shadowkv.ops.rows import LayerRows
from shadowkv.ops.sliding import Circle, new_chunks, sliding_logits


def label(hit_rate: float) -> str:
    """What stands beside every figure made with such an index."""
    return f"synthetic hit rate {hit_rate:g} (selections are made up after the real scoring, whose work is done)"


@dataclass(eq=False)
class TraceIndex:
    """Wraps an index; ``select`` chunks are selected per step, of which a share ``hit_rate`` was before.

    The plain step calls :meth:`logits`, which counts the steps itself: once per sequence, layer and pass.
    """

    inner: BatchIndex
    hit_rate: float
    select: int
    _steps: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def new_per_1024(self) -> int:
        """What :mod:`shadowkv.ops.sliding` takes."""
        return new_chunks(self.select, self.hit_rate)

    def regions(self, geometry: Geometry, chunks: int) -> list[Region]:
        """The inner index's."""
        return self.inner.regions(geometry, chunks)

    def write(self, layer: int, tensors: dict[str, Tensor], first_chunk: int, k_KCLD: Tensor) -> None:
        """As the inner index does."""
        self.inner.write(layer, tensors, first_chunk, k_KCLD)

    def logits(self, layer: int, tensors: dict[str, Tensor], chunks: int, q_NTD: Tensor) -> Tensor:
        """The inner index's shape, made after its work."""
        logits_KGTC = self.inner.logits(layer, tensors, chunks, q_NTD)
        kv_heads = logits_KGTC.shape[0]
        capacity = tensors["slot_of_chunk"].shape[-1]
        key = (tensors["slot_of_chunk"].data_ptr(), layer)
        step = self._steps[key] = self._steps.get(key, 0) + 1
        made_KC = sliding_logits(
            Circle.of(capacity), kv_heads, chunks, step, self.new_per_1024, torch.device(logits_KGTC.device)
        )
        return made_KC[:, None, None].expand_as(logits_KGTC).contiguous()

    def score(self, rows: LayerRows, q_BND: Tensor, logits_BKGC: Tensor, parts_BKGZ2: Tensor) -> None:
        """The inner index's work, then logits in its place. The number of the step comes from the rows' facts, so
        it can be captured and replayed."""
        from shadowkv.ops.triton.sliding import overwrite_logits

        self.inner.score(rows, q_BND, logits_BKGC, parts_BKGZ2)
        overwrite_logits(logits_BKGC, parts_BKGZ2, rows.facts_BI, self.new_per_1024)

    def join(self, joining: Joining, geometry: Geometry, chunk_tokens: int) -> None:
        """As the inner index does."""
        self.inner.join(joining, geometry, chunk_tokens)
