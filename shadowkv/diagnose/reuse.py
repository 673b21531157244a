"""How often a step finds its chunks resident: decoded by ShadowKV's own cache, and replayed for other resident sets.

The cache keeps exactly its last selection when its resident set is as large as the budget, so the resident ids after
a step are what the step chose. Larger sets are replayed over these selections with the cache's own replacement.
Source of the question: arXiv 2410.21465, section 3.2 and figure 4.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.cache.shadowkv import ShadowSequence
from shadowkv.engine.runner import Runner
from shadowkv.ops.select import EMPTY, ResidentSet, update_resident

Steps = Callable[[int, int], None]


@dataclass(frozen=True)
class Reuse:
    """Hits over selected chunks by step and layer, all KV heads together.

    The first step fills an empty set, so that rates begin with the second: ``rates`` has, by the size of the resident
    set in budgets, [STEPS - 1, LAYERS] in float64. ``counted`` are the rates by layer that the cache itself counted
    for a set of one budget, the empty first step included.
    """

    budget_chunks: int
    rates: dict[int, Tensor]
    counted: list[float]

    def mean(self, multiple: int) -> float:
        """Over steps and layers."""
        return float(self.rates[multiple].mean())


@torch.inference_mode()
def decode_selections(runner: Runner, seq: ShadowSequence, token_ids: Sequence[int], progress: Steps) -> list[Tensor]:
    """Feed these tokens, one a step: the chunks that each step chose, [LAYERS, K, P] (int64).

    The sequence's resident set has to be as large as its budget.
    """
    chosen: list[Tensor] = []
    for done, token in enumerate(token_ids, start=1):
        runner.decode([seq], [token])
        assert seq.compressed, "a sequence that is attended exactly selects nothing"
        chosen.append(seq.tensors["resident_ids"].long().cpu())
        progress(done, len(token_ids))
    return chosen


def replay(chosen: Sequence[Tensor], slots: int, chunks: int) -> Tensor:
    """Hit rates by step and layer, [STEPS, LAYERS], of a resident set with so many slots per KV head.

    Args:
        chosen: by step, chunk ids [LAYERS, K, P]; ``EMPTY`` where a head chose fewer.
        chunks: one more than the largest id.
    """
    layers, kv_heads = chosen[0].shape[:2]
    rates = torch.zeros(len(chosen), layers, dtype=torch.float64)
    for layer in range(layers):
        resident = ResidentSet(
            torch.full((kv_heads, slots), EMPTY, dtype=torch.int32),
            torch.full((kv_heads, slots), EMPTY, dtype=torch.int32),
            torch.full((kv_heads, chunks), EMPTY, dtype=torch.int32),
        )
        for step, ids_LKP in enumerate(chosen):
            ids_KP = ids_LKP[layer]
            # Every head chooses as many, and the free slots of a set that is not full come last.
            ids_KP = ids_KP[ids_KP >= 0].reshape(kv_heads, -1)
            _, _, hits = update_resident(resident, ids_KP, step, None)
            rates[step, layer] = float(hits) / max(ids_KP.numel(), 1)
    return rates


def reuse_of(chosen: Sequence[Tensor], counted: Sequence[float], multiples: Sequence[int]) -> Reuse:
    """The rates for resident sets of several budgets, from the selections of one run."""
    budget = chosen[0].shape[2]
    chunks = int(torch.stack(list(chosen)).max()) + 1
    return Reuse(budget, {m: replay(chosen, m * budget, chunks)[1:] for m in multiples}, list(counted))
