"""What a model is, in numbers: enough to price it, to allocate it and to run it. Knows no file and no family."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shadowkv.cache.base import Geometry


@dataclass(frozen=True)
class RopeSpec:
    """How positions turn queries and keys; ``models.rope`` makes the frequencies of it."""

    kind: str
    """default, linear, dynamic, yarn, longrope or llama3, as transformers names them."""
    parameters: Mapping[str, object] = field(hash=False)
    """transformers' standardised ``rope_parameters``: theta, factor, rotated share and so on."""
    rotary_dim: int
    interleaved: bool
    """Pairs are neighbours (2i, 2i+1) instead of halves (i, i + rotary_dim/2)."""
    trained_tokens: int
    """``max_position_embeddings`` of the config, before any scaling."""
    divisors: tuple[float, ...] | None = None
    """A GGUF file's ``rope_freqs``: every frequency is divided by its entry. Empty where the file ends
    before them, which suffices for planning and for nothing else."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", dict(self.parameters))


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only transformer.

    Units: all sizes in elements; ``context_tokens`` in tokens.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    activation: str
    rope: RopeSpec
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    sandwich_norms: bool
    """The outputs of attention and MLP are normed before they are added to the residual stream."""
    tied_embeddings: bool
    max_position_tokens: int
    """Positions that the (scaled) RoPE was made for."""
    context_tokens: int
    """The longest context that is computed exactly as the model defines it."""
    context_limit: str
    """What sets ``context_tokens``, in words."""
    dtype: torch.dtype
    """What the checkpoint says its weights are; bfloat16 for quantised files."""

    @property
    def q_rows(self) -> int:
        """Rows of the fused projection that make queries, N*D."""
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of the fused projection that make keys, K*D; as many make values."""
        return self.kv_heads * self.head_dim

    def geometry(self, dtype: torch.dtype) -> Geometry:
        """The sizes that a cache needs."""
        return Geometry(self.layers, self.heads, self.kv_heads, self.head_dim, dtype)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the loader allocates, by its name inside this package."""
        qkv_rows = self.q_rows + 2 * self.kv_rows
        layer: dict[str, tuple[int, ...]] = {
            "input_norm": (self.hidden,),
            "qkv": (qkv_rows, self.hidden),
            "o": (self.hidden, self.q_rows),
            "mlp_norm": (self.hidden,),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }
        if self.qkv_bias:
            layer["qkv_bias"] = (qkv_rows,)
        if self.o_bias:
            layer["o_bias"] = (self.hidden,)
        if self.mlp_bias:
            layer |= {"gate_up_bias": (2 * self.ffn,), "down_bias": (self.hidden,)}
        if self.qk_norm:
            layer |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        if self.sandwich_norms:
            layer |= {"attention_out_norm": (self.hidden,), "mlp_out_norm": (self.hidden,)}
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab, self.hidden), "norm": (self.hidden,)}
        if not self.tied_embeddings:
            shapes["head"] = (self.vocab, self.hidden)
        for i in range(self.layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        return shapes

    def parameters(self) -> int:
        """Number of weights; tied embeddings count once."""
        return sum(math.prod(shape) for shape in self.weight_shapes().values())

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that the loader allocates for the weights in this dtype."""
        return self.parameters() * dtype.itemsize
