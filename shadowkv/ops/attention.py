"""Exact attention: of a prompt over itself, of new tokens over a contiguous run or over slots."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from shadowkv.errors import ShapeError
from shadowkv.ops.views import DenseView, View


def group_queries(q_NTD: Tensor, kv_heads: int) -> Tensor:
    """[N, T, D] -> [K, G*T, D]: the queries of the G heads that share a KV head, side by side."""
    heads, tokens, dim = q_NTD.shape
    if heads % kv_heads:
        raise ShapeError(f"{heads} query heads do not divide into {kv_heads} KV heads")
    return q_NTD.reshape(kv_heads, heads // kv_heads * tokens, dim)


def prefill_attention(q_NSD: Tensor, k_KSD: Tensor, v_KSD: Tensor) -> Tensor:
    """Causal attention of a whole prompt over itself, scaled by 1/sqrt(D).

    Shapes: q and the result [N, S, D]; k, v [K, S, D] with N a multiple of K.
    """
    if k_KSD.shape != v_KSD.shape or q_NSD.shape[1:] != k_KSD.shape[1:] or q_NSD.shape[0] % k_KSD.shape[0]:
        raise ShapeError(
            f"prefill attention of q {tuple(q_NSD.shape)}, k {tuple(k_KSD.shape)}, v {tuple(v_KSD.shape)}; "
            "needs [N, S, D], [K, S, D], [K, S, D] with N a multiple of K"
        )
    return F.scaled_dot_product_attention(
        q_NSD[None], k_KSD[None], v_KSD[None], is_causal=True, enable_gqa=q_NSD.shape[0] != k_KSD.shape[0]
    )[0]


def dense_attention(q_NTD: Tensor, k_KSD: Tensor, v_KSD: Tensor) -> Tensor:
    """Causal attention of the last T of S tokens. Shapes: q and the result [N, T, D]; k, v [K, S, D]."""
    kv_heads, context = k_KSD.shape[:2]
    heads, tokens, _ = q_NTD.shape
    q_KQD = group_queries(q_NTD, kv_heads)
    mask = None
    if tokens > 1:
        mask_TS = torch.ones(tokens, context, dtype=torch.bool, device=q_NTD.device).tril(context - tokens)
        mask = mask_TS.repeat(heads // kv_heads, 1)
    out_KQD = F.scaled_dot_product_attention(q_KQD[None], k_KSD[None], v_KSD[None], attn_mask=mask)[0]
    return out_KQD.reshape(q_NTD.shape)


def slot_attention(q_NTD: Tensor, k_KED: Tensor, v_KED: Tensor, allowed_KTE: Tensor) -> Tensor:
    """Attention over slots, in float32 throughout; a query that may see no slot gives zeros.

    Slots that no query may see may hold anything, NaN too: memory is not cleared between its owners.

    Shapes: q and the result [N, T, D]; k, v [K, E, D]; allowed [K, T, E] (bool).
    """
    kv_heads = k_KED.shape[0]
    heads, _, dim = q_NTD.shape
    q_KQD = group_queries(q_NTD, kv_heads).float()
    scores_KQE = q_KQD @ k_KED.float().mT / math.sqrt(dim)
    allowed_KQE = allowed_KTE.repeat(1, heads // kv_heads, 1)
    scores_KQE = scores_KQE.masked_fill(~allowed_KQE, -torch.inf)
    top_KQ1 = scores_KQE.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights_KQE = torch.exp(scores_KQE - top_KQ1)
    total_KQ1 = weights_KQE.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    seen_KE1 = allowed_KTE.any(dim=1)[..., None]  # a weight of 0 does not silence NaN
    out_KQD = weights_KQE @ v_KED.float().masked_fill(~seen_KE1, 0) / total_KQ1
    return out_KQD.to(q_NTD.dtype).reshape(q_NTD.shape)


def decode_attention(q_NTD: Tensor, view: View) -> Tensor:
    """Attention of one sequence's T new tokens over what its cache shows. Shapes: [N, T, D] to [N, T, D]."""
    if isinstance(view, DenseView):
        return dense_attention(q_NTD, view.k_KSD, view.v_KSD)
    return slot_attention(q_NTD, view.k_KED, view.v_KED, view.allowed_KTE)
