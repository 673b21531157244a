"""From scores to chunks, and from chunks to slots: the selection and the resident set.

A resident set of P slots per KV head is replaced least recently used first. When P equals the number of
selected chunks, that is exactly "keep the last step's selection" (arXiv 2410.21465, section 4).
"""

from typing import NamedTuple

import torch
from torch import Tensor

EMPTY = -1
"""In ``resident_ids``: a free slot. In ``slot_of_chunk``: a chunk that is not resident."""
OUTLIER = -2
"""In ``slot_of_chunk``: an outlier chunk, which is always attended and never selected."""


def chunk_scores(logits_KGTC: Tensor, selectable_KC: Tensor) -> Tensor:
    """Log-scores [K, C]: softmax over the selectable chunks, summed over tokens, maximum over the group.

    In the log domain, where small scores keep their order instead of becoming 0 together. Chunks that are not
    selectable get -inf. Shapes: logits [K, G, T, C] in float32.
    """
    logits = logits_KGTC.masked_fill(~selectable_KC[:, None, None], -torch.inf)
    scores_KC = torch.log_softmax(logits, dim=-1).logsumexp(dim=2).amax(dim=1)
    return scores_KC.masked_fill(~selectable_KC, -torch.inf)


def top_chunks(scores_KC: Tensor, count: int) -> Tensor:
    """The ``count`` best chunks per head, best first, ties to the lower id: [K, P] int64."""
    return torch.sort(scores_KC, dim=1, descending=True, stable=True).indices[:, :count]


class ResidentSet(NamedTuple):
    """Which chunk is in which slot, for one layer of one sequence. Updated in place.

    Shapes: resident_ids, last_used [K, P]; slot_of_chunk [K, C]; all int32.
    """

    resident_ids_KP: Tensor
    last_used_KP: Tensor
    slot_of_chunk_KC: Tensor

    def clear(self) -> None:
        self.resident_ids_KP.fill_(EMPTY)
        self.last_used_KP.fill_(EMPTY)
        self.slot_of_chunk_KC.clamp_max_(EMPTY)


class Fetch(NamedTuple):
    """M chunks to be brought into slots: parallel lists of KV head, chunk and slot (int64), ascending."""

    head_M: Tensor
    chunk_M: Tensor
    slot_M: Tensor


def update_resident(
    resident: ResidentSet, chosen_KP: Tensor, step: int, cap: int | None, late_cap: int = 0
) -> tuple[Fetch, Fetch, Tensor]:
    """Make the chosen chunks (best first) resident: per head at most ``cap`` new ones now and ``late_cap`` later.

    Slots of chunks that are chosen carry ``step`` in ``last_used`` afterwards; a victim is never one of them.
    The victims are the least recently used slots, of equals the lower. Who goes where needs no order among
    equals in rank: those fetched now come first, then the late ones, each by chunk id, and take the victims
    by slot. There are at least as many slots as chosen chunks.

    Returns: what to fetch now, what to fetch late, and the number of hits (int64 scalar).
    """
    ids_KP, used_KP, slot_of_KC = resident
    kv_heads, slots = ids_KP.shape
    slot_KP = slot_of_KC.gather(1, chosen_KP).long()
    hit_KP = slot_KP >= 0
    head_KP = torch.arange(kv_heads, device=chosen_KP.device)[:, None].expand_as(chosen_KP)
    used_KP[head_KP[hit_KP], slot_KP[hit_KP]] = step
    rank_KP = (~hit_KP).cumsum(1)
    cap = chosen_KP.shape[1] if cap is None else cap
    now_KP = ~hit_KP & (rank_KP <= cap)
    late_KP = ~hit_KP & ~now_KP & (rank_KP <= cap + late_cap)
    # Of each head: the chunks fetched now by id, then the late ones by id, then the rest.
    key_KP = torch.where(now_KP, 0, torch.where(late_KP, 1, 2)) * slot_of_KC.shape[1] + chosen_KP
    chunk_KP = chosen_KP.gather(1, key_KP.argsort(1))
    place_P = torch.arange(slots, device=chosen_KP.device)
    now_K1, fetched_K1 = now_KP.sum(1, keepdim=True), (now_KP | late_KP).sum(1, keepdim=True)
    oldest_KP = torch.sort(used_KP, dim=1, stable=True).indices
    victims_KP = torch.where(place_P < fetched_K1, oldest_KP, slots).sort(1).values

    def bring(first_K1: Tensor, stop_K1: Tensor) -> Fetch:
        head_M, place_M = ((place_P >= first_K1) & (place_P < stop_K1)).nonzero(as_tuple=True)
        chunk_M, slot_M = chunk_KP[head_M, place_M], victims_KP[head_M, place_M]
        evicted_M = ids_KP[head_M, slot_M].long()
        gone_M = evicted_M >= 0
        slot_of_KC[head_M[gone_M], evicted_M[gone_M]] = EMPTY
        slot_of_KC[head_M, chunk_M] = slot_M.int()
        ids_KP[head_M, slot_M] = chunk_M.int()
        used_KP[head_M, slot_M] = step
        return Fetch(head_M, chunk_M, slot_M)

    now = bring(torch.zeros_like(now_K1), now_K1)
    return now, bring(now_K1, fetched_K1), hit_KP.sum()
