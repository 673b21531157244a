"""Attention of new tokens over what their cache shows them: one operation per kind of view."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from shadowkv.cache.base import DenseView, View
from shadowkv.ops.attention import dense_attention, slot_attention


def attend(q_BNTD: Tensor, views: Seq[View]) -> Tensor:
    """[B, N, T, D] queries over one view per row, to [B, N, T, D]."""
    rows = []
    for q_NTD, view in zip(q_BNTD, views, strict=True):
        if isinstance(view, DenseView):
            rows.append(dense_attention(q_NTD, view.k_KSD, view.v_KSD))
        else:
            rows.append(slot_attention(q_NTD, view.k_KED, view.v_KED, view.allowed_KTE))
    return torch.stack(rows)
