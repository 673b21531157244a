"""The ceiling of a budget: units are ranked by the attention that they would really get."""

import math

import torch
from torch import Tensor

from shadowkv.cache.base import Geometry
from shadowkv.cache.index import Index
from shadowkv.cache.layout import Region
from shadowkv.cache.selective import SelectiveCache
from shadowkv.config import OracleConfig
from shadowkv.ops.attention import group_queries


class ExactScores:
    """Nothing beside the keys; a unit's logit is the log-sum-exp of its tokens' logits."""

    def __init__(self, unit_tokens: int) -> None:
        self.unit_tokens = unit_tokens

    def regions(self, geometry: Geometry, chunks: int) -> list[Region]:
        return []

    def write(self, layer: int, tensors: dict[str, Tensor], first_chunk: int, k_KCLD: Tensor) -> None:
        """The keys are there."""

    def logits(self, layer: int, tensors: dict[str, Tensor], chunks: int, q_NTD: Tensor) -> Tensor:
        k_KSD = tensors["k"][layer, :, : chunks * self.unit_tokens].float()
        kv_heads, _, dim = k_KSD.shape
        heads, tokens, _ = q_NTD.shape
        logits_KQS = group_queries(q_NTD, kv_heads).float() @ k_KSD.mT / math.sqrt(dim)
        logits = logits_KQS.reshape(kv_heads, heads // kv_heads, tokens, chunks, self.unit_tokens)
        return torch.logsumexp(logits, dim=-1)


class OracleCache(SelectiveCache[OracleConfig]):
    """A bound and no method: it reads every key in every step."""

    name = "oracle"

    @classmethod
    def index_of(cls, geometry: Geometry, config: OracleConfig) -> Index:
        return ExactScores(config.chunk_tokens)
