"""How well the mean of a chunk describes its keys, and which chunks it describes worst.

Source: arXiv 2410.21465, section 3.2 and figure 3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.ops.chunks import choose_outliers, min_cosine, split_chunks

THRESHOLDS = (0.0, 0.25, 0.5, 0.75, 0.9)
QUANTILES = (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
BINS = 40


@dataclass(frozen=True)
class Cosines:
    """Of one layer, the lowest cosine between each chunk's mean and its post-RoPE keys.

    Shapes, in float32 on the CPU: ``quantiles`` [K, QUANTILES]; ``below`` [K, THRESHOLDS], shares of the chunks;
    ``counts`` [K, BINS], chunks by cosine in equal steps from -1 to 1; ``outlier_ids`` [K, O], the chunks that
    ShadowKV keeps exactly, ascending, and ``outlier_cosines`` [K, O].
    """

    quantiles: Tensor
    below: Tensor
    counts: Tensor
    outlier_ids: Tensor
    outlier_cosines: Tensor


def cosines_of(k_KSD: Tensor, chunk_tokens: int, outliers: int) -> Cosines:
    """The figures of one layer. The first chunk is among the outliers by rule, as in ShadowKV."""
    k_KCLD = split_chunks(k_KSD, chunk_tokens)
    cosine_KC = min_cosine(k_KCLD)
    ids_KO = choose_outliers(k_KCLD, outliers, 1)
    chosen_KO = cosine_KC.gather(1, ids_KO).cpu()
    cosine_KC = cosine_KC.cpu()
    sorted_KC = cosine_KC.sort(dim=1).values
    places = [round(share * (sorted_KC.shape[1] - 1)) for share in QUANTILES]
    counts = torch.stack([torch.histc(row_C, BINS, -1, 1) for row_C in cosine_KC.clamp(-1, 1)])
    below = torch.stack([(cosine_KC < threshold).float().mean(1) for threshold in THRESHOLDS], dim=1)
    return Cosines(sorted_KC[:, places], below, counts, ids_KO.cpu(), chosen_KO)
