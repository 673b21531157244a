"""Loki: tokens ranked by the first principal directions of the post-RoPE keys, per KV head.

Source: arXiv 2406.02542. There the directions come from a calibration text and the keys are stored in
their basis; here they come from the sequence's own keys when selection begins (the prompt, as a rule), and
the first coordinates are kept beside the exact keys, so that a full budget equals full attention bit by bit.
"""

import math

import torch
from torch import Tensor

from shadowkv.cache.base import Geometry
from shadowkv.cache.index import Index
from shadowkv.cache.layout import Region
from shadowkv.cache.selective import SelectiveCache, SelectiveSequence
from shadowkv.config import LokiConfig
from shadowkv.ops.attention import group_queries
from shadowkv.ops.lowrank import find_subspace

PAPER_SHARE = 4
"""The paper ranks by a quarter of the head width (d_f = 0.25)."""


class PrincipalKeys:
    """The first ``rank`` coordinates of each key in the basis of its head's principal directions."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def regions(self, geometry: Geometry, chunks: int) -> list[Region]:
        layers, heads, dim = geometry.layers, geometry.kv_heads, geometry.head_dim
        return [
            Region("principal", "bases", (layers, heads, dim, self.rank), torch.float32),
            Region("principal_keys", "principal keys", (layers, heads, chunks, self.rank), geometry.dtype),
        ]

    def learn(self, layer: int, tensors: dict[str, Tensor], k_KSD: Tensor) -> None:
        """The principal directions of these keys, about their mean."""
        for basis_DR, k_SD in zip(tensors["principal"][layer], k_KSD, strict=True):
            basis_DR.copy_(find_subspace(k_SD[:, None], self.rank, centre=True).basis_KDR[0])

    def write(self, layer: int, tensors: dict[str, Tensor], first_chunk: int, k_KCLD: Tensor) -> None:
        """Chunks are of one token."""
        new = slice(first_chunk, first_chunk + k_KCLD.shape[1])
        tensors["principal_keys"][layer, :, new] = (k_KCLD[:, :, 0].float() @ tensors["principal"][layer]).to(
            k_KCLD.dtype
        )

    def logits(self, layer: int, tensors: dict[str, Tensor], chunks: int, q_NTD: Tensor) -> Tensor:
        keys_KCR = tensors["principal_keys"][layer, :, :chunks].float()
        kv_heads = keys_KCR.shape[0]
        heads, tokens, dim = q_NTD.shape
        q_KQR = group_queries(q_NTD, kv_heads).float() @ tensors["principal"][layer]
        logits_KQC = q_KQR @ keys_KCR.mT / math.sqrt(dim)
        return logits_KQC.reshape(kv_heads, heads // kv_heads, tokens, chunks)


class LokiCache(SelectiveCache[LokiConfig]):
    """Units are single tokens; attention over the chosen ones uses their exact keys."""

    name = "loki"
    index: PrincipalKeys

    @classmethod
    def index_of(cls, geometry: Geometry, config: LokiConfig) -> Index:
        rank = config.score_dims if config.score_dims is not None else geometry.head_dim // PAPER_SHARE
        return PrincipalKeys(min(max(rank, 1), geometry.head_dim))

    def begin_selection(self, layer: int, seq: SelectiveSequence, k_KSD: Tensor) -> None:
        self.index.learn(layer, seq.tensors, k_KSD)
