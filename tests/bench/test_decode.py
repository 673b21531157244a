"""Batches of a tiny model on a CPU: everything but the figures."""

from dataclasses import replace

import pytest
import torch

from shadowkv.bench.decode import Batch, Declined, Decoded, Job, TimedSink, prompt_of
from shadowkv.bench.geometries import geometry_spec
from shadowkv.bench.suite import decode_all, host_bytes, plan_runs
from shadowkv.bench.synthetic import DIRECTIONS, random_decoder, synthetic_layer, synthetic_prompt
from shadowkv.bench.traffic import Step, full_kv_bytes
from shadowkv.cache.arena import Arena
from shadowkv.cache.methods import method_of
from shadowkv.config import CacheConfig, FullConfig, QuestConfig, ShadowKVConfig, SnapKVConfig
from shadowkv.engine.memory import Memory
from shadowkv.errors import CapacityError
from shadowkv.models.decoder import Decoder
from shadowkv.models.rope import build_rope
from shadowkv.ops.chunks import chunk_means, min_cosine, split_chunks
from shadowkv.ops.lowrank import find_subspace
from tests.bench.fakes import H200

SPEC = geometry_spec("tiny")
CPU = torch.device("cpu")
ROOM = Memory(64 << 20, 64 << 20)
SPARSE = ShadowKVConfig(budget_tokens=128, outlier_chunks=4, rank=8)
QUICK = Job(steps=4, warmup=1, traced_steps=0, batch=2)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return random_decoder(SPEC, device=CPU, dtype=torch.float32)


def run(decoder: Decoder, methods: dict[str, CacheConfig], job: Job, memory: Memory = ROOM) -> list[Decoded | Declined]:
    runs = plan_runs(SPEC, methods, [1024], job, torch.float32, memory, bandwidth=None)
    return decode_all(decoder, runs, job, H200, ["random weights"], lambda *_: None)


def test_random_weights_keep_activations_near_one(decoder: Decoder) -> None:
    cache = method_of(FullConfig())(
        SPEC.geometry(torch.float32), FullConfig(), decoder.rope, Arena(1 << 20, CPU), Arena(0, CPU)
    )
    seq = cache.open(64)
    hidden_SM = decoder.prefill(torch.arange(64), cache, seq, want_positions="all")
    assert 0.5 < float(hidden_SM.std()) < 3
    assert float(decoder.logits(hidden_SM).std()) < 3


def test_synthetic_keys_are_of_low_rank() -> None:
    spec = geometry_spec("llama-3.1-8b")
    gen, rope = torch.Generator().manual_seed(0), build_rope(spec)
    k_pre_SKD, k_KSD, v_KSD = synthetic_layer(spec, rope, 1500, torch.float32, gen)
    assert k_pre_SKD.shape == (1500, spec.kv_heads, spec.head_dim)
    assert k_KSD.shape == v_KSD.shape == (spec.kv_heads, 1500, spec.head_dim)
    assert float(find_subspace(k_pre_SKD, DIRECTIONS, centre=True).energy) > 0.95
    assert float(find_subspace(v_KSD.transpose(0, 1), DIRECTIONS, centre=True).energy) < 0.5
    landmarks_KCD = chunk_means(split_chunks(k_KSD, 8))
    assert float(min_cosine(split_chunks(k_KSD, 8)).median()) > 0.5
    assert torch.isfinite(landmarks_KCD).all()


@pytest.mark.parametrize(
    "config", [FullConfig(), SPARSE, QuestConfig(), SnapKVConfig()], ids=lambda c: type(c).__name__
)
def test_every_method_takes_a_synthetic_prompt(decoder: Decoder, config: CacheConfig) -> None:
    geometry, method = SPEC.geometry(torch.float32), method_of(config)
    price = method.price(geometry, config, 1100)
    cache = method(geometry, config, decoder.rope, Arena(price.device_bytes, CPU), Arena(price.host_bytes, CPU))
    seq, sink = cache.open(1100), TimedSink(cache, CPU)
    synthetic_prompt(cache, sink, seq, SPEC, 1024, seed=0)
    assert seq.tokens == 1024
    assert sink.seconds() > 0
    hidden_BTM = decoder.forward(torch.tensor([[1]]), cache, [seq])
    assert torch.isfinite(hidden_BTM).all()


def test_methods_beside_full_attention(decoder: Decoder) -> None:
    full, shadow = run(decoder, {"full": FullConfig(), "shadowkv": SPARSE}, QUICK)
    assert isinstance(full, Decoded)
    assert isinstance(shadow, Decoded)
    assert (full.batch, shadow.batch, full.step.repetitions) == (2, 2, 4)
    assert full.speedup == 1.0
    assert shadow.speedup == pytest.approx(shadow.tokens_per_second / full.tokens_per_second)
    assert shadow.fetched_bytes > 0
    assert shadow.traffic is not None
    assert shadow.traffic.bus_bytes == pytest.approx(shadow.fetched_bytes, rel=0.01)
    assert shadow.hbm_ms == pytest.approx(H200.device_ms(shadow.traffic.device_bytes))
    assert shadow.equivalent_formula_gb_s is not None
    assert full.equivalent_formula_gb_s is None
    assert full.prefill_s is None
    assert "random weights" in full.synthetic
    assert any(text.startswith("synthetic keys and values") for text in full.synthetic)
    assert full.traffic is not None
    assert full.traffic.device["keys and values"] == full_kv_bytes(SPEC, Step(2, 1024 + 1 + 4 - 2, 4))


@pytest.mark.parametrize("hit_rate", [0.25, 0.75])
def test_a_hit_rate_that_is_asked_for(decoder: Decoder, hit_rate: float) -> None:
    job = Job(steps=12, warmup=3, traced_steps=0, batch=1, hit_rate=hit_rate)
    (row,) = run(decoder, {"shadowkv": SPARSE}, job)
    assert isinstance(row, Decoded)
    assert row.hit_rate == pytest.approx(hit_rate, abs=0.08)
    assert any(text.startswith(f"synthetic hit rate {hit_rate:g}") for text in row.synthetic)


def test_a_larger_resident_set_does_not_know_what_comes(decoder: Decoder) -> None:
    config = replace(SPARSE, attend="resident", resident_tokens=512)
    job = Job(steps=8, warmup=2, traced_steps=0, batch=1, hit_rate=0.5)
    (row,) = run(decoder, {"shadowkv": config}, job)
    assert isinstance(row, Decoded)
    assert row.hit_rate == pytest.approx(0.5, abs=0.08)


def test_real_prompts_are_timed_apart(decoder: Decoder) -> None:
    job = Job(steps=2, warmup=1, traced_steps=0, batch=1, prompt=tuple(range(90)))
    (row,) = run(decoder, {"full": FullConfig()}, job)
    assert isinstance(row, Decoded)
    assert row.prefill_s is not None
    assert 0 < row.index_s < row.prefill_s
    assert row.synthetic == ("random weights",)


def test_prompts_start_at_different_places() -> None:
    assert prompt_of([1, 2, 3, 4], 6, 0, 2).tolist() == [1, 2, 3, 4, 1, 2]
    assert prompt_of([1, 2, 3, 4], 3, 1, 2).tolist() == [3, 4, 1]


def test_as_many_as_fit_and_what_does_not(decoder: Decoder) -> None:
    # Full attention needs 0.5 MB a sequence; ShadowKV, on the device, less.
    fixed = plan_runs(SPEC, {"full": FullConfig()}, [1024], QUICK, torch.float32, ROOM, bandwidth=None)[0].plan
    room = fixed.weight_bytes + fixed.activation_bytes + 500_000
    rows = run(decoder, {"full": FullConfig(), "shadowkv": SPARSE}, QUICK, Memory(room, 4 << 20))
    assert isinstance(rows[0], Declined)
    assert "for its cache on the device" in rows[0].reason
    assert isinstance(rows[1], Decoded)
    with pytest.raises(CapacityError, match=r"one sequence of 1,029 tokens needs [\d,]+ bytes for weights"):
        run(decoder, {"full": FullConfig()}, QUICK, Memory(room, 0))


def test_host_memory_is_allocated_once_for_the_largest_run() -> None:
    runs = plan_runs(
        SPEC, {"full": FullConfig(), "shadowkv": SPARSE}, [1024, 2048], QUICK, torch.float32, ROOM, bandwidth=None
    )
    assert host_bytes(runs, QUICK) == 2 * max(run.plan.chosen.sequence_host_bytes for run in runs)


def test_steps_feed_their_own_tokens() -> None:
    class Counting:
        def __init__(self) -> None:
            self.given: list[list[int]] = []

        def decode(self, seqs: list[object], tokens: list[int]) -> torch.Tensor:
            self.given.append(list(tokens))
            return torch.nn.functional.one_hot(torch.tensor(tokens) + 1, 10).float()

    counting = Counting()
    batch = Batch(counting, [], [0, 3])  # type: ignore[arg-type]
    assert batch.step() > 0
    batch.step()
    assert counting.given == [[0, 3], [1, 4]]
