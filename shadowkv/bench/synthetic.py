"""What a benchmark puts in the place of a model and a prompt: random weights, random keys and values.

Time and memory do not depend on the numbers, but the hit rate does. So whatever is made here is labelled in
the results.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shadowkv.cache.base import Cache, CachedSequence
from shadowkv.models.decoder import Decoder
from shadowkv.models.rope import build_rope
from shadowkv.models.spec import ModelSpec
from shadowkv.ops.rope import Rope

RANDOM_WEIGHTS = "random weights"
RANDOM_PROMPTS = "prompts of random tokens"
SYNTHETIC_PREFILL = "synthetic keys and values (no prompt was computed)"
DIRECTIONS = 192
"""Directions that synthetic keys have, besides noise: about what pre-RoPE keys of a layer have."""
NOISE = 0.1
SLICE_TOKENS = 8192

Progress = Callable[[int, int], None]


def random_decoder(
    spec: ModelSpec, *, device: torch.device, dtype: torch.dtype, seed: int = 0, progress: Progress | None = None
) -> Decoder:
    """A model of these sizes whose weights are drawn at the scale that keeps activations near 1.

    Norms are 1 and biases 0; the matrices that add to the residual stream are scaled down by the depth.
    """
    gen = torch.Generator(device).manual_seed(seed)
    shapes = spec.weight_shapes()
    weights: dict[str, Tensor] = {}
    for done, (name, shape) in enumerate(shapes.items()):
        piece = name.rpartition(".")[2]
        if len(shape) == 1:
            weights[name] = torch.full(shape, float(not piece.endswith("bias")), dtype=dtype, device=device)
        else:
            deep = piece in ("o", "down")
            scale = 1.0 if piece == "embed" else shape[1] ** -0.5 / (math.sqrt(2 * spec.layers) if deep else 1)
            weights[name] = torch.empty(shape, dtype=dtype, device=device).normal_(0, scale, generator=gen)
        if progress is not None:
            progress(done + 1, len(shapes))
    return Decoder(spec, weights, build_rope(spec, device))


def synthetic_layer(
    spec: ModelSpec, rope: Rope, tokens: int, dtype: torch.dtype, gen: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer of a prompt: keys before RoPE [S, K, D] of low rank and some noise, the same after RoPE, values.

    Neighbouring tokens share most of their key, so that a chunk's mean describes it.
    """
    device, heads, dim = gen.device, spec.kv_heads, spec.head_dim
    width = heads * dim
    directions = min(DIRECTIONS, width)
    basis_RX = torch.empty(directions, width, dtype=dtype, device=device).normal_(generator=gen) / directions**0.5
    k_pre_SKD = torch.empty(tokens, heads, dim, dtype=dtype, device=device)
    k_KSD, v_KSD = (torch.empty(heads, tokens, dim, dtype=dtype, device=device) for _ in range(2))
    row = torch.full((1,), rope.row(tokens), device=device)
    for start in range(0, tokens, SLICE_TOKENS):
        part = slice(start, min(start + SLICE_TOKENS, tokens))
        size = part.stop - part.start
        coarse_SR = torch.empty(size // 8 + 1, directions, dtype=dtype, device=device).normal_(generator=gen)
        smooth_SR = coarse_SR.repeat_interleave(8, dim=0)[:size]
        own_SX = torch.empty(size, width, dtype=dtype, device=device).normal_(0, NOISE, generator=gen)
        k_pre_SKD[part] = (smooth_SR @ basis_RX + own_SX).reshape(size, heads, dim)
        positions_S = torch.arange(part.start, part.stop, device=device)
        k_KSD[:, part] = rope.rotate(k_pre_SKD[part].transpose(0, 1), positions_S, row)
        v_KSD[:, part].normal_(generator=gen)
    return k_pre_SKD, k_KSD, v_KSD


@torch.inference_mode()
def synthetic_prompt(
    cache: Cache[Any, Any], sink: Any, seq: CachedSequence, spec: ModelSpec, tokens: int, seed: int
) -> None:
    """Fill a sequence as a prompt of ``tokens`` tokens would, through the cache's own contract.

    Args:
        sink: takes the layers; the cache itself, or what watches it.
    """
    dtype, device = cache.geometry.dtype, cache.device_arena.device
    gen = torch.Generator(device).manual_seed(seed)
    sink.begin_prompt(seq, tokens)
    observed = min(sink.prompt_queries, tokens)
    for layer in range(spec.layers):
        k_pre_SKD, k_KSD, v_KSD = synthetic_layer(spec, cache.rope, tokens, dtype, gen)
        q_NWD = None
        if observed:
            shape = (spec.heads, observed, spec.head_dim)
            q_NWD = torch.empty(shape, dtype=dtype, device=device).normal_(generator=gen)
        sink.take_layer(layer, seq, k_pre_SKD, k_KSD, v_KSD, q_NWD)
        del k_pre_SKD, k_KSD, v_KSD
