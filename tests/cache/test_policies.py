"""What may change only how much is fetched, and what the counters say about it."""

import copy
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from shadowkv.cache.base import Cache, CacheStats, Geometry
from shadowkv.config import ShadowKVConfig
from shadowkv.errors import CapacityError, ConfigError
from shadowkv.ops.attention import decode_attention
from shadowkv.ops.contract.bounds import Bounded
from shadowkv.ops.rope import Rope
from shadowkv.ops.views import DenseView, SlotView
from tests.cache.worlds import World, error, make_cache, rebuilt_off, touched, view_attention
from tests.ops.truth import assert_within
from tests.rounding import share

BASE = ShadowKVConfig(
    rank=10, chunk_tokens=4, budget_tokens=16, outlier_chunks=2, local_chunks=1, recent_chunks=4, exact_while_fits=False
)


@pytest.fixture
def geometry(dtype: torch.dtype) -> Geometry:
    return Geometry(layers=2, heads=6, kv_heads=2, head_dim=16, dtype=dtype)


class Feed:
    """The same random tokens and queries for every cache, slowly turning so that selections recur."""

    def __init__(self, geometry: Geometry, device: torch.device, prompt: int, steps: list[int]) -> None:
        g = geometry

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device)

        self.prompt = [
            tuple(
                x.to(g.dtype) for x in (normal(prompt, g.kv_heads, g.head_dim), normal(g.kv_heads, prompt, g.head_dim))
            )
            for _ in range(g.layers)
        ]
        q = 2 * normal(g.layers, g.heads, 1, g.head_dim)
        self.steps = []
        for tokens in steps:
            q = 0.8 * q + 1.2 * normal(g.layers, g.heads, 1, g.head_dim)
            queries = q + 0.3 * normal(g.layers, g.heads, tokens, g.head_dim)
            k_v = normal(2, g.layers, g.kv_heads, tokens, g.head_dim)
            self.steps.append(tuple(x.to(g.dtype) for x in (queries, *k_v)))


def start(cache: Cache, feed: Feed):
    seq = cache.open(200)
    device = cache.device_arena.device
    tokens = feed.prompt[0][0].shape[0]
    cache.begin_prompt(seq, tokens)
    positions = torch.arange(tokens, device=device)
    rows = torch.full((tokens,), cache.rope.row(tokens), device=device)
    for layer, (pre, v) in enumerate(feed.prompt):
        cache.take_layer(layer, seq, pre, cache.rope.rotate(pre.transpose(0, 1), positions, rows), v)
    return seq


class Step(NamedTuple):
    """By layer: attention, how far rounding may put it, and the chunks that were chosen."""

    outputs: list[Tensor]
    allowed: list[Tensor]
    chosen: list[list[set[int]]]


def step(cache: Cache, seq, q: Tensor, k: Tensor, v: Tensor) -> Step:
    cache.extend([seq], q.shape[2])
    done = Step([], [], [])
    for layer in range(cache.geometry.layers):
        cache.append(layer, [seq], k[layer][None], v[layer][None])
        (view,) = cache.view(layer, [seq], q[layer][None])
        done.outputs.append(decode_attention(q[layer], view))
        done.allowed.append(view_attention(q[layer], view, rebuilt_off(seq, layer, view.k_KED)).error)
        done.chosen.append(touched(seq, layer))
    return done


STEPS = [1] * 12 + [5, 1, 3] + [1] * 25


def run(geometry: Geometry, config: ShadowKVConfig, device: torch.device, feed: Feed):
    cache = make_cache(geometry, config, device)
    seq = start(cache, feed)
    return [step(cache, seq, *tensors) for tensors in feed.steps], cache.stats(seq)


POLICIES = {
    "device values": {"value_store": "device"},
    "no reuse": {"reuse": False},
    "no reuse, device values": {"reuse": False, "value_store": "device"},
    "one slot more": {"resident_tokens": 20},
    "twice": {"resident_tokens": 32},
    "four times, device values": {"resident_tokens": 64, "value_store": "device"},
    "more than there is": {"resident_tokens": 400},
}


def test_the_resident_set_decides_what_is_fetched_and_nothing_else(geometry, device):
    """Same chunks in every step; outputs differ by rounding at most, as keys are rebuilt in other company."""
    feed = Feed(geometry, device, 90, STEPS)
    expected, base = run(geometry, BASE, device, feed)
    fetched = {}
    for name, changes in POLICIES.items():
        got, stats = run(geometry, replace(BASE, **changes), device, feed)
        for one, other in zip(got, expected, strict=True):
            assert one.chosen == other.chosen
            for a, b, *allowed in zip(one.outputs, other.outputs, one.allowed, other.allowed, strict=True):
                assert_within(a, Bounded(b.double(), sum(allowed)))
        assert stats.selected_chunks == base.selected_chunks
        assert stats.misses == stats.fetched_chunks
        fetched[name] = stats.fetched_chunks
    assert fetched["device values"] == base.fetched_chunks
    assert fetched["no reuse"] == fetched["no reuse, device values"] == base.selected_chunks
    sizes = ["no reuse", "device values", "one slot more", "twice", "four times, device values", "more than there is"]
    counts = [fetched[name] for name in sizes]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[1] > counts[-2]


@pytest.mark.parametrize("changes", [{}, {"reuse": False}, {"attend": "resident", "fetch_cap_chunks": 1}])
def test_where_the_values_live_changes_no_bit(geometry, device, changes):
    feed = Feed(geometry, device, 90, STEPS)
    (host, host_stats), (there, there_stats) = (
        run(geometry, replace(BASE, **changes, value_store=store), device, feed) for store in ("host", "device")
    )
    assert (host_stats.hits, host_stats.misses) == (there_stats.hits, there_stats.misses)
    for a, b in zip(host, there, strict=True):
        assert a.chosen == b.chosen
        assert all(torch.equal(x, y) for x, y in zip(a.outputs, b.outputs, strict=True))


def counters(cache: Cache, seq) -> CacheStats:
    return copy.deepcopy(cache.stats(seq))


@pytest.mark.parametrize("attend", ["selected", "resident"])
@pytest.mark.parametrize("cap", [1, 3, 100])
def test_a_step_fetches_at_most_the_cap(geometry, device, attend, cap):
    config = replace(BASE, attend=attend, fetch_cap_chunks=cap, resident_tokens=32)
    cache, feed = make_cache(geometry, config, device), Feed(geometry, device, 90, STEPS)
    seq = start(cache, feed)
    before, heads = counters(cache, seq), geometry.layers * geometry.kv_heads
    for i, tensors in enumerate(feed.steps):
        resident_before = [set(ids) for ids in seq.tensors["resident_ids"].flatten(0, 1).tolist()]
        step(cache, seq, *tensors)
        after = counters(cache, seq)
        fetched, missed = after.fetched_chunks - before.fetched_chunks, after.misses - before.misses
        resident = [set(ids) for ids in seq.tensors["resident_ids"].flatten(0, 1).tolist()]
        new = [len(now - then - {-1}) for now, then in zip(resident, resident_before, strict=True)]
        assert sum(new) == fetched <= missed
        if i == 0:  # fills what is attended from then on
            assert new == [8 if attend == "resident" else 4] * heads
        else:
            assert max(new) <= cap
            assert after.selected_chunks - before.selected_chunks == 4 * heads
        before = after


def test_a_cap_that_nothing_reaches_changes_nothing(geometry, device):
    feed = Feed(geometry, device, 90, STEPS)
    capped, _ = run(geometry, replace(BASE, fetch_cap_chunks=4), device, feed)
    free, _ = run(geometry, BASE, device, feed)
    for a, b in zip(capped, free, strict=True):
        assert a.chosen == b.chosen
        assert all(torch.equal(x, y) for x, y in zip(a.outputs, b.outputs, strict=True))


@pytest.mark.parametrize("resident", [16, 40])
@pytest.mark.parametrize("attend", ["selected", "resident"])
def test_asking_the_same_again_costs_nothing(geometry, device, resident, attend):
    """Hits plus misses are what was selected; equal consecutive queries have a hit rate of 1."""
    config = replace(BASE, resident_tokens=resident, attend=attend, recent_chunks=12)
    cache, feed = make_cache(geometry, config, device), Feed(geometry, device, 90, [1] * 2)
    seq = start(cache, feed)
    assert cache.stats(seq).hit_rate is None
    assert cache.stats(seq).fetched_bytes == 0
    first_count = (resident if attend == "resident" else 16) // 4
    heads = geometry.layers * geometry.kv_heads
    step(cache, seq, *feed.steps[0])
    first = counters(cache, seq)
    assert (first.hits, first.misses) == (0, heads * first_count)
    for _ in range(5):
        step(cache, seq, *feed.steps[0])
    again = counters(cache, seq)
    assert again.misses == first.misses
    assert again.hits == 5 * heads * 4
    assert again.fetched_bytes == first.fetched_bytes == first.misses * 4 * 16 * geometry.dtype.itemsize
    assert again.hit_rate == again.hits / again.selected_chunks
    step(cache, seq, *feed.steps[1])
    assert cache.stats(seq).selected_chunks == again.selected_chunks + 4 * heads


@pytest.mark.parametrize("rest", range(8))
@pytest.mark.parametrize("exact_while_fits", [True, False])
def test_a_needle_in_the_incomplete_chunk_is_found(geometry, device, rest, exact_while_fits):
    """Contexts of 8k + r tokens, rank and budget far too small: the tail is attended exactly all the same."""
    g, prompt = geometry, 160 + rest
    config = replace(BASE, chunk_tokens=8, rank=4, exact_while_fits=exact_while_fits)
    cache = make_cache(g, config, device)
    pre = [torch.randn(prompt, g.kv_heads, g.head_dim, device=device) for _ in range(g.layers)]
    pre = [(4 * x / x.norm(dim=-1, keepdim=True)).to(g.dtype) for x in pre]  # so each key fits itself best
    world = World.start(cache, prompt, 200, pre)
    for needle in {160, prompt - rest // 2 - 1, prompt - 1} - {prompt}:
        twin = World(cache, cache.fork(world.seq, 190), list(world.k), list(world.v))
        cache.extend([twin.seq], 1)
        for layer in range(g.layers):
            nothing = torch.zeros(1, g.kv_heads, 1, g.head_dim, device=device, dtype=g.dtype)
            cache.append(layer, [twin.seq], nothing, nothing)
            q_K1D = 10 * twin.k[layer][:, needle : needle + 1]
            q_NTD = q_K1D.repeat_interleave(g.heads // g.kv_heads, 0)
            (view,) = cache.view(layer, [twin.seq], q_NTD[None])
            assert isinstance(view, SlotView)
            got = decode_attention(q_NTD, view)
            weights = torch.softmax(q_K1D.double() @ twin.k[layer].double().mT / g.head_dim**0.5, -1)
            missed = float(1 - weights[..., needle].min())
            assert missed < 0.05
            value = twin.v[layer][:, needle : needle + 1]
            want = value.repeat_interleave(g.heads // g.kv_heads, 0).double()
            # What the other keys take of the weight, each way, moves the answer by a value's size.
            spread = float(twin.v[layer].double().norm(dim=-1).max() / value.double().norm(dim=-1).min())
            assert error(got, want) < share(view_attention(q_NTD, view)) + 2 * spread * missed


def test_every_layer_has_its_rank(geometry, device):
    cache = make_cache(geometry, replace(BASE, rank=(3, 31)), device)
    world = World.start(cache, 90, 120)
    for _ in range(3):
        world.step()
    stats = cache.stats(world.seq)
    assert stats.rank == [3, 31]
    assert stats.energy[0] < 0.6 < 0.95 < stats.energy[1]
    assert world.seq.tensors["coeff.0"].shape[-1] == 3
    assert world.seq.tensors["coeff.1"].shape[-1] == 31
    with pytest.raises(ConfigError, match="rank has 3 entries and the model has 2 layers"):
        make_cache(geometry, replace(BASE, rank=(3, 31, 4)), device)


def growing_rope(geometry: Geometry, device: torch.device) -> Rope:
    """Like dynamic scaling: beyond 40 tokens every length has frequencies of its own."""
    half = geometry.head_dim // 2

    def frequencies(length: int) -> tuple[Tensor, float]:
        return (100.0 * max(length, 40)) ** (-torch.arange(half) / half), 1.0

    return Rope(
        frequencies,
        lambda length: length if length > 40 else 0,
        rotary_dim=geometry.head_dim,
        interleaved=False,
        device=device,
    )


@pytest.mark.parametrize(("prompt", "exact_while_fits"), [(30, True), (30, False), (70, True), (70, False)])
def test_keys_keep_the_row_they_were_written_with(geometry, device, prompt, exact_while_fits):
    """At full rank and budget, through compression and flush, a change of row must not show."""
    lossless = replace(BASE, rank=32, budget_tokens=256, outlier_chunks=2, exact_while_fits=exact_while_fits)
    lossless = replace(lossless, recent_chunks=6, local_chunks=1, resident_tokens=256)
    cache = make_cache(geometry, lossless, device, growing_rope(geometry, device))
    world = World.start(cache, prompt, prompt + 90)
    rows_at = {}
    for tokens in [1, 1, 6, 1, 3] + [1] * 60:
        for got, want in world.step(tokens):
            assert_within(got, want)
        for position in range(world.seq.tokens - tokens, world.seq.tokens):
            rows_at[position] = cache.rope.row(world.seq.tokens)
    rows = world.seq.tensors["rope_rows"].tolist()
    assert rows[:prompt] == [cache.rope.row(prompt)] * prompt
    assert all(rows[position] == row for position, row in rows_at.items())
    assert len(set(rows[: world.seq.tokens])) > 10


def test_a_piece_of_a_longer_append_has_the_row_of_the_whole(geometry, device):
    cache = make_cache(geometry, BASE, device, growing_rope(geometry, device))
    seq = World.start(cache, 50, 100).seq
    cache.extend([seq], 3, [60])
    cache.extend([seq], 7, [60])
    assert seq.tensors["rope_rows"][50:60].tolist() == [cache.rope.row(60)] * 10
    cache.extend([seq], 1)
    assert int(seq.tensors["rope_rows"][60]) == cache.rope.row(61)


def test_a_short_sequence_is_kept_whole_and_compressed_only_in_a_longer_copy(
    geometry: Geometry, device: torch.device
) -> None:
    feed = Feed(geometry, device, 150, [1] * 8)
    config = replace(BASE, exact_while_fits=True, dense_tokens=200)
    cache = make_cache(geometry, config, device)
    whole = start(cache, feed)
    assert cache.price(geometry, config, 200).host_bytes == 0
    assert cache.price(geometry, config, 201).host_bytes > 0
    copy = cache.fork(whole, 300)
    usual = start(make_cache(geometry, replace(config, dense_tokens=0), device), feed)
    assert not whole.compressed
    assert cache.stats(whole).attention == "exact"
    for name in ("landmarks", "slot_of_chunk"):
        chunks = usual.context_chunks
        assert torch.equal(copy.tensors[name][:, :, :chunks], usual.tensors[name][:, :, :chunks])
    for tensors in feed.steps:
        for seq in (whole, copy):
            outputs, kinds = step_of(cache, seq, *tensors)
            assert set(kinds) == {DenseView if seq is whole else SlotView}
            assert all(output.isfinite().all() for output in outputs)
    assert (whole.compressed, copy.compressed) == (False, True)


def test_a_compressed_sequence_does_not_fit_into_one_that_is_kept_whole(
    geometry: Geometry, device: torch.device
) -> None:
    feed = Feed(geometry, device, 150, [])
    cache = make_cache(geometry, replace(BASE, exact_while_fits=True, dense_tokens=180), device)
    compressed = start(cache, feed)  # opened for 200 tokens
    assert compressed.compressed
    assert not cache.can_fork(compressed, 170)
    assert cache.can_fork(compressed, 181)
    with pytest.raises(CapacityError, match="170 tokens"):
        cache.fork(compressed, 170)


def step_of(cache: Cache, seq, q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], list[type]]:
    cache.extend([seq], q.shape[2])
    outputs, kinds = [], []
    for layer in range(cache.geometry.layers):
        cache.append(layer, [seq], k[layer][None], v[layer][None])
        (view,) = cache.view(layer, [seq], q[layer][None])
        outputs.append(decode_attention(q[layer], view))
        kinds.append(type(view))
    return outputs, kinds
