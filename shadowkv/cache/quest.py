"""Quest: pages ranked by the highest product that a query could have with any key between their bounds.

Source: arXiv 2406.10774, section 3.
"""

import math

from torch import Tensor

from shadowkv.cache.base import Geometry
from shadowkv.cache.index import Index
from shadowkv.cache.layout import Region
from shadowkv.cache.selective import SelectiveCache
from shadowkv.config import QuestConfig
from shadowkv.ops.attention import group_queries


class PageBounds:
    """Element-wise minimum and maximum of each page's post-RoPE keys."""

    def regions(self, geometry: Geometry, chunks: int) -> list[Region]:
        shape = (geometry.layers, geometry.kv_heads, chunks, geometry.head_dim)
        return [Region(name, "page bounds", shape, geometry.dtype) for name in ("page_min", "page_max")]

    def write(self, layer: int, tensors: dict[str, Tensor], first_chunk: int, k_KCLD: Tensor) -> None:
        pages = slice(first_chunk, first_chunk + k_KCLD.shape[1])
        tensors["page_min"][layer, :, pages] = k_KCLD.amin(dim=2)
        tensors["page_max"][layer, :, pages] = k_KCLD.amax(dim=2)

    def logits(self, layer: int, tensors: dict[str, Tensor], chunks: int, q_NTD: Tensor) -> Tensor:
        """Sum over d of max(q_d min_d, q_d max_d): the maximum where q_d is positive, the minimum elsewhere."""
        min_KCD, max_KCD = (tensors[name][layer, :, :chunks].float() for name in ("page_min", "page_max"))
        kv_heads, _, dim = min_KCD.shape
        heads, tokens, _ = q_NTD.shape
        q_KQD = group_queries(q_NTD, kv_heads).float()
        logits_KQC = q_KQD.clamp_min(0) @ max_KCD.mT + q_KQD.clamp_max(0) @ min_KCD.mT
        return (logits_KQC / math.sqrt(dim)).reshape(kv_heads, heads // kv_heads, tokens, chunks)


class QuestCache(SelectiveCache[QuestConfig]):
    """Everything stays on the device (or the values on the host); pages are chosen by :class:`PageBounds`."""

    name = "quest"

    @classmethod
    def index_of(cls, geometry: Geometry, config: QuestConfig) -> Index:
        return PageBounds()
