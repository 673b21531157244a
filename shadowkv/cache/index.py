"""What chunks are ranked by. An index stores something small per chunk and turns queries into logits.

How logits become a selection is not its business (``ops.select``), so another index is another class here.
"""

import math
from typing import Protocol

from torch import Tensor

from shadowkv.cache.base import Geometry
from shadowkv.cache.layout import Region
from shadowkv.config import LandmarksConfig
from shadowkv.ops.attention import group_queries
from shadowkv.ops.chunks import chunk_means


class Index(Protocol):
    """One index over the chunks of one sequence, layer by layer."""

    def regions(self, geometry: Geometry, chunks: int) -> list[Region]:
        """The tensors that it needs for this many chunks, all layers."""

    def write(self, layer: int, tensors: dict[str, Tensor], first_chunk: int, k_KCLD: Tensor) -> None:
        """Index chunks of post-RoPE keys from ``first_chunk`` on."""

    def logits(self, layer: int, tensors: dict[str, Tensor], chunks: int, q_NTD: Tensor) -> Tensor:
        """[K, G, T, C] in float32: how much each query wants each of the first ``chunks`` chunks."""


class Landmarks:
    """Mean post-RoPE key per chunk; the logit is its scaled product with the query."""

    def regions(self, geometry: Geometry, chunks: int) -> list[Region]:
        shape = (geometry.layers, geometry.kv_heads, chunks, geometry.head_dim)
        return [Region("landmarks", "landmarks", shape, geometry.dtype)]

    def write(self, layer: int, tensors: dict[str, Tensor], first_chunk: int, k_KCLD: Tensor) -> None:
        tensors["landmarks"][layer, :, first_chunk : first_chunk + k_KCLD.shape[1]] = chunk_means(k_KCLD)

    def logits(self, layer: int, tensors: dict[str, Tensor], chunks: int, q_NTD: Tensor) -> Tensor:
        landmarks_KCD = tensors["landmarks"][layer, :, :chunks].float()
        kv_heads, _, dim = landmarks_KCD.shape
        heads, tokens, _ = q_NTD.shape
        logits_KQC = group_queries(q_NTD, kv_heads).float() @ landmarks_KCD.mT / math.sqrt(dim)
        return logits_KQC.reshape(kv_heads, heads // kv_heads, tokens, chunks)


def make_index(config: LandmarksConfig) -> Index:
    """The index of these settings."""
    assert isinstance(config, LandmarksConfig)
    return Landmarks()
