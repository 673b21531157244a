"""Loki: tokens ranked by the first principal directions of the post-RoPE keys, per KV head.

Source: arXiv 2406.02542. There the directions come from a calibration text and the keys are stored in
their basis; here they come from the sequence's own keys when selection begins (the prompt, as a rule), and
the first coordinates are kept beside the exact keys, so that a full budget equals full attention bit by bit.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shadowkv.cache.base import Geometry
from shadowkv.cache.index import TableIndex
from shadowkv.cache.layout import Region
from shadowkv.cache.recorded import Once
from shadowkv.cache.selective import SelectiveCache
from shadowkv.config import LokiConfig
from shadowkv.ops.attention import group_queries
from shadowkv.ops.lowrank import find_spectra

PAPER_SHARE = 4
"""The paper ranks by a quarter of the head width (d_f = 0.25)."""


class PrincipalKeys:
    """The first ``rank`` coordinates of each key in the basis of its head's principal directions, about their mean."""

    table = "principal_keys"

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def regions(self, geometry: Geometry, chunks: int) -> list[Region]:
        layers, heads, dim = geometry.layers, geometry.kv_heads, geometry.head_dim
        return [
            Region("principal", "bases", (layers, heads, dim, self.rank), torch.float32),
            Region("principal_keys", "principal keys", (layers, heads, chunks, self.rank), geometry.dtype),
        ]

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

    def table_query(self, layer: int, q_BND: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        basis_BKDR = kept["principal"][layer]
        batch, kv_heads, _, rank = basis_BKDR.shape
        q_BKGD = q_BND.float().reshape(batch, kv_heads, -1, q_BND.shape[2])
        return (q_BKGD @ basis_BKDR).to(q_BND.dtype).reshape(batch, -1, rank)


class LokiCache(SelectiveCache[LokiConfig]):
    """Units are single tokens; attention over the chosen ones uses their exact keys."""

    name = "loki"
    index: PrincipalKeys

    @classmethod
    def index_of(cls, geometry: Geometry, config: LokiConfig) -> TableIndex:
        rank = config.score_dims if config.score_dims is not None else geometry.head_dim // PAPER_SHARE
        return PrincipalKeys(min(max(rank, 1), geometry.head_dim))

    def begin_selection(self, tensors: dict[str, Tensor], k_KSD: Tensor, once: Once) -> None:
        spectra = once("spectra of heads", lambda: find_spectra([k_SD[:, None] for k_SD in k_KSD], centre=True))
        for basis_DR, spectrum in zip(tensors["principal"][0], spectra, strict=True):
            basis_DR.copy_(spectrum.subspace(self.index.rank, 1).basis_KDR[0])

    @classmethod
    def kept_for_steps(cls) -> tuple[str, ...]:
        return ("principal",)
