"""InfiniGen: a layer's tokens are ranked while the layer before it is computed, by a part of their coordinates.

Source: arXiv 2406.19707, section 4. Queries and keys of a head are turned by the right singular vectors of its
queries, after which few coordinates carry the products; those with the largest sums of magnitudes are kept. The
query of a layer is foreseen from what enters the layer before it, which changes little from layer to layer.

There the vectors come from a calibration text, keys and values are both fetched, and as many tokens as come within a
margin of the best score; here the vectors come from the prompt's last queries, the exact keys stay on the device,
and the budget is the number of tokens, so that all methods can be compared at the same one; the margin is a setting.
What is foreseen passes through the norm of the layer it is for, which costs nothing and is nearer to the truth.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor

from shadowkv.cache.arena import Arena
from shadowkv.cache.base import Geometry
from shadowkv.cache.index import TableIndex
from shadowkv.cache.layout import Region
from shadowkv.cache.loki import PrincipalKeys
from shadowkv.cache.recorded import Once, RecordedPrompt
from shadowkv.cache.selective import SelectiveCache, SelectiveSequence
from shadowkv.cache.step import DecodeStep
from shadowkv.config import InfiniGenConfig
from shadowkv.ops.attention import group_queries
from shadowkv.ops.rope import Rope


class InfiniGenCache(SelectiveCache[InfiniGenConfig]):
    """Units are single tokens; attention over the chosen ones uses their exact keys and the true query."""

    name = "infinigen"
    foresees: ClassVar[bool] = True
    index: PrincipalKeys

    def __init__(self, geometry: Geometry, config: InfiniGenConfig, rope: Rope, device: Arena, host: Arena) -> None:
        super().__init__(geometry, config, rope, device, host)
        self._foreseen: dict[int, Tensor] = {}

    @classmethod
    def index_of(cls, geometry: Geometry, config: InfiniGenConfig) -> TableIndex:
        return PrincipalKeys(max(round(config.partial_ratio * geometry.head_dim), 1))

    @classmethod
    def regions(
        cls, geometry: Geometry, config: InfiniGenConfig, capacity_tokens: int
    ) -> tuple[list[Region], list[Region]]:
        """With what is learnt from the prompt's queries, which a longer copy of the sequence may need later."""
        device, host = super().regions(geometry, config, capacity_tokens)
        shape = (geometry.layers, geometry.kv_heads, geometry.head_dim)
        skew = Region("skew", "bases", (*shape, geometry.head_dim), torch.float32)
        return [*device, skew, Region("query_weight", "bases", shape, torch.float32)], host

    @property
    def prompt_queries(self) -> int:
        return self.config.skew_queries

    def take_layer(
        self,
        layer: int,
        seq: SelectiveSequence,
        k_pre_SKD: Tensor,
        k_KSD: Tensor,
        v_KSD: Tensor,
        q_NWD: Tensor | None = None,
    ) -> None:
        assert q_NWD is not None, "infinigen needs the prompt's last queries"
        (seq.tensors["skew"][layer],), (seq.tensors["query_weight"][layer],) = self._skew(q_NWD[None])
        super().take_layer(layer, seq, k_pre_SKD, k_KSD, v_KSD)

    def take_prompt(self, seq: SelectiveSequence, prompt: RecordedPrompt) -> None:
        wanted = self.prompt_queries
        skew_LKDD, weight_LKD = prompt.once(("skew", wanted), lambda: self._skew(prompt.last_queries(wanted)))
        seq.tensors["skew"].copy_(skew_LKDD)
        seq.tensors["query_weight"].copy_(weight_LKD)
        super().take_prompt(seq, prompt)

    def _skew(self, q_LNWD: Tensor) -> tuple[Tensor, Tensor]:
        """The right singular vectors of each KV head's queries, and how much of the queries lies along each."""
        q_LKQD = torch.stack([group_queries(q_NWD, self.geometry.kv_heads).float() for q_NWD in q_LNWD])
        skew_LKDD = torch.linalg.eigh(q_LKQD.double().mT @ q_LKQD.double()).eigenvectors.float()
        return skew_LKDD, (q_LKQD @ skew_LKDD).abs().mean(2)

    def begin_selection(self, tensors: dict[str, Tensor], k_KSD: Tensor, once: Once) -> None:
        skew_KDD = tensors["skew"][0]

        def key_weight() -> Tensor:
            pairs = zip(k_KSD, skew_KDD, strict=True)  # by head: bounds the workspace
            return torch.stack([(k_SD.float() @ skew_DD).abs().mean(0) for k_SD, skew_DD in pairs])

        weight_KD = tensors["query_weight"][0] + once(("key weight", self.prompt_queries), key_weight)
        kept_KR = weight_KD.topk(self.index.rank, dim=1).indices
        tensors["principal"][0] = skew_KDD.gather(2, kept_KR[:, None].expand(-1, skew_KDD.shape[1], -1))

    @classmethod
    def kept_for_steps(cls) -> tuple[str, ...]:
        return ("principal",)

    def chosen_units(self, scores_KC: Tensor) -> int:
        if self.config.alpha is None:
            return super().chosen_units(scores_KC)
        near_K = (scores_KC > scores_KC.amax(1, keepdim=True) - self.config.alpha).sum(1)
        return min(math.ceil(near_K.double().mean()), self.config.budget_units)

    @classmethod
    def step_regions(
        cls, geometry: Geometry, config: InfiniGenConfig, max_rows: int, capacity_tokens: int
    ) -> list[Region] | None:
        """How many tokens come within a margin is known to the device alone: a step of fixed sizes cannot have it."""
        return None if config.alpha is not None else super().step_regions(geometry, config, max_rows, capacity_tokens)

    def make_step(self, max_rows: int, capacity_tokens: int) -> DecodeStep | None:
        return None if self.config.alpha is not None else super().make_step(max_rows, capacity_tokens)

    def foresee(self, layer: int, q_BNTD: Tensor) -> None:
        if layer >= self.config.dense_layers:
            self._foreseen[layer] = q_BNTD

    def ranking_queries(self, layer: int, q_BNTD: Tensor) -> Tensor:
        if layer < self.config.dense_layers:
            return q_BNTD  # which no selection asks for
        assert layer in self._foreseen, "the layer was not foreseen"
        return self._foreseen.pop(layer)
