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
    """Scores [K, C]: softmax over the selectable chunks, summed over tokens, maximum over the group.

    Chunks that are not selectable get -inf. Shapes: logits [K, G, T, C] in float32.
    """
    logits = logits_KGTC.masked_fill(~selectable_KC[:, None, None], -torch.inf)
    scores_KC = torch.softmax(logits, dim=-1).sum(dim=2).amax(dim=1)
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
    """M chunks to be brought into slots: parallel lists of KV head, chunk and slot (int64)."""

    head_M: Tensor
    chunk_M: Tensor
    slot_M: Tensor


def update_resident(resident: ResidentSet, chosen_KP: Tensor, step: int, cap: int | None) -> tuple[Fetch, Tensor]:
    """Make the chosen chunks resident, at most ``cap`` new ones per head, best first.

    Slots of chunks that are chosen carry ``step`` in ``last_used`` afterwards; a victim is never one of
    them. There are at least as many slots as chosen chunks.

    Returns: what to fetch, and the number of hits (int64 scalar).
    """
    ids_KP, used_KP, slot_of_KC = resident
    slot_KP = slot_of_KC.gather(1, chosen_KP).long()
    hit_KP = slot_KP >= 0
    head_KP = torch.arange(chosen_KP.shape[0], device=chosen_KP.device)[:, None].expand_as(chosen_KP)
    used_KP[head_KP[hit_KP], slot_KP[hit_KP]] = step
    miss_rank_KP = (~hit_KP).cumsum(1) - 1
    fetched_KP = ~hit_KP if cap is None else ~hit_KP & (miss_rank_KP < cap)
    victims_KP = torch.sort(used_KP, dim=1, stable=True).indices
    head_M, chunk_M = head_KP[fetched_KP], chosen_KP[fetched_KP]
    slot_M = victims_KP[head_M, miss_rank_KP[fetched_KP]]
    evicted_M = ids_KP[head_M, slot_M].long()
    gone_M = evicted_M >= 0
    slot_of_KC[head_M[gone_M], evicted_M[gone_M]] = EMPTY
    slot_of_KC[head_M, chunk_M] = slot_M.int()
    ids_KP[head_M, slot_M] = chunk_M.int()
    used_KP[head_M, slot_M] = step
    return Fetch(head_M, chunk_M, slot_M), hit_KP.sum()
