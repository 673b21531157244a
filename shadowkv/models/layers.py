"""The parts of a decoder layer, on plain tensors: norms, activations, and the weights in their fused layout."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
"""By their names in config.json."""


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer.

    Shapes: qkv [(N+2K)*D, M] with rows of q, k, v below each other; o [M, N*D]; gate_up [2F, M] with
    the rows of gate above those of up; down [M, F]; norms [M]; q_norm and k_norm [D]; biases [rows].
    """

    input_norm: Tensor
    qkv: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis: float32 inside, rounded to x's dtype before the weight.

    Source: the RMSNorm of transformers' Llama, Qwen, Phi-3 and GLM, which agree in the order of casts.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def mlp(x: Tensor, weights: LayerWeights, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Gated feed-forward. Shapes: x and the result [..., M]."""
    gate, up = F.linear(x, weights.gate_up, weights.gate_up_bias).chunk(2, dim=-1)
    return F.linear(activation(gate).mul_(up), weights.down, weights.down_bias)
