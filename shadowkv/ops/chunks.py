"""Chunks of post-RoPE keys: their means, how well a mean describes its members, and the outliers.

Source: arXiv 2410.21465, sections 3.2 and 4.
"""

import torch
from torch import Tensor


def split_chunks(x_KSD: Tensor, chunk_tokens: int) -> Tensor:
    """[K, S, D] -> [K, C, L, D]; the incomplete last chunk is left out."""
    kv_heads, tokens, dim = x_KSD.shape
    chunks = tokens // chunk_tokens
    return x_KSD[:, : chunks * chunk_tokens].reshape(kv_heads, chunks, chunk_tokens, dim)


SLICE_TOKENS = 8192
"""Tokens that are widened to float32 at a time: bounds the workspace whatever the context."""


def _slices(k_KCLD: Tensor) -> tuple[Tensor, ...]:
    return torch.split(k_KCLD, max(SLICE_TOKENS // k_KCLD.shape[2], 1), dim=1)


def chunk_means(k_KCLD: Tensor) -> Tensor:
    """Landmarks [K, C, D], summed in float32, in the keys' dtype."""
    return torch.cat([part.float().mean(dim=2).to(k_KCLD.dtype) for part in _slices(k_KCLD)], dim=1)


def min_cosine(k_KCLD: Tensor) -> Tensor:
    """The lowest cosine between a chunk's mean and its members, [K, C] in float32; 0 for zero vectors."""
    return torch.cat([_min_cosine(part.float()) for part in _slices(k_KCLD)], dim=1)


def _min_cosine(k_KCLD: Tensor) -> Tensor:
    unit_KCLD = torch.nn.functional.normalize(k_KCLD, dim=-1, eps=1e-30)
    mean_KC1D = torch.nn.functional.normalize(k_KCLD.mean(dim=2, keepdim=True), dim=-1, eps=1e-30)
    return (unit_KCLD * mean_KC1D).sum(-1).amin(dim=2)


def choose_outliers(k_KCLD: Tensor, outliers: int, sinks: int) -> Tensor:
    """Chunk ids [K, min(outliers, C)] (int64, ascending): the first ``sinks`` and the worst described.

    Ties go to the lower id.
    """
    cosine_KC = min_cosine(k_KCLD)
    cosine_KC[:, :sinks] = -torch.inf
    order_KC = torch.sort(cosine_KC, dim=1, stable=True).indices
    return order_KC[:, :outliers].sort(dim=1).values
