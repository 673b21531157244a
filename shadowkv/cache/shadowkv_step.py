"""ShadowKV's decoding step by kernels: score, choose, bring in what is missing, attend.

The same arithmetic as ``cache.shadowkv``, for all rows at once. Values cross the bus on a stream of their own
while keys are rebuilt; what is fetched late is for the next step and has a third stream, and the rest of this one to
arrive in.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from shadowkv.cache.base import CachedSequence, Geometry
from shadowkv.cache.index import Joining
from shadowkv.cache.layout import Region
from shadowkv.cache.shadowkv_layout import ExactRegion
from shadowkv.cache.step import DecodeStep, addresses, attention_regions, table_regions
from shadowkv.config import ShadowKVConfig
from shadowkv.ops.rows import Address, Fact, LayerRows, RowFacts, Selection
from shadowkv.ops.splits import choose_width, score_splits

if TYPE_CHECKING:
    from shadowkv.cache.shadowkv import ShadowKVCache, ShadowSequence

COLUMNS = {
    Address.K: "exact_k",
    Address.V: "exact_v",
    Address.LANDMARKS: "landmarks",
    Address.SLOT_OF_CHUNK: "slot_of_chunk",
    Address.RESIDENT_IDS: "resident_ids",
    Address.LAST_USED: "last_used",
    Address.COEFF: "coeff",
    Address.BASIS: "basis",
    Address.MEAN: "mean",
    Address.VALUES: "values",
    Address.ROPE_ROWS: "rope_rows",
    Address.COUNTERS: "counters",
}
"""Where kernels find what ``shadowkv_layout`` lays out."""


def step_regions(
    geometry: Geometry, config: ShadowKVConfig, max_rows: int, capacity_tokens: int
) -> list[Region] | None:
    """See :meth:`Cache.step_regions`. Fetching everything anew in every step has no kernels."""
    if not config.reuse:
        return None
    exact, b, k = ExactRegion.of(config), max_rows, geometry.kv_heads
    regions = table_regions(geometry.layers, max_rows)
    regions += attention_regions(geometry, max_rows, most_attended(exact, capacity_tokens))
    if not exact.compressible(capacity_tokens):
        return regions
    chunks = -(-capacity_tokens // (16 * config.chunk_tokens)) * 16  # rows of logits begin where vectors can
    slots = config.resident_chunks
    group = geometry.heads // k
    regions += [
        Region("logits", "step", (b, k, group, chunks), torch.float32),
        Region("parts", "step", (b, k, group, score_splits(chunks), 2), torch.float32),
        Region("keys", "step", (b, k, choose_width(chunks)), torch.int32),
    ]
    for i in range(geometry.layers if config.late_fetch_chunks else 1):
        regions += [
            Region(f"attend.{i}", "step", (b, k, slots), torch.int32),
            Region(f"attend_count.{i}", "step", (b, k), torch.int32),
            Region(f"fetch_chunk.{i}", "step", (b, k, slots), torch.int32),
            Region(f"fetch_slot.{i}", "step", (b, k, slots), torch.int32),
            Region(f"fetch_count.{i}", "step", (b, k, 2), torch.int32),
        ]
    return regions


def most_attended(exact: ExactRegion, capacity_tokens: int) -> int:
    """Tokens that a sequence of at most this capacity attends to at most."""
    return max(exact.slots, min(capacity_tokens, exact.whole))


def make_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream beside the current one, on a GPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class ShadowStep(DecodeStep):
    """See :class:`DecodeStep`."""

    def __init__(self, cache: "ShadowKVCache", max_rows: int, capacity_tokens: int) -> None:
        self.cache = cache
        self.compressible = cache.exact.compressible(capacity_tokens)
        device = cache.device_arena.device
        regions = step_regions(cache.geometry, cache.config, max_rows, capacity_tokens)
        assert regions is not None, "no kernels for these settings"
        attended = most_attended(cache.exact, capacity_tokens)
        super().__init__(cache.geometry.layers, max_rows, COLUMNS, regions, attended, device)
        # What is fetched for this layer must not queue behind what the layer before fetches for the next step.
        self._side, self._later = (make_stream(device) for _ in range(2))
        self._late_running = False

    def facts(self, seq: CachedSequence) -> RowFacts:
        return row_facts(self.cache, seq)  # type: ignore[arg-type]

    def attend(self, layer: int, q_BND: Tensor, out_BND: Tensor) -> None:
        from shadowkv.ops.triton.attention import attend

        g, size = self.cache.geometry, self.cache.config.chunk_tokens
        rows = self.layer(layer, q_BND.shape[0])
        selection = self._select(layer, rows, q_BND) if self.compressible else None
        scratch = self.attention_scratch(q_BND.shape[0], g.kv_heads, g.heads)
        attend(rows, q_BND, g.kv_heads, size, selection, out_BND, scratch)
        if selection is not None and self.cache.config.late_fetch_chunks:
            self._fetch(layer, rows, selection, late=True)

    def _select(self, layer: int, rows: LayerRows, q_BND: Tensor) -> Selection:
        """Score, choose, and bring what is missing into its slots."""
        from shadowkv.ops.triton.choose import choose_chunks

        selection = self._selection(layer, q_BND.shape[0])
        logits, parts = self._first(q_BND.shape[0], "logits", "parts")
        self.cache.index.score(rows, q_BND, logits, parts)
        (keys,) = self._first(q_BND.shape[0], "keys")
        whole = self.cache.config.attend == "resident"
        most = self.cache.config.resident_chunks if whole else self.cache.config.budget_chunks
        choose_chunks(rows, logits, parts, keys, selection, most=most, attend_resident=whole)
        self._fetch(layer, rows, selection, late=False)
        return selection

    def _fetch(self, layer: int, rows: LayerRows, selection: Selection, *, late: bool) -> None:
        from shadowkv.ops.triton.keys import rebuild_keys
        from shadowkv.ops.triton.values import fetch_values

        g, size, cache = self.cache.geometry, self.cache.config.chunk_tokens, self.cache

        def values() -> None:
            fetch_values(rows, selection, size, g.kv_heads, g.head_dim, g.dtype, late=late)

        def keys() -> None:
            rank = cache.ranks[layer]
            rebuild_keys(rows, selection, cache.rope.table, rank, size, g.kv_heads, g.head_dim, g.dtype, late=late)

        if late:
            self._beside(self._later, values, keys)
            self._late_running = True
        else:
            self._beside(self._side, values)
            keys()
            self._join(self._side)

    def finish(self) -> None:
        if self._late_running:
            self._join(self._later)
            self._late_running = False

    def _beside(self, stream: torch.cuda.Stream | None, *works: Callable[[], None]) -> None:
        """On another stream, after everything that the current one has been given so far."""
        if stream is None:
            for work in works:
                work()
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for work in works:
                work()

    def _join(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _first(self, rows: int, *names: str) -> tuple[Tensor, ...]:
        return tuple(self.scratch[name][:rows] for name in names)

    def _selection(self, layer: int, rows: int) -> Selection:
        i = layer if self.cache.config.late_fetch_chunks else 0
        names = ("attend", "attend_count", "fetch_chunk", "fetch_slot", "fetch_count")
        return Selection(*self._first(rows, *(f"{name}.{i}" for name in names)))


def row_facts(cache: "ShadowKVCache", seq: "ShadowSequence") -> RowFacts:
    """What kernels need to know of a sequence, with its newest token in place."""
    exact, config, tokens = cache.exact, cache.config, seq.tokens
    slots = seq.tensors["exact_k"].shape[2]
    if not seq.compressed:
        return RowFacts(tokens=tokens, write_slot=tokens - 1, slots=slots, ring_slots=slots, step=seq.step)
    start = exact.outlier + exact.resident_size
    count, cap, late = cache.selection_size(seq)
    return RowFacts(
        tokens=tokens,
        write_slot=start + (tokens - 1) % exact.window,
        slots=slots,
        outlier_tokens=seq.outliers * config.chunk_tokens,
        resident_chunks=config.resident_chunks,
        ring_start=start,
        ring_slots=exact.window,
        first=seq.context_chunks * config.chunk_tokens,
        chunks=seq.context_chunks,
        chunk_capacity=seq.tensors["slot_of_chunk"].shape[2],
        select=count,
        cap=config.resident_chunks if cap is None else cap,
        late_cap=late,
        step=seq.step,
    )


class Leaving(NamedTuple):
    """Chunks of a sequence that leave its window for the context: the first one and how many."""

    seq: "ShadowSequence"
    first_chunk: int
    chunks: int


def join_by_kernels(cache: "ShadowKVCache", leaving: Sequence[Leaving]) -> None:
    """What ``ShadowKVCache._leave_window`` does, for all sequences and layers at once."""
    from shadowkv.ops.triton.join import join_context

    g, size, device = cache.geometry, cache.config.chunk_tokens, cache.device_arena.device
    numbers = [[*row_facts(cache, entry.seq), entry.first_chunk, entry.chunks] for entry in leaving]
    numbers_BX = torch.tensor(numbers, dtype=torch.int32).to(device)
    joining = Joining(
        torch.stack([addresses(entry.seq, g.layers, COLUMNS) for entry in leaving], dim=1).to(device),
        numbers_BX[:, : len(Fact)].contiguous(),
        numbers_BX[:, -2].contiguous(),
        numbers_BX[:, -1].contiguous(),
        max(entry.chunks for entry in leaving),
    )
    join_context(
        joining.address_LBX,
        joining.facts_BI,
        joining.first_chunk_B,
        joining.chunks_B,
        cache.ranks_L,
        max(cache.ranks),
        cache.rope.table,
        size,
        g.kv_heads,
        g.head_dim,
        g.dtype,
        joining.most,
        rank_multiple=math.gcd(16, *cache.ranks),
    )
    cache.index.join(joining, g, size)
