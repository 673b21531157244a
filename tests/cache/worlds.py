"""Small geometries, ropes and a driver that feeds a cache and an exact oracle the same random tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.cache.arena import Arena
from shadowkv.cache.base import Cache, CachedSequence, Geometry
from shadowkv.cache.methods import METHODS
from shadowkv.cache.shadowkv import ShadowSequence
from shadowkv.config import CacheConfig
from shadowkv.ops.attention import decode_attention, dense_attention
from shadowkv.ops.rope import Rope


def make_rope(geometry: Geometry, device: torch.device, *, interleaved: bool = False, factor: float = 1.0) -> Rope:
    half = geometry.head_dim // 2
    inv_freq = 10000.0 ** (-torch.arange(half) / half)
    return Rope(
        lambda length: (inv_freq, factor),
        lambda length: 0,
        rotary_dim=geometry.head_dim,
        interleaved=interleaved,
        device=device,
    )


def make_cache(
    geometry: Geometry,
    config: CacheConfig,
    device: torch.device,
    rope: Rope | None = None,
    size_bytes: int = 64 << 20,
) -> Cache:
    on_gpu = device.type == "cuda"
    return METHODS[type(config)](
        geometry,
        config,
        rope or make_rope(geometry, device),
        Arena(size_bytes, device),
        Arena(size_bytes, "cpu", pinned=on_gpu),
    )


@dataclass
class World:
    """One sequence in a cache beside everything it was given, exact."""

    cache: Cache
    seq: CachedSequence
    k: list[Tensor]  # by layer, post-RoPE [K, S, D]
    v: list[Tensor]

    @classmethod
    def start(cls, cache: Cache, prompt: int, capacity: int, k_pre: list[Tensor] | None = None) -> "World":
        g, device = cache.geometry, cache.device_arena.device
        seq = cache.open(capacity)
        cache.begin_prompt(seq, prompt)
        world = cls(cache, seq, [], [])
        positions = torch.arange(prompt, device=device)
        rows = torch.full((prompt,), cache.rope.row(prompt), device=device)
        for layer in range(g.layers):
            pre = torch.randn(prompt, g.kv_heads, g.head_dim, device=device, dtype=g.dtype)
            if k_pre is not None:
                pre = k_pre[layer]
            k = cache.rope.rotate(pre.transpose(0, 1), positions, rows)
            v = torch.randn(g.kv_heads, prompt, g.head_dim, device=device, dtype=g.dtype)
            cache.take_layer(layer, seq, pre, k, v, last_queries(cache, prompt))
            world.k.append(k)
            world.v.append(v)
        return world

    def step(self, tokens: int = 1) -> list[tuple[Tensor, Tensor]]:
        """Append random tokens: per layer, the cache's attention and the exact one's, [N, T, D]."""
        return step_together([self], tokens)[0]


def last_queries(cache: Cache, prompt: int) -> Tensor | None:
    """As many random queries as the method asks for at the end of a prompt of this length."""
    g, wanted = cache.geometry, min(cache.prompt_queries, prompt)
    if not wanted:
        return None
    return torch.randn(g.heads, wanted, g.head_dim, device=cache.device_arena.device, dtype=g.dtype)


def step_together(worlds: list[World], tokens: int = 1) -> list[list[tuple[Tensor, Tensor]]]:
    cache = worlds[0].cache
    g, device = cache.geometry, cache.device_arena.device
    seqs = [w.seq for w in worlds]
    cache.extend(seqs, tokens)
    results: list[list[tuple[Tensor, Tensor]]] = [[] for _ in worlds]
    for layer in range(g.layers):
        shape = (len(worlds), g.kv_heads, tokens, g.head_dim)
        k = torch.randn(shape, device=device, dtype=g.dtype)
        v = torch.randn(shape, device=device, dtype=g.dtype)
        q = torch.randn(len(worlds), g.heads, tokens, g.head_dim, device=device, dtype=g.dtype)
        cache.append(layer, seqs, k, v)
        if cache.foresees and layer:
            cache.foresee(layer, q)
        for i, (world, view) in enumerate(zip(worlds, cache.view(layer, seqs, q), strict=True)):
            world.k[layer] = torch.cat([world.k[layer], k[i]], dim=1)
            world.v[layer] = torch.cat([world.v[layer], v[i]], dim=1)
            exact = dense_attention(q[i].double(), world.k[layer].double(), world.v[layer].double())
            results[i].append((decode_attention(q[i], view), exact))
    return results


def touched(seq: ShadowSequence, layer: int) -> list[set[int]]:
    """The chunks by head that this step selected and that are resident."""
    ids, used = seq.tensors["resident_ids"][layer].tolist(), seq.tensors["last_used"][layer].tolist()
    return [{c for c, at in zip(*head, strict=True) if at == seq.step} for head in zip(ids, used, strict=True)]


def error(got: Tensor, want: Tensor) -> float:
    want = want.to(got.device)  # oracles may be on the host
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


def rounding(dtype: torch.dtype) -> float:
    """Relative error allowed to attention in a dtype: inputs, weights and outputs are each rounded once."""
    return 8 * torch.finfo(dtype).eps
