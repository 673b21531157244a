"""A sequence must not notice what the memory that it got holds: its last owner's bytes, or NaN."""

import pytest
import torch

from shadowkv.cache.base import Geometry
from shadowkv.config import FullConfig, ShadowKVConfig
from tests.cache.baselines import BASELINES
from tests.cache.worlds import World, make_cache

SMALL = {"rank": 12, "chunk_tokens": 4, "budget_tokens": 16, "outlier_chunks": 2, "local_chunks": 2, "recent_chunks": 6}
CONFIGS = {
    "full": FullConfig(),
    "selected": ShadowKVConfig(**SMALL),
    "resident": ShadowKVConfig(**SMALL, resident_tokens=32, attend="resident", fetch_cap_chunks=2),
    "window": ShadowKVConfig(**SMALL, exact_while_fits=False, value_store="device", reuse=False),
    **BASELINES,
}


def run(geometry, config, device, byte: int, prompt: int) -> list[torch.Tensor]:
    cache = make_cache(geometry, config, device, size_bytes=1 << 20)
    for arena in (cache.device_arena, cache.host_arena):
        everything = arena.allocate(arena.size_bytes)
        arena.carve(everything, 0, (arena.size_bytes,), torch.uint8).fill_(byte)
        arena.free(everything)
    torch.manual_seed(3)
    world = World.start(cache, prompt, prompt + 70)
    outputs = [got for tokens in [1, 5, 1, 3] + [1] * 40 for got, _ in world.step(tokens)]
    twin = World(cache, cache.fork(world.seq, prompt + 90), list(world.k), list(world.v))
    return outputs + [got for _ in range(20) for got, _ in twin.step()]


@pytest.mark.parametrize("prompt", [1, 14, 25, 60])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_what_the_memory_held_before_does_not_matter(device, dtype, config, prompt):
    """Bytes of 0xff are what the ids of empty slots leave behind, and NaN in every float dtype."""
    geometry = Geometry(layers=2, heads=4, kv_heads=2, head_dim=16, dtype=dtype)
    clean, *others = (run(geometry, config, device, byte, prompt) for byte in (0x00, 0xFF, 0x7B))
    assert all(torch.isfinite(x).all() for x in clean)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(clean, other, strict=True))
