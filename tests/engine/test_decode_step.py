"""The step by kernels gives every row what the plain path gives it, whoever is beside it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shadowkv.cache.arena import Arena
from shadowkv.cache.base import Cache, CachedSequence
from shadowkv.cache.methods import method_of
from shadowkv.cache.selective import SelectiveCache
from shadowkv.cache.shadowkv import ShadowKVCache
from shadowkv.config import (
    CacheConfig,
    FullConfig,
    InfiniGenConfig,
    LokiConfig,
    OracleConfig,
    QuestConfig,
    RandomConfig,
    SelectionConfig,
    ShadowKVConfig,
    SnapKVConfig,
    StreamingConfig,
)
from shadowkv.engine.graphs import StepRunner, padded_rows
from shadowkv.engine.runner import Runner
from shadowkv.models.decoder import Decoder
from shadowkv.models.spec import ModelSpec, RopeSpec
from tests.engine.tiny import prompt, tiny_decoder, tiny_spec
from tests.rounding import allowance

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The interpreter runs programs one after the other, also those that find nothing to do."""
    if device.type == "cpu":
        from shadowkv.ops.triton import keys, values

        monkeypatch.setattr(values, "PROGRAMS", 2)
        monkeypatch.setattr(keys, "TARGET_PROGRAMS", 8)


SMALL = {"rank": 24, "chunk_tokens": 4, "budget_tokens": 16, "outlier_chunks": 3, "local_chunks": 1, "recent_chunks": 3}
METHODS: dict[str, CacheConfig] = {
    "full": FullConfig(),
    "selected": ShadowKVConfig(**SMALL),
    "lru": ShadowKVConfig(**SMALL, resident_tokens=32),
    "bounded": ShadowKVConfig(**SMALL, resident_tokens=32, attend="resident", fetch_cap_chunks=1),
    "late": ShadowKVConfig(
        **SMALL, resident_tokens=32, attend="resident", fetch_cap_chunks=1, late_fetch_chunks=2, value_store="device"
    ),
    "ranks": ShadowKVConfig(**(SMALL | {"rank": (16, 40), "budget_tokens": 10})),
}
EXACT = {"budget_tokens": 16, "sink_tokens": 4, "recent_tokens": 3}
METHODS |= {
    "quest": QuestConfig(**EXACT, page_tokens=8, dense_layers=1),
    "quest-host": QuestConfig(**EXACT, page_tokens=4, dense_layers=0, value_store="host"),
    "loki": LokiConfig(**EXACT),
    "infinigen": InfiniGenConfig(**EXACT, skew_queries=6),
    "oracle": OracleConfig(**EXACT, chunk_tokens=4),
    "random": RandomConfig(**EXACT, chunk_tokens=8, selection_seed=3),
    "selection": SelectionConfig(**EXACT, chunk_tokens=4, outlier_chunks=3),
    "streaming": StreamingConfig(budget_tokens=65, query_block_tokens=8),
    "snapkv": SnapKVConfig(budget_tokens=24, window_tokens=8, pool_tokens=3),
}
CAPACITY = 200


def spec_of(rope_kind: str = "default") -> ModelSpec:
    rope = RopeSpec("default", {"rope_type": "default", "rope_theta": 10000.0}, 64, False, 8192)
    if rope_kind == "dynamic":
        parameters = {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "partial_rotary_factor": 0.5,
        }
        rope = RopeSpec("dynamic", parameters, 32, False, 50)
    return replace(tiny_spec(), head_dim=64, rope=rope, qk_norm=rope_kind == "dynamic", qkv_bias=True)


def make_runner(config: CacheConfig, decoder: Decoder, *, kernels: bool, max_rows: int = 4) -> Runner:
    geometry, method = decoder.spec.geometry(decoder.dtype), method_of(config)
    host = Arena(4 << 20, "cpu", pinned=decoder.device.type == "cuda")
    cache = method(geometry, config, decoder.rope, Arena(32 << 20, decoder.device), host)
    step = cache.make_step(max_rows, CAPACITY) if kernels else None
    assert kernels == (step is not None)
    return Runner(decoder, cache, StepRunner(decoder, step) if step else None)


def last_exact(cache: Cache[Any, Any]) -> int:
    """The most tokens of a sequence that is not yet compressed, or selected from."""
    if isinstance(cache, ShadowKVCache):
        return cache.exact.fits
    if isinstance(cache, SelectiveCache):
        c = cache.config
        return max(n for n in range(CAPACITY) if not cache.selects(c, cache.context_units(c, n)))
    return 65


def order_of(step: int) -> list[int]:
    """Rows come, go and change places."""
    return [0, 1, 2] if step % 5 else [2, 0]


def decoded(runner: Runner, seqs: list[CachedSequence], steps: int) -> Tensor:
    """Logits of each row's steps, one below the other."""
    made = []
    for step in range(steps):
        tokens = prompt(3, seed=step)
        rows = [(seqs[i], tokens[i]) for i in order_of(step)]
        for together in [rows] if runner.steps else [[row] for row in rows]:
            made.append(runner.decode(*map(list, zip(*together, strict=True))).clone())
    return torch.cat(made)


def allowed_by_rounding(runner: Runner, seqs: list[CachedSequence], steps: int) -> float:
    """Between two ways to the same sums, each as far from the exact ones as rounding may put it."""

    def again() -> Tensor:
        forks = [runner.cache.fork(seq, CAPACITY) for seq in seqs]
        logits_XV = decoded(runner, forks, steps)
        for fork in forks:
            runner.cache.release(fork)
        return logits_XV

    allowed = 2 * allowance(again, draws=2)
    assert allowed < 0.01, "a close call; take another seed"
    return allowed


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("rope", ["default", "dynamic"])
def test_every_row_decodes_as_in_plain_pytorch(name: str, rope: str, device: torch.device) -> None:
    if rope == "dynamic" and name not in ("full", "bounded", "streaming"):
        pytest.skip("one method suffices that rebuilds keys, and one that turns them")
    decoder = tiny_decoder(device, spec=spec_of(rope))
    plain, batched = (make_runner(METHODS[name], decoder, kernels=kernels) for kernels in (False, True))
    # Those that keep every key index what is new after three tokens; chunks that are compressed join for longer.
    steps = 12 if isinstance(plain.cache, ShadowKVCache) else 8
    # Exact and staying so; exact until it is compressed; compressed.
    lengths = (7, last_exact(plain.cache) - steps // 2 + 1, 150)
    mine, theirs = ([runner.prefill(CAPACITY, prompt(n))[0] for n in lengths] for runner in (plain, batched))
    allowed = allowed_by_rounding(plain, mine, steps)
    assert (decoded(batched, theirs, steps) - decoded(plain, mine, steps)).abs().max() <= allowed
    for a, b in zip(mine, theirs, strict=True):
        left, right = plain.cache.stats(a), batched.cache.stats(b)
        assert (left.hits, left.misses, left.fetched_chunks) == (right.hits, right.misses, right.fetched_chunks)
        assert left.fetched_bytes == right.fetched_bytes
        assert left.attention == right.attention


@pytest.mark.parametrize("name", ["late", "selection", "loki", "streaming"])
def test_a_turn_is_appended_between_steps(name: str, device: torch.device) -> None:
    decoder = tiny_decoder(device, spec=spec_of())

    def logits(*, kernels: bool) -> Tensor:
        runner = make_runner(METHODS[name], decoder, kernels=kernels)
        seq, _ = runner.prefill(CAPACITY, prompt(150))
        runner.decode([seq], [3])
        runner.append(seq, prompt(9))
        copy = runner.cache.fork(seq, CAPACITY)
        runner.decode([seq], [4])
        return torch.cat([runner.decode([copy], [5]).clone(), runner.decode([seq], [6]).clone()])

    allowed = 2 * allowance(lambda: logits(kernels=False), draws=2)
    assert (logits(kernels=True) - logits(kernels=False)).abs().max() <= allowed


def test_batch_sizes_round_up_to_few() -> None:
    sizes = {rows: padded_rows(rows, 64) for rows in range(1, 65)}
    assert all(size >= rows for rows, size in sizes.items())
    assert sorted(set(sizes.values())) == [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert padded_rows(14, 14) == 14
    assert padded_rows(3, 3) == 3
