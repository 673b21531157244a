"""What every cache method must do, whatever it remembers."""

import pytest
import torch

from shadowkv.cache.base import Geometry
from shadowkv.config import FullConfig, ShadowKVConfig
from shadowkv.errors import CapacityError, ConfigError, NumericsError
from tests.cache.baselines import BASELINES
from tests.cache.worlds import METHODS, World, last_queries, make_cache, make_rope, rebuilt_off, step_together
from tests.ops.truth import assert_within

SMALL = {"rank": 12, "chunk_tokens": 4, "budget_tokens": 16, "outlier_chunks": 2, "local_chunks": 2, "recent_chunks": 6}
LOSSLESS = {"rank": 32, "budget_tokens": 4096, "exact_while_fits": False}
CONFIGS = {
    "full": FullConfig(),
    "shadowkv": ShadowKVConfig(**SMALL),
    "shadowkv-lru": ShadowKVConfig(**SMALL, resident_tokens=32, attend="resident", fetch_cap_chunks=2),
    "shadowkv-device": ShadowKVConfig(**SMALL, value_store="device", reuse=False),
    **BASELINES,
}


@pytest.fixture
def geometry(dtype: torch.dtype) -> Geometry:
    return Geometry(layers=2, heads=6, kv_heads=2, head_dim=16, dtype=dtype)


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request):
    return request.param


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5, 15, 16, 17, 47, 48, 49, 50, 97, 200])
def test_short_and_long_prompts_are_exact_when_everything_may_be_attended(geometry, device, prompt):
    """Full rank and a budget beyond the context, with the whole sparse machinery on the way."""
    settings = SMALL | LOSSLESS
    cache = make_cache(geometry, ShadowKVConfig(**settings), device)
    world = World.start(cache, prompt, prompt + 80)
    for tokens in [1, 1, 5, 1] + [1] * 40:
        for got, want in world.step(tokens):
            assert_within(got, want)
    assert cache.stats(world.seq).attention == ("sparse" if prompt + 48 > 24 else "exact")


@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 15, 16, 17, 30])
def test_what_fits_is_attended_exactly_at_any_rank(geometry, device, config, prompt):
    cache = make_cache(geometry, config, device)
    world = World.start(cache, prompt, prompt + 200)
    for _ in range(40 - prompt if prompt < 40 else 0):
        for got, want in world.step():
            assert_within(got, want)


@pytest.mark.parametrize("kind", ["constant", "zero", "duplicated"])
def test_degenerate_keys_are_exact_with_truncated_rank(geometry, device, kind):
    settings = SMALL | LOSSLESS | {"rank": 4}
    cache = make_cache(geometry, ShadowKVConfig(**settings), device)
    prompt, g = 90, geometry
    row = torch.randn(g.kv_heads, g.head_dim, device=device, dtype=g.dtype)
    few = torch.randn(4, g.kv_heads, g.head_dim, device=device, dtype=g.dtype)
    pre = {
        "constant": row.expand(prompt, -1, -1),
        "zero": torch.zeros(prompt, g.kv_heads, g.head_dim, device=device, dtype=g.dtype),
        "duplicated": few[torch.arange(prompt) % 4],
    }[kind]
    world = World.start(cache, prompt, prompt + 8, [pre.clone() for _ in range(g.layers)])
    for _ in range(4):
        for got, want in world.step():
            assert_within(got, want)


def test_a_key_bias_takes_no_rank(geometry, device):
    """A bias ten times the keys' norm: centred keys rebuild as well as keys without the bias."""
    g, prompt = geometry, 120
    settings = SMALL | LOSSLESS | {"rank": 6}
    low = [
        (torch.randn(prompt, 6, device=device) @ torch.randn(6, g.key_dim, device=device)).view(prompt, g.kv_heads, -1)
        for _ in range(g.layers)
    ]
    bias = 10 * torch.randn(g.kv_heads, g.head_dim, device=device) / g.head_dim**0.5 * low[0].norm(dim=-1).mean()
    off = {}
    for centre in (True, False):
        cache = make_cache(g, ShadowKVConfig(**settings, centre_keys=centre), device)
        world = World.start(cache, prompt, prompt + 4, [(x + bias).to(g.dtype) for x in low])
        seq = world.seq
        rebuilt = seq.tensors["coeff.0"].flatten(0, 1)[:64].float() @ seq.tensors["basis.0"].flatten(0, 1).float().T
        rebuilt = rebuilt + seq.tensors["mean.0"].flatten()
        off_S = (rebuilt.double() - (low[0] + bias).flatten(1)[:64].double()).norm(dim=1)
        off[centre] = off_S / rebuilt_off(seq, 0, world.k[0])[:64]
    assert off[True].max() <= 1
    assert off[False].mean() > 10  # the direction of the bias displaces one that is needed


def test_nan_keys_are_refused_by_layer(geometry, device, config):
    cache = make_cache(geometry, config, device)
    for prompt in (6, 150):
        seq = cache.open(prompt + 4)
        cache.begin_prompt(seq, prompt)
        pre = torch.randn(prompt, geometry.kv_heads, geometry.head_dim, device=device, dtype=geometry.dtype)
        queries = last_queries(cache, prompt)
        cache.take_layer(0, seq, pre, pre.transpose(0, 1), pre.transpose(0, 1), queries)
        pre[prompt // 2, 0, 3] = torch.nan
        with pytest.raises(NumericsError, match="layer 1"):
            cache.take_layer(1, seq, pre, pre.transpose(0, 1), pre.transpose(0, 1), queries)


def test_capacity_is_checked_before_anything_is_written(geometry, device, config):
    cache = make_cache(geometry, config, device)
    with pytest.raises(CapacityError, match="prompt of 101"):
        cache.begin_prompt(cache.open(100), 101)
    world = World.start(cache, 98, 100)
    world.step()
    world.step()
    # Bytes, since memory that nobody has written yet may be NaN, which equals nothing.
    before = {name: tensor.view(torch.uint8).clone() for name, tensor in world.seq.tensors.items()}
    with pytest.raises(CapacityError, match="100 of 100"):
        world.step()
    assert world.seq.tokens == 100
    assert all(torch.equal(before[name], tensor.view(torch.uint8)) for name, tensor in world.seq.tensors.items())
    with pytest.raises(ConfigError):
        cache.open(0)


@pytest.mark.parametrize("capacity", [1, 7, 48, 49, 300])
def test_declared_bytes_are_the_bytes_taken_and_release_gives_all_back(geometry, device, config, capacity):
    cache = make_cache(geometry, config, device)
    price = cache.price(geometry, config, capacity)
    seqs = [cache.open(capacity) for _ in range(3)]
    assert cache.device_arena.used_bytes == 3 * price.device_bytes
    assert cache.host_arena.used_bytes == 3 * price.host_bytes
    tensors = [t for t in seqs[0].tensors.values() if t.device == cache.device_arena.device]
    assert sum(t.numel() * t.element_size() for t in tensors) <= price.device_bytes + price.host_bytes
    for seq in (seqs[1], seqs[0], seqs[2]):
        cache.release(seq)
    assert cache.device_arena.used_bytes == cache.host_arena.used_bytes == 0
    assert cache.device_arena.largest_free_bytes == cache.device_arena.size_bytes


def test_memory_that_is_not_there_is_refused_whole(geometry, device, config):
    price = METHODS[type(config)].price(geometry, config, 400)
    cache = make_cache(geometry, config, device, size_bytes=max(price.device_bytes, price.host_bytes) * 2 + 4096)
    first, second = cache.open(400), cache.open(400)
    used = cache.device_arena.used_bytes, cache.host_arena.used_bytes
    with pytest.raises(CapacityError, match="400 tokens needs"):
        cache.open(400)
    assert (cache.device_arena.used_bytes, cache.host_arena.used_bytes) == used
    cache.release(first)
    cache.release(second)


def test_a_row_in_a_batch_equals_the_row_alone(geometry, device, config):
    lengths = [3, 37, 150]
    results = {}
    for order in ([0], [1], [2], [0, 1, 2], [2, 0, 1]):
        cache = make_cache(geometry, config, device)
        worlds = []
        for i in order:
            torch.manual_seed(i)
            worlds.append(World.start(cache, lengths[i], lengths[i] + 40))
        for step in range(30):
            inputs = {}
            for i in order:
                torch.manual_seed(1000 * i + step)
                inputs[i] = _one_step_inputs(geometry, device)
            for i, outputs in zip(order, _step_with(cache, worlds, [inputs[i] for i in order]), strict=True):
                alone = results.setdefault((i, step), outputs)
                assert all(torch.equal(a, b) for a, b in zip(outputs, alone, strict=True))


def _one_step_inputs(g, device):
    return [
        (
            torch.randn(g.heads, 1, g.head_dim, device=device, dtype=g.dtype),
            torch.randn(g.kv_heads, 1, g.head_dim, device=device, dtype=g.dtype),
            torch.randn(g.kv_heads, 1, g.head_dim, device=device, dtype=g.dtype),
        )
        for _ in range(g.layers)
    ]


def _step_with(cache, worlds, inputs):
    from shadowkv.ops.attention import decode_attention

    seqs = [world.seq for world in worlds]
    cache.extend(seqs, 1)
    outputs = [[] for _ in worlds]
    for layer in range(cache.geometry.layers):
        q, k, v = (torch.stack([rows[layer][j] for rows in inputs]) for j in range(3))
        cache.append(layer, seqs, k, v)
        if cache.foresees and layer:
            cache.foresee(layer, q)
        for i, view in enumerate(cache.view(layer, seqs, q)):
            outputs[i].append(decode_attention(q[i], view))
    return outputs


@pytest.mark.parametrize("prompt", [5, 40, 150])
def test_a_fork_goes_on_like_the_original_and_apart_from_it(geometry, device, config, prompt):
    cache = make_cache(geometry, config, device)
    world = World.start(cache, prompt, prompt + 20)
    for _ in range(7):
        world.step()
    twin = World(cache, cache.fork(world.seq, prompt + 120), list(world.k), list(world.v))
    outputs = []
    for w in (world, twin):
        torch.manual_seed(5)
        outputs.append([[got for got, _ in w.step()] for _ in range(10)])
    for a, b in zip(*outputs, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    for _ in range(100):
        twin.step()
    assert world.seq.tokens == prompt + 17
    cache.release(world.seq)
    twin.step()
    with pytest.raises(CapacityError):
        cache.fork(twin.seq, prompt)


@pytest.mark.parametrize("prompt", [1, 5, 40, 44, 45, 46, 47, 48, 49, 50, 52, 150])
def test_a_fork_with_more_room_goes_on_as_if_it_had_had_it_from_the_start(geometry, device, config, prompt):
    """As contexts do: reserved for their prompt alone, and forked with room for a question and its answer."""
    outputs = []
    for capacities in ((prompt + 60,), (prompt, prompt + 60), (prompt, prompt + 1, prompt + 60)):
        cache = make_cache(geometry, config, device)
        torch.manual_seed(6)
        world = World.start(cache, prompt, capacities[0])
        for capacity in capacities[1:]:
            source, world = world.seq, World(cache, cache.fork(world.seq, capacity), list(world.k), list(world.v))
            cache.release(source)
        outputs.append([got for tokens in [5, 1, 1, 4] + [1] * 40 for got, _ in world.step(tokens)])
    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True))


def test_several_appended_queries_are_causal(geometry, device):
    """A block of new tokens gives each what it would have had alone, where everything is attended."""
    settings = SMALL | LOSSLESS | {"query_block_tokens": 8}
    for config in (FullConfig(), ShadowKVConfig(**settings)):
        cache = make_cache(geometry, config, device)
        world = World.start(cache, 101, 200)
        for tokens in (8, 3, 8, 1, 8):
            for got, want in world.step(tokens):
                assert_within(got, want)


def test_unequal_rows_step_together(geometry, device):
    settings = SMALL | LOSSLESS
    cache = make_cache(geometry, ShadowKVConfig(**settings), device)
    worlds = [World.start(cache, n, n + 60) for n in (1, 24, 25, 163)]
    for _ in range(50):
        for pairs in step_together(worlds):
            for got, want in pairs:
                assert_within(got, want)


def test_rope_of_another_layout_and_factor(geometry, device):
    settings = SMALL | LOSSLESS
    rope = make_rope(geometry, device, interleaved=True, factor=1.3)
    cache = make_cache(geometry, ShadowKVConfig(**settings), device, rope)
    world = World.start(cache, 77, 150)
    for _ in range(60):
        for got, want in world.step():
            assert_within(got, want)
