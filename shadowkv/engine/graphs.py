"""The captured decoding step: one CUDA graph per batch size that occurs, replayed with other rows.

Sizes are rounded up, and what is left over is padding, so a batch that grows and shrinks needs few graphs.
They share one memory pool, since only one runs at a time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shadowkv.cache.base import CachedSequence
from shadowkv.cache.step import DecodeStep
from shadowkv.models.decode_step import decode_step
from shadowkv.models.decoder import Decoder


def padded_rows(rows: int, max_rows: int) -> int:
    """The batch size that a batch of ``rows`` runs at: powers of two to 8, then multiples of 4, of 8 from 32 on."""
    for limit, multiple in ((32, 4), (max_rows, 8)):
        if rows <= 8:
            return min(1 << (rows - 1).bit_length(), max_rows)
        if rows <= limit:
            return min(-(-rows // multiple) * multiple, max_rows)
    return max_rows


class StepRunner:
    """Runs decoding steps by kernels: replayed from a graph on a GPU, launched one by one elsewhere.

    Args:
        one_size: every batch is padded to the largest, so that there is one graph: where steps are too few for more.
    """

    def __init__(self, decoder: Decoder, step: DecodeStep, *, one_size: bool = False) -> None:
        self.decoder = decoder
        self.step = step
        self.one_size = one_size
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    def decode(self, seqs: Sequence[CachedSequence], token_ids: Sequence[int]) -> Tensor:
        """One token for each sequence, which has been extended by it: logits [B, V], valid until the next call."""
        rows = self.step.max_rows if self.one_size else padded_rows(len(seqs), self.step.max_rows)
        rope = self.decoder.rope
        rope_rows = [rope.row(seq.tokens) for seq in seqs]
        if self.decoder.device.type != "cuda":
            self.step.load(seqs, token_ids, rope_rows)
            return decode_step(self.decoder, self.step, len(seqs))
        # A table of frequencies that has outgrown its room is somewhere else: that takes new graphs.
        key = rows, len(rope.table.factor_X)
        if key not in self._graphs:
            self._graphs = {old: graph for old, graph in self._graphs.items() if old[1] == key[1]}
            if not self._graphs:
                self._pool = None  # a pool ends with its last graph
            self._graphs[key] = self._capture(rows)
        graph, logits_BV = self._graphs[key]
        self.step.load(seqs, token_ids, rope_rows)
        graph.replay()
        return logits_BV[: len(seqs)]

    def _capture(self, rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Record the step over padding, which changes no sequence; once before that, so that all is compiled."""
        self.step.clear()
        side = torch.cuda.Stream(self.decoder.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.decoder.device))
        with torch.cuda.stream(side):
            decode_step(self.decoder, self.step, rows)
        torch.cuda.current_stream(self.decoder.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits_BV = decode_step(self.decoder, self.step, rows)
        self._pool = self._pool or graph.pool()
        return graph, logits_BV
