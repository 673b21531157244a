"""How much of the attention a selection of chunks covers, by budget.

Each query of the prompt's last positions chooses for itself, as a step of decoding does. Besides what it chooses it
attends to the outliers and to the recent tokens, which are on the device anyway. Two ways to choose: by *landmarks*,
as ShadowKV does, and the *oracle*, by the attention that the query heads of a KV head really give to each chunk;
no other choice of as many chunks for these heads covers more on average.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shadowkv.ops.attention import group_queries
from shadowkv.ops.chunks import choose_outliers, chunk_means, split_chunks
from shadowkv.ops.select import chunk_scores, top_chunks

LOCAL_TOKENS = 32
"""Tokens before the queries that are recent whatever the chunk size, as ShadowKV's four local chunks of 8."""
BLOCK_NUMBERS = 1 << 25
"""Weights that are held at a time: bounds the workspace whatever the context."""
LOW_QUANTILE = 0.05


class Split(NamedTuple):
    """A way to cut the context, for which mass is measured. Sizes in tokens and in chunks per KV head."""

    chunk_tokens: int
    outliers: int


@dataclass(frozen=True)
class Covered:
    """Mass that is covered, in float32 on the CPU: one number per query head and position, [N * W], of what is attended
    whatever is chosen; and by budget, [N * W, BUDGETS], of that and the choice together."""

    always: Tensor
    mass: Tensor

    @property
    def mean(self) -> list[float]:
        """By budget."""
        return [float(x) for x in self.mass.double().mean(0)]

    @property
    def low(self) -> list[float]:
        """The 5th percentile over heads and positions, by budget."""
        return [float(x) for x in self.mass.double().quantile(LOW_QUANTILE, dim=0)]


def context_chunks(tokens: int, query_tokens: int, chunk_tokens: int) -> int:
    """Complete chunks that all of the last ``query_tokens`` positions may choose from."""
    local = max(LOCAL_TOKENS // chunk_tokens, 1)
    return max((tokens - query_tokens) // chunk_tokens - local, 0)


class _Cut(NamedTuple):
    """One split of the context of one layer. Shapes: landmarks [K, C, D], selectable [K, C]."""

    split: Split
    landmarks_KCD: Tensor
    selectable_KC: Tensor

    @classmethod
    def of(cls, split: Split, k_KSD: Tensor, query_tokens: int) -> "_Cut":
        count = context_chunks(k_KSD.shape[1], query_tokens, split.chunk_tokens)
        assert count > split.outliers, "the context has no chunk to choose"
        k_KCLD = split_chunks(k_KSD, split.chunk_tokens)[:, :count]
        outlier_KO = choose_outliers(k_KCLD, split.outliers, 1)
        selectable_KC = torch.ones(k_KCLD.shape[:2], dtype=torch.bool, device=k_KSD.device)
        return cls(split, chunk_means(k_KCLD), selectable_KC.scatter(1, outlier_KO, False))


def coverage(
    q_NWD: Tensor, k_KSD: Tensor, budgets: Mapping[Split, Sequence[int]], oracle_split: Split
) -> tuple[dict[Split, Covered], Covered]:
    """What landmarks cover under every split, and what the oracle does under one of them.

    Args:
        q_NWD: the last W of S positions' queries after RoPE.
        k_KSD: all keys after RoPE.
        budgets: chunks per KV head, by split.
    """
    kv_heads, (heads, width, dim) = k_KSD.shape[0], q_NWD.shape
    cuts = [_Cut.of(split, k_KSD, width) for split in budgets]
    queries_KGWD = group_queries(q_NWD, kv_heads).reshape(kv_heads, heads // kv_heads, width, dim)
    by_landmarks: dict[Split, list[Covered]] = {split: [] for split in budgets}
    by_oracle: list[Covered] = []
    for head, q_GWD in enumerate(queries_KGWD):
        for positions, weights_WGS in _weights(q_GWD, k_KSD[head]):
            for split, landmarks_KCD, selectable_KC in cuts:
                selectable_C, chunks = selectable_KC[head], selectable_KC.shape[1]
                context = weights_WGS[..., : chunks * split.chunk_tokens]
                mass_WGC = context.reshape(*context.shape[:2], chunks, split.chunk_tokens).sum(-1) * selectable_C
                rest_WG = (1 - mass_WGC.sum(-1)).clamp_min(0)
                logits_GWC = q_GWD[:, positions].float() @ landmarks_KCD[head].float().mT / math.sqrt(dim)
                scores_WC = chunk_scores(logits_GWC.transpose(0, 1)[:, :, None], selectable_C.expand(len(rest_WG), -1))
                by_landmarks[split].append(_covered(mass_WGC, rest_WG, scores_WC, budgets[split]))
                if split == oracle_split:
                    by_oracle.append(_covered(mass_WGC, rest_WG, mass_WGC.sum(1), budgets[split]))
    return {split: _joined(parts) for split, parts in by_landmarks.items()}, _joined(by_oracle)


def _joined(parts: Sequence[Covered]) -> Covered:
    return Covered(torch.cat([part.always for part in parts]), torch.cat([part.mass for part in parts]))


def _weights(q_GWD: Tensor, k_SD: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Attention of one KV head's queries, [W, G, S], some positions at a time."""
    group, width, dim = q_GWD.shape
    total = k_SD.shape[0]
    block = max(BLOCK_NUMBERS // (group * total), 1)
    at_S, wide_SD = torch.arange(total, device=k_SD.device), k_SD.float()
    for first in range(0, width, block):
        part = slice(first, min(first + block, width))
        logits_WGS = (q_GWD[:, part].float() @ wide_SD.mT / math.sqrt(dim)).transpose(0, 1)
        own_W = torch.arange(part.start, part.stop, device=k_SD.device) + (total - width)
        later_WS = at_S > own_W[:, None]
        yield part, logits_WGS.masked_fill(later_WS[:, None], -torch.inf).softmax(-1)


def _covered(mass_WGC: Tensor, rest_WG: Tensor, scores_WC: Tensor, budgets: Sequence[int]) -> Covered:
    """What the best chunks hold, with what is attended anyway."""
    order_WP = top_chunks(scores_WC, min(max(budgets), scores_WC.shape[1]))
    chosen_WGP = mass_WGC.gather(2, order_WP[:, None].expand(-1, mass_WGC.shape[1], -1)).cumsum(-1)
    last = torch.tensor([min(budget, order_WP.shape[1]) - 1 for budget in budgets], device=mass_WGC.device)
    return Covered(rest_WG.flatten().cpu(), (chosen_WGP[..., last] + rest_WG[..., None]).flatten(0, 1).cpu())
