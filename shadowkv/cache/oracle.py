"""The ceiling of a budget: units are ranked by the attention that they would really get."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shadowkv.cache.base import Geometry
from shadowkv.cache.index import TableIndex
from shadowkv.cache.layout import Region
from shadowkv.cache.selective import SelectiveCache
from shadowkv.config import OracleConfig
from shadowkv.ops.attention import group_queries


class ExactScores:
    """Nothing beside the keys; a unit's logit is the log-sum-exp of its tokens' logits."""

    table = "k"

    def __init__(self, unit_tokens: int) -> None:
        self.unit_tokens = unit_tokens

    def regions(self, geometry: Geometry, chunks: int) -> list[Region]:
        return []

    def write(self, layer: int, tensors: dict[str, Tensor], first_chunk: int, k_KCLD: Tensor) -> None:
        """The keys are there."""

    def logits(self, layer: int, tensors: dict[str, Tensor], chunks: int, q_NTD: Tensor) -> Tensor:
        k_KSD = tensors["k"][layer, :, : chunks * self.unit_tokens]
        kv_heads, _, dim = k_KSD.shape
        heads, tokens, _ = q_NTD.shape
        by_head: list[Tensor] = []
        for q_QD, k_SD in zip(group_queries(q_NTD, kv_heads), k_KSD, strict=True):  # bounds the workspace
            logits_QS = q_QD.float() @ k_SD.float().mT / math.sqrt(dim)
            by_head.append(torch.logsumexp(logits_QS.reshape(-1, chunks, self.unit_tokens), dim=-1))
        return torch.stack(by_head).reshape(kv_heads, heads // kv_heads, tokens, chunks)

    def table_query(self, layer: int, q_BND: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        return q_BND


class OracleCache(SelectiveCache[OracleConfig]):
    """A bound and no method: it reads every key in every step."""

    name = "oracle"

    @classmethod
    def index_of(cls, geometry: Geometry, config: OracleConfig) -> TableIndex:
        return ExactScores(config.chunk_tokens)

    @classmethod
    def entries_per_unit(cls, config: OracleConfig) -> int:
        return config.chunk_tokens
