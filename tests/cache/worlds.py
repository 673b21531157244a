"""Small geometries, ropes and a driver that feeds a cache and an exact oracle the same random tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.cache.arena import Arena
from shadowkv.cache.base import Cache, CachedSequence, Geometry
from shadowkv.cache.methods import METHODS
from shadowkv.cache.shadowkv import ShadowSequence
from shadowkv.config import CacheConfig
from shadowkv.ops.attention import decode_attention
from shadowkv.ops.contract.bounds import ACCUMULATOR, Bounded
from shadowkv.ops.rope import Rope
from shadowkv.ops.views import DenseView, View
from tests.rounding import ROTATION, attention


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

    def step(self, tokens: int = 1) -> list[tuple[Tensor, Bounded]]:
        """Append random tokens: per layer, the cache's attention and the exact one's, [N, T, D]."""
        return step_together([self], tokens)[0]

    def rebuilt_off(self, layer: int) -> Tensor | float:
        """See :func:`rebuilt_off`; exact keys are not off."""
        if not isinstance(self.seq, ShadowSequence) or not self.seq.compressed:
            return 0.0
        return rebuilt_off(self.seq, layer, self.k[layer])


def last_queries(cache: Cache, prompt: int) -> Tensor | None:
    """As many random queries as the method asks for at the end of a prompt of this length."""
    g, wanted = cache.geometry, min(cache.prompt_queries, prompt)
    if not wanted:
        return None
    return torch.randn(g.heads, wanted, g.head_dim, device=cache.device_arena.device, dtype=g.dtype)


def step_together(worlds: list[World], tokens: int = 1) -> list[list[tuple[Tensor, Bounded]]]:
    cache = worlds[0].cache
    g, device = cache.geometry, cache.device_arena.device
    seqs = [w.seq for w in worlds]
    cache.extend(seqs, tokens)
    results: list[list[tuple[Tensor, Bounded]]] = [[] for _ in worlds]
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
            exact = attention(q[i], world.k[layer], world.v[layer], keys_off_KS=world.rebuilt_off(layer))
            results[i].append((decode_attention(q[i], view), exact))
    return results


def touched(seq: ShadowSequence, layer: int) -> list[set[int]]:
    """The chunks by head that this step selected and that are resident."""
    ids, used = seq.tensors["resident_ids"][layer].tolist(), seq.tensors["last_used"][layer].tolist()
    return [{c for c, at in zip(*head, strict=True) if at == seq.step} for head in zip(ids, used, strict=True)]


def error(got: Tensor, want: Tensor) -> float:
    want = want.to(got.device)  # oracles may be on the host
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


def rebuilt_off(seq: ShadowSequence, layer: int, k_KSD: Tensor) -> Tensor:
    """How far rounding may put keys that are rebuilt from coefficients, in length, [S].

    A coefficient is a sum over all X numbers of a token's centred keys, a rebuilt number one over R coefficients. The
    magnitudes of a basis's columns, which have length 1, are together at most sqrt(R) long; the basis is rounded
    itself. Keys before RoPE are found by turning back. Keys, given and rebuilt, and coefficients are stored in the
    cache's dtype.
    """
    basis_KDR, mean_KD = seq.tensors[f"basis.{layer}"], seq.tensors[f"mean.{layer}"]
    width, rank = basis_KDR[..., 0].numel(), basis_KDR.shape[2]
    length_S = k_KSD.double().norm(dim=(0, 2)) + mean_KD.double().norm()
    return ((width + rank + 4) * rank**0.5 * ACCUMULATOR + 4 * ROTATION + 3 * torch.finfo(k_KSD.dtype).eps) * length_S


def view_attention(q_NTD: Tensor, view: View, keys_off_KE: Tensor | float = 0.0) -> Bounded:
    """Attention to what a view shows."""
    if isinstance(view, DenseView):
        return attention(q_NTD, view.k_KSD, view.v_KSD, keys_off_KS=keys_off_KE)
    shown_KE = view.allowed_KTE.any(1)[..., None]  # what no query sees may be anything
    k_KED, v_KED = (x.masked_fill(~shown_KE, 0) for x in (view.k_KED, view.v_KED))
    return attention(q_NTD, k_KED, v_KED, view.allowed_KTE, keys_off_KE)
