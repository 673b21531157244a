"""What chunks are ranked by. An index stores something small per chunk and turns queries into logits.

How logits become a selection is not its business (``ops.select``), so another index is another class here.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from shadowkv.cache.base import Geometry
from shadowkv.cache.layout import Region
from shadowkv.config import LandmarksConfig
from shadowkv.ops.attention import group_queries
from shadowkv.ops.chunks import chunk_means
from shadowkv.ops.rows import LayerRows


class Index(Protocol):
    """One index over the chunks of one sequence, layer by layer."""

    def regions(self, geometry: Geometry, chunks: int) -> list[Region]:
        """The tensors that it needs for this many chunks, all layers."""

    def write(self, layer: int, tensors: dict[str, Tensor], first_chunk: int, k_KCLD: Tensor) -> None:
        """Index chunks of post-RoPE keys from ``first_chunk`` on."""

    def logits(self, layer: int, tensors: dict[str, Tensor], chunks: int, q_NTD: Tensor) -> Tensor:
        """[K, G, T, C] in float32: how much each query wants each of the first ``chunks`` chunks."""


class Joining(NamedTuple):
    """Chunks that leave the windows of B sequences, in all layers: tables as of a step (``ops.rows``), and the
    first chunk and the number of chunks of each sequence, of which ``most`` is the largest.

    Shapes: address_LBX [layers, B, X] int64, facts_BI [B, I], first_chunk_B and chunks_B [B]; int32.
    """

    address_LBX: Tensor
    facts_BI: Tensor
    first_chunk_B: Tensor
    chunks_B: Tensor
    most: int


class TableIndex(Index, Protocol):
    """An index whose logits are products of a query with one entry per chunk, of a table [layers, K, CHUNKS, W]."""

    table: str
    """The name of the tensor."""

    def table_query(self, layer: int, q_BND: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """What entries are multiplied with, [B, N, W] in the queries' dtype; logits are these products over sqrt(D).

        Args:
            kept: tensors of the index of all rows, [layers, B, ...], by their names.
        """


class BatchIndex(Index, Protocol):
    """An index that works by kernels too, for all rows of a step."""

    def score(self, rows: LayerRows, q_BND: Tensor, logits_BKGC: Tensor, parts_BKGZ2: Tensor) -> None:
        """Logits of every selectable chunk, and per split of the chunks their maximum and the sum of their
        exponentials beside it (see ``ops.triton.score``)."""

    def join(self, joining: Joining, geometry: Geometry, chunk_tokens: int) -> None:
        """Index the chunks that leave the recent window, in all layers."""


class Landmarks:
    """Mean post-RoPE key per chunk; the logit is its scaled product with the query."""

    table = "landmarks"

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

    def table_query(self, layer: int, q_BND: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        return q_BND

    def score(self, rows: LayerRows, q_BND: Tensor, logits_BKGC: Tensor, parts_BKGZ2: Tensor) -> None:
        from shadowkv.ops.triton.score import score_landmarks

        score_landmarks(rows, q_BND, logits_BKGC, parts_BKGZ2)

    def join(self, joining: Joining, geometry: Geometry, chunk_tokens: int) -> None:
        from shadowkv.ops.triton.join import write_landmarks

        write_landmarks(
            joining.address_LBX,
            joining.facts_BI,
            joining.first_chunk_B,
            joining.chunks_B,
            chunk_tokens,
            geometry.kv_heads,
            geometry.head_dim,
            geometry.dtype,
            joining.most,
        )


def make_index(config: LandmarksConfig) -> Landmarks:
    """The index of these settings."""
    assert isinstance(config, LandmarksConfig)
    return Landmarks()
