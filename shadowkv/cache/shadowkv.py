"""ShadowKV: low-rank keys and a small exact region on the device, values on the host.

Source: arXiv 2410.21465. A sequence starts *exact*: while all of it fits in the exact region, it is
attended densely there. When it no longer fits it is *compressed*, once, from the exact keys. From then
on the exact region holds [outliers | resident chunks | recent window], and the *context* (all complete
chunks older than the window) is kept as coefficients, index and values, from which a step brings a few
chunks back into the resident slots.

The recent window is a ring: the token at position p sits in slot p mod W. Whole chunks leave it for the
context, so generated tokens and later turns stay selectable and the device does not fill up with them.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shadowkv.cache.arena import Arena
from shadowkv.cache.base import Cache, CachedSequence, CacheStats, Geometry, Price, require_finite
from shadowkv.cache.index import BatchIndex, make_index
from shadowkv.cache.layout import Region, copy_by_head
from shadowkv.cache.pool import Reservation
from shadowkv.cache.recorded import RecordedPrompt
from shadowkv.cache.shadowkv_layout import ExactRegion, ranks, sequence_price, sequence_regions
from shadowkv.cache.shadowkv_stats import sequence_stats
from shadowkv.cache.shadowkv_step import Leaving, ShadowStep, join_by_kernels, step_regions
from shadowkv.cache.step import DecodeStep
from shadowkv.config import ShadowKVConfig
from shadowkv.errors import CapacityError, ConfigError, NumericsError
from shadowkv.ops.chunks import choose_outliers, split_chunks
from shadowkv.ops.lowrank import Subspace, find_subspace, project, rebuild
from shadowkv.ops.rope import Rope
from shadowkv.ops.select import EMPTY, OUTLIER, Fetch, ResidentSet, chunk_scores, top_chunks, update_resident
from shadowkv.ops.views import DenseView, SlotView, View


@dataclass(eq=False)
class ShadowSequence(CachedSequence):
    """``step`` counts extensions, for the LRU stamps; ``context_chunks`` is 0 while it is exact.

    ``usual_row`` is the RoPE row of the prompt, which positions not written yet hold as well. ``late`` holds, by
    layer, what the last step has chosen to fetch after its attention: it is brought in before the next one.
    """

    compressed: bool = False
    compressed_at_step: int = 0
    context_chunks: int = 0
    outliers: int = 0
    step: int = 0
    usual_row: int = 0
    energy: list[Tensor] = field(default_factory=list)
    late: dict[int, Fetch] = field(default_factory=dict)


class ShadowKVCache(Cache[ShadowKVConfig, ShadowSequence]):
    """The method behind the cache contract, in plain PyTorch operations, one sequence after the other.

    ``kernels`` is set once a step by kernels has been made (``cache.shadowkv_step``).
    """

    name = "shadowkv"

    def __init__(self, geometry: Geometry, config: ShadowKVConfig, rope: Rope, device: Arena, host: Arena) -> None:
        super().__init__(geometry, config, rope, device, host)
        self.exact = ExactRegion.of(config)
        self.index: BatchIndex = make_index(config.index)
        self.ranks = ranks(geometry, config)
        self._index_names = [region.name for region in self.index.regions(geometry, 1)]
        self.kernels = False
        self.ranks_L = torch.tensor(self.ranks, dtype=torch.int32, device=device.device)

    @classmethod
    def check(cls, geometry: Geometry, config: ShadowKVConfig) -> None:
        if isinstance(config.rank, tuple) and len(config.rank) != geometry.layers:
            raise ConfigError(
                f"rank has {len(config.rank)} entries and the model has {geometry.layers} layers; "
                "give one integer, or one per layer"
            )

    @classmethod
    def regions(
        cls, geometry: Geometry, config: ShadowKVConfig, capacity_tokens: int
    ) -> tuple[list[Region], list[Region]]:
        return sequence_regions(geometry, config, capacity_tokens)

    @classmethod
    def price(cls, geometry: Geometry, config: ShadowKVConfig, capacity_tokens: int) -> Price:
        return sequence_price(geometry, config, capacity_tokens)

    @property
    def append_tokens(self) -> int:
        # After a flush the window keeps local_chunks and at most one incomplete chunk.
        room = self.exact.window - (self.config.local_chunks + 1) * self.config.chunk_tokens + 1
        return min(room, self.config.query_block_tokens)

    def _new_sequence(
        self, reservation: Reservation, owns_memory: bool, price: Price, tensors: dict[str, Tensor]
    ) -> ShadowSequence:
        for name, start in (("resident_ids", EMPTY), ("last_used", EMPTY), ("slot_of_chunk", EMPTY), ("counters", 0)):
            if name in tensors:
                tensors[name].fill_(start)
        return ShadowSequence(reservation, owns_memory, price, tensors)

    def _copy_lengths(self, source: ShadowSequence, target: ShadowSequence) -> None:
        target.tokens, target.step = source.tokens, source.step
        target.compressed, target.compressed_at_step = source.compressed, source.compressed_at_step
        target.context_chunks, target.outliers = source.context_chunks, source.outliers
        target.usual_row = source.usual_row
        target.tensors["rope_rows"][source.tokens :] = source.usual_row
        target.energy, target.late = list(source.energy), dict(source.late)

    def can_fork(self, seq: ShadowSequence, capacity_tokens: int) -> bool:
        return not seq.compressed or self.exact.compressible(capacity_tokens)

    def fork(self, seq: ShadowSequence, capacity: int | Reservation) -> ShadowSequence:
        tokens = capacity if isinstance(capacity, int) else capacity.capacity_tokens
        if not self.can_fork(seq, tokens):
            raise CapacityError(f"the sequence is compressed, and one for {tokens} tokens is kept whole; ask for more")
        copy = super().fork(seq, capacity)
        if not seq.compressed and seq.tokens > self.exact.dense_limit(copy.capacity_tokens):
            self._compress(copy, seq.tensors)  # a sequence kept whole, in a copy that is too long for that
        return copy

    # Prompt.

    def begin_prompt(self, seq: ShadowSequence, tokens: int) -> None:
        self._check_prompt(seq, tokens)
        seq.tokens = tokens
        seq.usual_row = self.rope.row(tokens)
        seq.tensors["rope_rows"].fill_(seq.usual_row)
        if tokens > self.exact.dense_limit(seq.capacity_tokens):
            self._set_context(seq)

    def take_layer(
        self,
        layer: int,
        seq: ShadowSequence,
        k_pre_SKD: Tensor,
        k_KSD: Tensor,
        v_KSD: Tensor,
        q_NWD: Tensor | None = None,
    ) -> None:
        require_finite(layer, k_KSD)
        if seq.compressed:
            self._compress_layer(layer, seq, k_pre_SKD, k_KSD, v_KSD)
        else:
            seq.tensors["exact_k"][layer, :, : seq.tokens] = k_KSD
            seq.tensors["exact_v"][layer, :, : seq.tokens] = v_KSD

    def take_prompt(self, seq: ShadowSequence, prompt: RecordedPrompt) -> None:
        """The decomposition is the same for all settings of the rank, so it is found once for a prompt."""
        if prompt.tokens <= self.exact.dense_limit(seq.capacity_tokens):
            super().take_prompt(seq, prompt)
            return
        self.begin_prompt(seq, prompt.tokens)
        context, centre = seq.context_chunks * self.config.chunk_tokens, self.config.centre_keys
        subspaces = prompt.once(("subspaces", centre, self.ranks), lambda: self._subspaces(prompt))
        for layer, subspace in enumerate(subspaces):
            self._keep_subspace(layer, seq, subspace)
            self._join_coefficients(layer, seq, 0, prompt.k_pre_LSKD[layer, :context])
        # The rest is the same for every KV head of every layer.
        names = ("exact_k", "exact_v", "values", "slot_of_chunk", *self._index_names)
        tensors = {name: seq.tensors[name].flatten(0, 1)[None] for name in names}
        self._keep_exact(0, seq, tensors, prompt.k_LKSD.flatten(0, 1), prompt.v_LKSD.flatten(0, 1))

    def _subspaces(self, prompt: RecordedPrompt) -> list[Subspace]:
        found = zip(prompt.spectra(centre=self.config.centre_keys), self.ranks, strict=True)
        return [spectrum.subspace(rank, self.geometry.kv_heads) for spectrum, rank in found]

    # New tokens.

    def extend(self, seqs: Seq[ShadowSequence], tokens: int, rope_lengths: Seq[int] | None = None) -> None:
        self._check_room(seqs, tokens)
        for seq in seqs:
            for layer, fetch in seq.late.items():
                self._fetch(layer, seq, fetch)
            seq.late.clear()
        self._make_room(seqs, tokens)
        for i, seq in enumerate(seqs):
            length = rope_lengths[i] if rope_lengths is not None else seq.tokens + tokens
            row = self.rope.row(length)
            if row != seq.usual_row:  # most models have one row, and a step none to write
                seq.tensors["rope_rows"][seq.tokens : seq.tokens + tokens] = row
            seq.tokens += tokens
            seq.step += 1

    def append(self, layer: int, seqs: Seq[ShadowSequence], k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        for seq, k_KTD, v_KTD in zip(seqs, k_BKTD, v_BKTD, strict=True):
            positions = self._positions(seq.tokens - k_KTD.shape[1], seq.tokens)
            slots = self.exact.window_slots(positions) if seq.compressed else positions
            seq.tensors["exact_k"][layer][:, slots] = k_KTD
            seq.tensors["exact_v"][layer][:, slots] = v_KTD

    def view(self, layer: int, seqs: Seq[ShadowSequence], q_BNTD: Tensor) -> list[View]:
        return [self._view_one(layer, seq, q_NTD) for seq, q_NTD in zip(seqs, q_BNTD, strict=True)]

    def _view_one(self, layer: int, seq: ShadowSequence, q_NTD: Tensor) -> View:
        k_KED, v_KED = seq.tensors["exact_k"][layer], seq.tensors["exact_v"][layer]
        if not seq.compressed:
            return DenseView(k_KED[:, : seq.tokens], v_KED[:, : seq.tokens])
        attended_KP = self._select(layer, seq, q_NTD)
        kv_heads, tokens = k_KED.shape[0], q_NTD.shape[1]
        allowed_KTE = torch.zeros(kv_heads, tokens, k_KED.shape[1], dtype=torch.bool, device=k_KED.device)
        size = self.config.chunk_tokens
        allowed_KTE[:, :, : seq.outliers * size] = True
        allowed_KTE[:, :, self._resident(seq)] = attended_KP.repeat_interleave(size, dim=1)[:, None]
        held_W = self.exact.window_positions(seq.tokens, k_KED.device)
        queries_T = self._positions(seq.tokens - tokens, seq.tokens)
        seen_TW = (held_W >= seq.context_chunks * size) & (held_W <= queries_T[:, None])
        allowed_KTE[:, :, self.exact.recent] = seen_TW
        return SlotView(k_KED, v_KED, allowed_KTE)

    def _select(self, layer: int, seq: ShadowSequence, q_NTD: Tensor) -> Tensor:
        """Bring the chunks that these queries want into slots: [K, P] bool, the slots to attend to."""
        config, tensors = self.config, seq.tensors
        chunks = seq.context_chunks
        resident = ResidentSet(
            tensors["resident_ids"][layer], tensors["last_used"][layer], tensors["slot_of_chunk"][layer]
        )
        if not config.reuse:
            resident.clear()
        selectable_KC = resident.slot_of_chunk_KC[:, :chunks] != OUTLIER
        logits_KGTC = self.index.logits(layer, tensors, chunks, q_NTD)
        scores_KC = chunk_scores(logits_KGTC, selectable_KC)
        count, cap, late_cap = self.selection_size(seq)
        chosen_KP = top_chunks(scores_KC, count)
        held_KP = resident.resident_ids_KP >= 0
        now, late, hits = update_resident(resident, chosen_KP, seq.step, cap, late_cap)
        self._fetch(layer, seq, now)
        if late.head_M.numel():
            seq.late[layer] = late
        fetched = hits.new_tensor(now.head_M.numel() + late.head_M.numel())
        tensors["counters"][layer] += torch.stack([hits, chosen_KP.numel() - hits, fetched])
        # A slot whose chunk comes late still holds the one before it, whose keys and values are as true.
        attended_KP = held_KP if config.attend == "resident" else resident.last_used_KP == seq.step
        attended_KP[now.head_M, now.slot_M] = True
        return attended_KP

    def selection_size(self, seq: ShadowSequence) -> tuple[int, int | None, int]:
        """Chunks per KV head that the next selection chooses, and how many of the missing it may fetch at once
        (None: all) and late. The first one fills the resident set, so that a cap has something to refresh."""
        config = self.config
        first = seq.step == seq.compressed_at_step + 1
        wanted = config.resident_chunks if first and config.attend == "resident" else config.budget_chunks
        cap, late = (None, 0) if first else (config.fetch_cap_chunks, config.late_fetch_chunks)
        return min(wanted, seq.context_chunks - seq.outliers), cap, late

    def _resident(self, seq: ShadowSequence) -> slice:
        """The slots of resident chunks: right behind the outliers that there are."""
        start = seq.outliers * self.config.chunk_tokens
        return slice(start, start + self.exact.resident_size)

    def _fetch(self, layer: int, seq: ShadowSequence, fetch: Fetch) -> None:
        """Rebuild the keys of M chunks and fetch their values, into their resident slots."""
        head_M, chunk_M, slot_M = fetch
        if not head_M.numel():
            return
        tensors, size = seq.tensors, self.config.chunk_tokens
        offsets_L = torch.arange(size, device=head_M.device)
        positions_ML = chunk_M[:, None] * size + offsets_L
        k_MLD = rebuild(
            tensors[f"coeff.{layer}"][chunk_M],
            tensors[f"basis.{layer}"][head_M],
            tensors[f"mean.{layer}"][head_M],
        )
        k_MLD = self.rope.rotate(k_MLD, positions_ML, tensors["rope_rows"][positions_ML])
        values_KCLD = tensors["values"][layer]
        at_store = values_KCLD.device
        v_MLD = values_KCLD[head_M.to(at_store), chunk_M.to(at_store)].to(k_MLD.device)
        slots_ML = self._resident(seq).start + slot_M[:, None] * size + offsets_L
        tensors["exact_k"][layer][head_M[:, None], slots_ML] = k_MLD.to(self.geometry.dtype)
        tensors["exact_v"][layer][head_M[:, None], slots_ML] = v_MLD

    # Compression, and chunks that leave the window.

    def _make_room(self, seqs: Seq[ShadowSequence], tokens: int) -> None:
        """So that ``tokens`` more fit into each exact region."""
        size, leaving = self.config.chunk_tokens, list[Leaving]()
        for seq in seqs:
            if not seq.compressed:
                if seq.tokens + tokens <= self.exact.dense_limit(seq.capacity_tokens):
                    continue
                self._compress(seq, seq.tensors)
            first = seq.context_chunks
            if seq.tokens - first * size + tokens > self.exact.window:
                seq.context_chunks = seq.tokens // size - self.config.local_chunks
                leaving.append(Leaving(seq, first, seq.context_chunks - first))
        if leaving and self.kernels:
            join_by_kernels(self, leaving)
            return
        for seq, first, count in leaving:
            self._leave_window(seq, first, count)

    def _leave_window(self, seq: ShadowSequence, first_chunk: int, count: int) -> None:
        size = self.config.chunk_tokens
        positions = self._positions(first_chunk * size, (first_chunk + count) * size)
        slots = self.exact.window_slots(positions)
        rows = seq.tensors["rope_rows"][positions]
        for layer in range(self.geometry.layers):
            k_KSD = seq.tensors["exact_k"][layer][:, slots]
            v_KSD = seq.tensors["exact_v"][layer][:, slots]
            k_pre_SKD = self.rope.unrotate(k_KSD, positions, rows).transpose(0, 1)
            self._join_context(layer, seq, first_chunk, k_pre_SKD, k_KSD, v_KSD)

    def _compress(self, seq: ShadowSequence, exact: dict[str, Tensor]) -> None:
        """Turn an exact sequence into a compressed one, from the exact keys and values of these tensors."""
        self._set_context(seq)
        positions = self._positions(0, seq.tokens)
        rows = seq.tensors["rope_rows"][positions]
        for layer in range(self.geometry.layers):
            k_KSD = exact["exact_k"][layer, :, : seq.tokens].clone()
            v_KSD = exact["exact_v"][layer, :, : seq.tokens].clone()
            k_pre_SKD = self.rope.unrotate(k_KSD, positions, rows).transpose(0, 1)
            self._compress_layer(layer, seq, k_pre_SKD, k_KSD, v_KSD)

    def _set_context(self, seq: ShadowSequence) -> None:
        seq.compressed, seq.compressed_at_step = True, seq.step
        seq.context_chunks = max(seq.tokens // self.config.chunk_tokens - self.config.local_chunks, 0)
        seq.outliers = min(self.config.outlier_chunks, seq.context_chunks)

    def _compress_layer(self, layer: int, seq: ShadowSequence, k_pre_SKD: Tensor, k_KSD: Tensor, v_KSD: Tensor) -> None:
        try:
            subspace = find_subspace(k_pre_SKD, self.ranks[layer], centre=self.config.centre_keys)
        except NumericsError as error:
            raise NumericsError(f"layer {layer}: {error}, or too large to be squared") from error
        self._keep_subspace(layer, seq, subspace)
        self._join_coefficients(layer, seq, 0, k_pre_SKD[: seq.context_chunks * self.config.chunk_tokens])
        self._keep_exact(layer, seq, seq.tensors, k_KSD, v_KSD)

    def _keep_subspace(self, layer: int, seq: ShadowSequence, subspace: Subspace) -> None:
        seq.tensors[f"basis.{layer}"].copy_(subspace.basis_KDR)
        seq.tensors[f"mean.{layer}"].copy_(subspace.mean_KD)
        seq.energy.append(subspace.energy)

    def _keep_exact(
        self, layer: int, seq: ShadowSequence, tensors: dict[str, Tensor], k_KSD: Tensor, v_KSD: Tensor
    ) -> None:
        """The index and the values of a prompt's context, its outliers, and what stays in the window."""
        context = seq.context_chunks * self.config.chunk_tokens
        self._join_index(layer, tensors, 0, k_KSD[:, :context], v_KSD[:, :context])
        self._keep_outliers(layer, seq, tensors, k_KSD[:, :context], v_KSD[:, :context])
        slots = self.exact.window_slots(self._positions(context, seq.tokens))
        tensors["exact_k"][layer][:, slots] = k_KSD[:, context:]
        tensors["exact_v"][layer][:, slots] = v_KSD[:, context:]

    def _keep_outliers(
        self, layer: int, seq: ShadowSequence, tensors: dict[str, Tensor], k_KSD: Tensor, v_KSD: Tensor
    ) -> None:
        if not seq.outliers:
            return
        size = self.config.chunk_tokens
        k_KCLD, v_KCLD = split_chunks(k_KSD, size), split_chunks(v_KSD, size)
        ids_KO = choose_outliers(k_KCLD, seq.outliers, self.config.sink_chunks)
        heads_K1 = torch.arange(ids_KO.shape[0], device=ids_KO.device)[:, None]
        kept = slice(seq.outliers * size)
        tensors["exact_k"][layer, :, kept] = k_KCLD[heads_K1, ids_KO].flatten(1, 2)
        tensors["exact_v"][layer, :, kept] = v_KCLD[heads_K1, ids_KO].flatten(1, 2)
        tensors["slot_of_chunk"][layer].scatter_(1, ids_KO, OUTLIER)

    def _join_context(
        self, layer: int, seq: ShadowSequence, first_chunk: int, k_pre_SKD: Tensor, k_KSD: Tensor, v_KSD: Tensor
    ) -> None:
        """Coefficients, index and values of whole chunks that are from now on selected, not attended."""
        self._join_coefficients(layer, seq, first_chunk, k_pre_SKD)
        self._join_index(layer, seq.tensors, first_chunk, k_KSD, v_KSD)

    def _join_coefficients(self, layer: int, seq: ShadowSequence, first_chunk: int, k_pre_SKD: Tensor) -> None:
        tensors, size = seq.tensors, self.config.chunk_tokens
        coeff_SR = project(k_pre_SKD, tensors[f"basis.{layer}"], tensors[f"mean.{layer}"])
        coeff_CLR = coeff_SR.reshape(-1, size, coeff_SR.shape[1])
        tensors[f"coeff.{layer}"][first_chunk : first_chunk + coeff_CLR.shape[0]] = coeff_CLR

    def _join_index(
        self, layer: int, tensors: dict[str, Tensor], first_chunk: int, k_KSD: Tensor, v_KSD: Tensor
    ) -> None:
        size = self.config.chunk_tokens
        k_KCLD, v_KCLD = split_chunks(k_KSD, size), split_chunks(v_KSD, size)
        self.index.write(layer, tensors, first_chunk, k_KCLD)
        copy_by_head(v_KCLD, tensors["values"][layer, :, first_chunk : first_chunk + v_KCLD.shape[1]])

    def _positions(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=self.device_arena.device)

    @classmethod
    def step_regions(
        cls, geometry: Geometry, config: ShadowKVConfig, max_rows: int, capacity_tokens: int
    ) -> list[Region] | None:
        return step_regions(geometry, config, max_rows, capacity_tokens)

    def make_step(self, max_rows: int, capacity_tokens: int) -> DecodeStep | None:
        if self.step_regions(self.geometry, self.config, max_rows, capacity_tokens) is None:
            return None
        self.kernels = True
        return ShadowStep(self, max_rows, capacity_tokens)

    def stats(self, seq: ShadowSequence) -> CacheStats:
        return sequence_stats(self, seq)
