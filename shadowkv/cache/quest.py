"""Quest: pages ranked by the highest product that a query could have with any key between their bounds.

Source: arXiv 2406.10774, section 3.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shadowkv.cache.base import Geometry
from shadowkv.cache.index import TableIndex
from shadowkv.cache.layout import Region
from shadowkv.cache.selective import SelectiveCache
from shadowkv.config import QuestConfig
from shadowkv.ops.attention import group_queries


class PageBounds:
    """Element-wise maximum and minimum of each page's post-RoPE keys, side by side."""

    table = "page_bounds"

    def regions(self, geometry: Geometry, chunks: int) -> list[Region]:
        shape = (geometry.layers, geometry.kv_heads, chunks, 2 * geometry.head_dim)
        return [Region("page_bounds", "page bounds", shape, geometry.dtype)]

    def write(self, layer: int, tensors: dict[str, Tensor], first_chunk: int, k_KCLD: Tensor) -> None:
        bounds_KCX = torch.cat([k_KCLD.amax(dim=2), k_KCLD.amin(dim=2)], dim=-1)
        tensors["page_bounds"][layer, :, first_chunk : first_chunk + k_KCLD.shape[1]] = bounds_KCX

    def logits(self, layer: int, tensors: dict[str, Tensor], chunks: int, q_NTD: Tensor) -> Tensor:
        """Sum over d of max(q_d min_d, q_d max_d): the maximum where q_d is positive, the minimum elsewhere."""
        bounds_KCX = tensors["page_bounds"][layer, :, :chunks].float()
        kv_heads = bounds_KCX.shape[0]
        heads, tokens, dim = q_NTD.shape
        logits_KQC = group_queries(halves(q_NTD), kv_heads).float() @ bounds_KCX.mT
        return (logits_KQC / math.sqrt(dim)).reshape(kv_heads, heads // kv_heads, tokens, chunks)

    def table_query(self, layer: int, q_BND: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        return halves(q_BND)


def halves(q_XXD: Tensor) -> Tensor:
    """What a query multiplies maxima with, and minima: [..., 2 D]."""
    return torch.cat([q_XXD.clamp_min(0), q_XXD.clamp_max(0)], dim=-1)


class QuestCache(SelectiveCache[QuestConfig]):
    """Everything stays on the device (or the values on the host); pages are chosen by :class:`PageBounds`."""

    name = "quest"

    @classmethod
    def index_of(cls, geometry: Geometry, config: QuestConfig) -> TableIndex:
        return PageBounds()
