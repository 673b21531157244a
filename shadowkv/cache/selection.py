"""ShadowKV's selection and outliers over exact keys and values: what its compression costs is the difference."""

from collections.abc import Mapping

import torch
from torch import Tensor

from shadowkv.cache.base import Geometry
from shadowkv.cache.index import TableIndex, make_index
from shadowkv.cache.layout import Region
from shadowkv.cache.recorded import Once
from shadowkv.cache.selective import SelectiveCache, SelectiveSequence
from shadowkv.config import SelectionConfig
from shadowkv.ops.chunks import choose_outliers, split_chunks


class SelectionCache(SelectiveCache[SelectionConfig]):
    """Chunks by an index; outliers, chosen when selection begins, are always attended."""

    name = "selection"

    @classmethod
    def index_of(cls, geometry: Geometry, config: SelectionConfig) -> TableIndex:
        return make_index(config.index)

    @classmethod
    def always_units(cls, config: SelectionConfig) -> int:
        return config.outlier_chunks

    @classmethod
    def more_regions(cls, geometry: Geometry, config: SelectionConfig) -> list[Region]:
        shape = (geometry.layers, geometry.kv_heads, config.outlier_chunks)
        return [Region("outlier_ids", "bookkeeping", shape, torch.int32)]

    def begin_selection(self, tensors: dict[str, Tensor], k_KSD: Tensor, once: Once) -> None:
        units = self.context_units(self.config, k_KSD.shape[1])
        k_KCLD = split_chunks(k_KSD, self.config.chunk_tokens)[:, :units]
        tensors["outlier_ids"][0] = choose_outliers(k_KCLD, self.config.outlier_chunks, self.config.sink_units)

    @classmethod
    def kept_for_steps(cls) -> tuple[str, ...]:
        return ("outlier_ids",)

    def step_always(self, layer: int, kept: Mapping[str, Tensor], rows: int) -> Tensor:
        return kept["outlier_ids"][layer]

    def always(self, layer: int, seq: SelectiveSequence) -> Tensor:
        return seq.tensors["outlier_ids"][layer].long()
