"""ShadowKV's cache against the method as described, over random settings, prompts, steps and forks."""

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shadowkv.cache.base import Geometry
from shadowkv.cache.shadowkv import ShadowKVCache, ShadowSequence
from shadowkv.config import ShadowKVConfig
from shadowkv.ops.attention import decode_attention
from tests.cache.oracle import EPS, Array, Oracle, RopeRule
from tests.cache.worlds import make_cache, touched
from tests.ops.truth import assert_within

KEY_DIM = 16
GEOMETRIES = [
    Geometry(layers=2, heads=4, kv_heads=kv_heads, head_dim=KEY_DIM // kv_heads, dtype=torch.float32)
    for kv_heads in (1, 2, 4)
]


class Source:
    """Random tokens: keys whose singular values fall off around a bias, as a model's do."""

    def __init__(self, seed: int, geometry: Geometry, rule: RopeRule) -> None:
        self.random, self.g, self.rule = np.random.default_rng(seed), geometry, rule
        width = geometry.key_dim
        self.mix = [self.random.normal(size=(width, width)) for _ in range(geometry.layers)]
        self.mix = [2.5 * 0.8 ** np.arange(width)[:, None] * np.linalg.qr(m)[0] for m in self.mix]
        self.bias = self.random.normal(size=(geometry.layers, width))

    def normal(self, *shape: int) -> Array:
        return self.random.normal(size=shape).astype(np.float32).astype(np.float64)

    def keys(self, layer: int, tokens: int) -> Array:
        pre = self.normal(tokens, self.g.key_dim) @ self.mix[layer] + self.bias[layer]
        pre = pre.reshape(tokens, self.g.kv_heads, self.g.head_dim)
        return pre.astype(np.float32).astype(np.float64)

    def rotated(self, pre_TKD: Array, first: int, key: int) -> Array:
        rotated = np.stack([self.rule.rotate(pre, first + i, key) for i, pre in enumerate(pre_TKD)])
        return rotated.astype(np.float32).astype(np.float64)


@dataclass
class Pair:
    """One sequence in the cache and in the oracle."""

    seq: ShadowSequence
    oracle: Oracle


class World:
    def __init__(
        self, geometry: Geometry, config: ShadowKVConfig, rule: RopeRule, seed: int, device: torch.device
    ) -> None:
        self.g, self.config, self.rule, self.device = geometry, config, rule, device
        self.source = Source(seed, geometry, rule)
        cache = make_cache(geometry, config, device, rule.rope(geometry.head_dim, device), size_bytes=2 << 20)
        assert isinstance(cache, ShadowKVCache)
        self.cache = cache
        self.pairs: list[Pair] = []
        self.tally: Counter[str] = Counter()

    def tensor(self, x: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.device, torch.float32)

    def open(self, prompt: int, room: int) -> Pair:
        pair = Pair(self.cache.open(prompt + room), Oracle(self.g, self.config, self.rule))
        self.pairs.append(pair)
        self.cache.begin_prompt(pair.seq, prompt)
        pre = [self.source.keys(layer, prompt) for layer in range(self.g.layers)]
        post = [self.source.rotated(x, 0, self.rule.key(prompt)) for x in pre]
        v = [self.source.normal(prompt, self.g.kv_heads, self.g.head_dim) for _ in pre]
        for layer, arrays in enumerate(zip(pre, post, v, strict=True)):
            k_pre, k, values = (self.tensor(x) for x in arrays)
            self.cache.take_layer(layer, pair.seq, k_pre, k.transpose(0, 1), values.transpose(0, 1))
        pair.oracle.prompt(pre, post, v)
        return pair

    def step(self, pairs: list[Pair], tokens: int) -> None:
        """The pairs in which there is room go on together, each with its own tokens."""
        tokens = min(tokens, self.cache.append_tokens)
        pairs = [p for p in pairs if p.seq.tokens + tokens <= p.seq.capacity_tokens]
        if not pairs:
            return
        seqs = [p.seq for p in pairs]
        self.cache.extend(seqs, tokens)
        for p in pairs:
            p.oracle.extend(tokens)
        g = self.g
        for layer in range(g.layers):
            pre = [self.source.keys(layer, tokens) for _ in pairs]
            post = [
                self.source.rotated(x, p.seq.tokens - tokens, self.rule.key(p.seq.tokens))
                for x, p in zip(pre, pairs, strict=True)
            ]
            v = self.source.normal(len(pairs), tokens, g.kv_heads, g.head_dim)
            q = 1.5 * self.source.normal(len(pairs), g.heads, tokens, g.head_dim)
            q = q.astype(np.float32).astype(np.float64)
            k_BKTD = self.tensor(np.stack(post).swapaxes(1, 2))
            self.cache.append(layer, seqs, k_BKTD, self.tensor(v.swapaxes(1, 2)))
            views = self.cache.view(layer, seqs, self.tensor(q))
            for i, (pair, view) in enumerate(zip(pairs, views, strict=True)):
                pair.oracle.append(layer, pre[i], post[i], v[i])
                self.compare(layer, pair, q[i], decode_attention(self.tensor(q[i]), view))

    def compare(self, layer: int, pair: Pair, q_NTD: Array, got_NTD: Tensor) -> None:
        answer = pair.oracle.attend(layer, q_NTD)
        assert pair.seq.tokens == pair.oracle.tokens
        assert pair.seq.compressed == pair.oracle.compressed
        assert torch.isfinite(got_NTD).all()
        if not answer.sure:
            self.tally["skipped"] += 1
            return
        if pair.oracle.compressed:
            assert pair.seq.context_chunks == pair.oracle.context
            assert touched(pair.seq, layer) == answer.touched
        assert_within(got_NTD.cpu(), answer.out)
        self.tally["sparse" if pair.oracle.compressed else "exact"] += 1
        self.tally["generated chunks in context"] += pair.oracle.context > pair.oracle.context_at_first

    def fork(self, pair: Pair, room: int) -> None:
        seq = self.cache.fork(pair.seq, pair.seq.tokens + room)
        self.pairs.append(Pair(seq, copy.deepcopy(pair.oracle)))
        self.tally["forks"] += 1

    def release(self, pair: Pair) -> None:
        self.check_stats(pair)
        self.pairs.remove(pair)
        self.cache.release(pair.seq)

    def check_stats(self, pair: Pair) -> None:
        stats, oracle = self.cache.stats(pair.seq), pair.oracle
        assert stats.attention == ("sparse" if oracle.compressed else "exact")
        assert stats.selected_chunks == stats.hits + stats.misses == oracle.selected
        chunk_bytes = self.config.chunk_tokens * self.g.head_dim * self.g.dtype.itemsize
        assert stats.fetched_bytes == stats.fetched_chunks * chunk_bytes
        assert stats.rank == (oracle.ranks if oracle.compressed else [])
        for energy, layer in zip(stats.energy, oracle.layers if oracle.compressed else [], strict=True):
            # A share of squares of keys that were rounded on their way through RoPE and back.
            assert abs(energy - layer.energy) <= 4 * layer.lost / layer.length + EPS
        if all(layer.order_sure for layer in oracle.layers):
            assert (stats.hits, stats.fetched_chunks) == (oracle.hits, oracle.fetched)
            self.tally["stats"] += 1

    def end(self) -> None:
        for pair in list(self.pairs):
            self.release(pair)
        assert self.cache.device_arena.used_bytes == self.cache.host_arena.used_bytes == 0


RANKS = st.integers(3, 9) | st.sampled_from([KEY_DIM, KEY_DIM + 4])
"""Of KEY_DIM dimensions."""


@st.composite
def configs(draw: Any) -> ShadowKVConfig:
    size = draw(st.integers(1, 5))
    sinks = draw(st.integers(0, 2))
    # One key is its own mean: among chunks of one token only rounding would say which are outliers.
    outliers = sinks if size == 1 else draw(st.integers(sinks, 4))
    local = draw(st.integers(0, 2))
    budget = draw(st.integers(1, 4 * size))
    reuse = draw(st.booleans())
    attend = draw(st.sampled_from(["selected", "resident"])) if reuse else "selected"
    cap = draw(st.none() | st.integers(1, 2)) if reuse else None
    late = draw(st.integers(0, 3)) if attend == "resident" and cap is not None else 0
    return ShadowKVConfig(
        rank=draw(RANKS | st.tuples(RANKS, RANKS)),
        chunk_tokens=size,
        budget_tokens=budget,
        outlier_chunks=outliers,
        sink_chunks=sinks,
        local_chunks=local,
        recent_chunks=draw(st.integers(local + 2, local + 4)),
        resident_tokens=draw(st.none() | st.integers(budget, budget + 4 * size)),
        attend=attend,
        fetch_cap_chunks=draw(st.sampled_from([0, cap])) if late else cap,
        late_fetch_chunks=late,
        reuse=reuse,
        centre_keys=draw(st.booleans()),
        exact_while_fits=draw(st.booleans()),
        value_store=draw(st.sampled_from(["host", "device"])),
        query_block_tokens=draw(st.integers(1, 8)),
    )


MODELS = st.sampled_from(GEOMETRIES)
RULES = st.builds(
    RopeRule,
    rotary_share=st.sampled_from([0.5, 1.0]),
    interleaved=st.booleans(),
    factor=st.sampled_from([1.0, 1.2]),
    row_tokens=st.sampled_from([1 << 30, 23, 7]),
)
PROMPTS = st.integers(1, 90)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 7), st.integers(1, 8)),
        st.tuples(st.just("steps"), st.integers(1, 7), st.integers(5, 12)),
        st.tuples(st.just("open"), PROMPTS, st.integers(1, 60)),
        st.tuples(st.just("fork"), st.integers(0, 2), st.integers(0, 40)),
        st.tuples(st.just("release"), st.integers(0, 2), st.just(0)),
    ),
    min_size=4,
    max_size=9,
)


def act(world: World, action: str, which: int, number: int) -> None:
    pairs = world.pairs
    if action == "open" and len(pairs) < 3:
        world.open(which, number)
    elif not pairs:
        return
    elif action == "step":
        world.step([p for i, p in enumerate(pairs) if which >> i & 1], number)
    elif action == "steps":
        for _ in range(number):
            world.step([p for i, p in enumerate(pairs) if which >> i & 1], 1)
    elif action == "fork" and len(pairs) < 3:
        world.fork(pairs[which % len(pairs)], number)
    elif action == "release":
        world.release(pairs[which % len(pairs)])


def test_the_cache_attends_as_the_method_says(device):
    tally: Counter[str] = Counter()

    @settings(deadline=None, max_examples=250, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(MODELS, configs(), RULES, st.integers(0, 2**32), PROMPTS, ACTIONS)
    def check(geometry, config, rule, seed, prompt, actions):
        world = World(geometry, config, rule, seed, device)
        world.open(prompt, 60)
        for action in actions:
            act(world, *action)
        world.end()
        tally.update(world.tally)

    check()
    # Not vacuous: how many layers of steps were compared, and how few were too close to call.
    assert tally["sparse"] > 1500
    assert tally["generated chunks in context"] > 500
    assert tally["exact"] > 300
    assert tally["stats"] > 300
    assert tally["forks"] > 50
    assert tally["skipped"] < 0.05 * tally["sparse"]
