"""The decoding step of methods that select among exact keys: score a table, choose units, attend to them.

Kernels read the keys and values of the chosen units where they lie; those of a host store come over the bus as they
are read, which is exact and bound by the bus. Choosing is PyTorch's top-k over keys whose order settles ties.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shadowkv.cache.base import CachedSequence, Geometry
from shadowkv.cache.layout import Region
from shadowkv.cache.step import DecodeStep, attention_regions, table_regions
from shadowkv.config import SelectiveConfig
from shadowkv.ops.rows import Address, Fact, LayerRows, RowFacts, Selection
from shadowkv.ops.splits import score_splits

if TYPE_CHECKING:
    from shadowkv.cache.selective import SelectiveCache, SelectiveSequence

LOGITS_MULTIPLE = 16
"""Rows of logits begin where vectors can."""


class StepSizes(NamedTuple):
    """Of a step: the most units that a row selects from, table entries per unit, units that a row attends to."""

    units: int
    entries: int
    picks: int

    @property
    def width(self) -> int:
        """Columns of the logits."""
        return self.units * self.entries


def step_sizes(method: type["SelectiveCache[Any]"], config: SelectiveConfig, capacity_tokens: int) -> StepSizes | None:
    """None where no sequence of this capacity ever selects."""
    if not method.selects(config, method.context_units(config, capacity_tokens)):
        return None
    units = -(-capacity_tokens // (config.unit_tokens * LOGITS_MULTIPLE)) * LOGITS_MULTIPLE
    return StepSizes(units, method.entries_per_unit(config), method.always_units(config) + config.budget_units)


def selective_step_regions(
    method: type["SelectiveCache[Any]"],
    geometry: Geometry,
    config: SelectiveConfig,
    max_rows: int,
    capacity_tokens: int,
) -> list[Region]:
    """See :meth:`Cache.step_regions`."""
    g, b = geometry, max_rows
    regions = table_regions(g.layers, b) + attention_regions(g, b, capacity_tokens)
    sizes = step_sizes(method, config, capacity_tokens)
    if sizes is None:
        return regions
    group = g.heads // g.kv_heads
    device, _ = method.regions(g, config, capacity_tokens)
    kept = [r for r in device if r.name in method.kept_for_steps()]
    return [
        *regions,
        Region("dense_facts", "step", (b, len(Fact)), torch.int32),
        Region("logits", "step", (b, g.kv_heads, group, sizes.width), torch.float32),
        Region("parts", "step", (b, g.kv_heads, group, score_splits(sizes.width), 2), torch.float32),
        Region("spare", "step", (b, g.kv_heads, group, sizes.units), torch.float32),
        Region("ranks", "step", (b, g.kv_heads, sizes.units), torch.int64),
        Region("attend", "step", (b, g.kv_heads, sizes.picks), torch.int32),
        Region("attend_count", "step", (b, g.kv_heads), torch.int32),
        *(Region(r.name, "step", (r.shape[0], b, *r.shape[1:]), r.dtype) for r in kept),
    ]


class SelectiveStep(DecodeStep):
    """See :class:`DecodeStep`. Small tensors that the index needs of every row are copied here when rows change."""

    def __init__(self, cache: "SelectiveCache[Any]", max_rows: int, capacity_tokens: int) -> None:
        self.cache = cache
        self.sizes = step_sizes(type(cache), cache.config, capacity_tokens)
        self._selecting: list[tuple[SelectiveSequence, bool]] = []
        columns = {Address.K: "k", Address.V: "v"}
        if self.sizes is not None:
            columns[Address.LANDMARKS] = cache.index.table
        device, geometry = cache.device_arena.device, cache.geometry
        regions = selective_step_regions(type(cache), geometry, cache.config, max_rows, capacity_tokens)
        super().__init__(geometry.layers, max_rows, columns, regions, capacity_tokens, device)
        self.kept = {name: self.scratch[name] for name in cache.kept_for_steps() if name in self.scratch}
        if self.sizes is not None:
            self.scratch["attend_count"].fill_(self.sizes.picks)  # of those that select; others have no slots

    @property
    def units(self) -> int:
        """The most units that a row selects from."""
        assert self.sizes is not None
        return self.sizes.units

    def load(self, seqs: Seq[CachedSequence], token_ids: Seq[int], rope_rows: Seq[int]) -> None:
        super().load(seqs, token_ids, rope_rows)
        mine: Seq[SelectiveSequence] = seqs  # type: ignore[assignment]
        for seq in mine:
            self.cache.count_step(seq)
        if self.sizes is None:
            return
        # The tokens' places are those of the other table; a dense layer sees all of them and no selection.
        dense_BI = self.scratch["dense_facts"]
        dense_BI.copy_(self.facts_BI)
        dense_BI[:, Fact.FIRST] = 0
        selecting = [(seq, seq.indexed_units > 0) for seq in mine]
        if self.cache.kept_for_steps() and selecting != self._selecting:
            for row, seq in enumerate(mine):
                for name, kept_LBX in self.kept.items():
                    if name in seq.tensors:
                        kept_LBX[:, row].copy_(seq.tensors[name])
        self._selecting = selecting

    def facts(self, seq: CachedSequence) -> RowFacts:
        cache, config, slots = self.cache, self.cache.config, seq.tensors["k"].shape[2]
        units = cache.context_units(config, seq.tokens - 1)
        whole = RowFacts(tokens=seq.tokens, write_slot=seq.tokens - 1, slots=slots, ring_slots=slots)
        if self.sizes is None or not cache.selects(config, units):
            return whole
        return whole._replace(
            resident_chunks=self.sizes.picks,
            first=units * config.unit_tokens,
            chunks=units * self.sizes.entries,
            chunk_capacity=seq.tensors[cache.index.table].shape[2],
        )

    def attend(self, layer: int, q_BND: Tensor, out_BND: Tensor) -> None:
        from shadowkv.ops.triton.attention import attend

        batch, g, config = q_BND.shape[0], self.cache.geometry, self.cache.config
        rows, selection = self.layer(layer, batch), None
        if self.sizes is not None and layer < config.dense_layers:
            rows = LayerRows(rows.address_BX, self.scratch["dense_facts"][:batch])
        elif self.sizes is not None:
            selection = self._select(layer, rows, q_BND)
        scratch = self.attention_scratch(batch, g.kv_heads, g.heads)
        attend(rows, q_BND, g.kv_heads, config.unit_tokens, selection, out_BND, scratch)

    def _select(self, layer: int, rows: LayerRows, q_BND: Tensor) -> Selection:
        """Units that are always attended, and the best of the others."""
        assert self.sizes is not None
        batch, cache = q_BND.shape[0], self.cache
        units_B11 = (rows.facts_BI[:, Fact.CHUNKS] // self.sizes.entries)[:, None, None]
        ids_C = torch.arange(self.sizes.units, device=q_BND.device)
        always_BKO = cache.step_always(layer, self.kept, self.max_rows)[:batch]
        open_BKC = (ids_C < units_B11).expand(-1, cache.geometry.kv_heads, -1)
        open_BKC = open_BKC.scatter(2, always_BKO.long(), False)
        scores_BKC = cache.step_scores(layer, rows, q_BND, self, open_BKC).masked_fill(~open_BKC, -torch.inf)
        attend_BKP = self.scratch["attend"][:batch]
        always = always_BKO.shape[2]
        attend_BKP[:, :, :always] = always_BKO
        attend_BKP[:, :, always:] = best_units(scores_BKC, cache.config.budget_units, self.scratch["ranks"][:batch])
        count_BK = self.scratch["attend_count"][:batch]
        return Selection(attend_BKP, count_BK, attend_BKP, attend_BKP, count_BK)  # nothing is fetched

    def shares(self, layer: int, rows: LayerRows, q_BND: Tensor, open_BKC: Tensor) -> Tensor:
        """``ops.select.chunk_scores`` of all rows' logits, [B, K, C]; of units that are not open, anything."""
        from shadowkv.ops.triton.score import score_table

        assert self.sizes is not None
        batch, dim = q_BND.shape[0], q_BND.shape[2]
        q_BND = self.cache.ranking_queries(layer, q_BND[:, :, None])[:, :, 0]
        logits, parts, spare_BKGC = (self.scratch[name][:batch] for name in ("logits", "parts", "spare"))
        q_BNW = self.cache.index.table_query(layer, q_BND, {name: t[:, :batch] for name, t in self.kept.items()})
        score_table(rows, q_BNW, logits, parts, dim**-0.5)
        if self.sizes.entries == 1:
            return group_scores(logits, open_BKC, spare_BKGC)
        sum_entries(logits.view(*spare_BKGC.shape, self.sizes.entries), spare_BKGC)
        return group_scores(spare_BKGC, open_BKC, logits[..., : self.sizes.units])

    @property
    def foresees(self) -> bool:
        return self.cache.foresees and self.sizes is not None

    def foresee(self, layer: int, q_BND: Tensor) -> None:
        self.cache.foresee(layer, q_BND[:, :, None])

    def finish(self) -> None:
        """Nothing is left running."""


def sum_entries(logits_BKGCE: Tensor, out_BKGC: Tensor) -> None:
    """The log-sum-exp over a unit's entries. Overwrites the logits: all that is as large as they are is in the plan."""
    top_BKGC = logits_BKGCE.amax(4)
    torch.sum(logits_BKGCE.sub_(top_BKGC[..., None]).exp_(), 4, out=out_BKGC)
    out_BKGC.log_().add_(top_BKGC)


def group_scores(logits_BKGC: Tensor, open_BKC: Tensor, spare_BKGC: Tensor) -> Tensor:
    """``ops.select.chunk_scores`` of one token a row, [B, K, C]. Logits and spare room are overwritten."""
    logits_BKGC.masked_fill_(~open_BKC[:, :, None], -torch.inf)
    logits_BKGC.sub_(logits_BKGC.amax(3, keepdim=True))
    logits_BKGC.sub_(torch.exp(logits_BKGC, out=spare_BKGC).sum(3, keepdim=True).log_())
    return logits_BKGC.amax(2)


def best_units(scores_BKC: Tensor, count: int, ranks_BKC: Tensor) -> Tensor:
    """The ``count`` best units per head, ties to the lower id, in any order: [B, K, P] int64.

    Args:
        scores_BKC: in float32, none of them NaN.
        ranks_BKC: room for what is compared: a score's bits, ordered as the scores are, above the unit's number.
    """
    bits_BKC = (scores_BKC + 0.0).view(torch.int32)  # -0.0 and 0.0 are equal
    bits_BKC ^= bits_BKC >> 31 & 0x7FFFFFFF
    ids_C = torch.arange(scores_BKC.shape[2], device=scores_BKC.device)
    ranks_BKC.copy_(bits_BKC).bitwise_left_shift_(32).sub_(ids_C)
    return torch.topk(ranks_BKC, count, dim=2, sorted=False).indices
