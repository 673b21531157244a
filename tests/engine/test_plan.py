"""The memory plan: the published figures, exact prices, refusals."""

import dataclasses

import pytest
import torch

from shadowkv.cache.methods import method_of
from shadowkv.config import FullConfig, ShadowKVConfig
from shadowkv.engine.memory import Memory, available_host_bytes, find_memory
from shadowkv.engine.plan import equivalent_bandwidth, find_savings, make_plan, require_fit
from shadowkv.errors import CapacityError, ConfigError, RequestError
from tests.engine.tiny import tiny_decoder, tiny_engine, tiny_spec

GIB = 1 << 30
PAPER = ShadowKVConfig(rank=160, chunk_tokens=8, budget_tokens=2048, outlier_chunks=48)


def llama_8b():
    """Llama-3.1-8B in numbers."""
    return dataclasses.replace(
        tiny_spec(131072),
        architecture="llama",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=14336,
        vocab=128256,
        rope=dataclasses.replace(tiny_spec().rope, rotary_dim=128, trained_tokens=131072),
    )


def test_the_papers_figures():
    savings = find_savings(llama_8b().geometry(torch.bfloat16), PAPER, 131072)
    assert round(savings.paper_formula, 2) == 7.08
    assert round(savings.true_bytes, 2) == 6.26
    assert 5.8 < savings.all_bytes < savings.true_bytes  # window, slot maps and RoPE rows are reserved too
    assert round(equivalent_bandwidth(PAPER, 131072, 2000, 31.5, 0.6) / 1000, 1) == 7.2


def test_prices_by_kind_are_what_is_reserved(device):
    plan = make_plan(
        llama_8b(),
        PAPER,
        dtype=torch.bfloat16,
        context_tokens=122880,
        output_tokens=1024,
        memory=Memory(140 * GIB, 125 * GIB),
    )
    tokens, layers, width = 123904, 32, 1024
    assert plan.full.device_bytes == {"keys and values": tokens * layers * width * 2 * 2}
    kinds = plan.chosen.device_bytes
    assert kinds["coefficients"] == tokens * 160 * layers * 2
    assert kinds["landmarks"] == tokens // 8 * width * layers * 2
    assert kinds["outliers"] == 48 * 8 * width * layers * 2 * 2
    assert kinds["resident chunks"] == 2048 * width * layers * 2 * 2
    assert kinds["recent window"] == 16 * 8 * width * layers * 2 * 2
    assert plan.chosen.host_bytes == {"values": tokens * width * layers * 2}
    assert plan.weight_bytes == pytest.approx(16.06e9, rel=0.01)
    assert plan.chosen.limit == "host memory"
    assert plan.chosen.largest_batch == 125 * GIB // (tokens * width * layers * 2)
    assert plan.full.limit == "device memory"


@pytest.mark.parametrize("config", [FullConfig(), PAPER], ids=["full", "shadowkv"])
def test_the_largest_batch_fits_and_one_more_does_not(config):
    spec = llama_8b()
    price = method_of(config).price(spec.geometry(torch.bfloat16), config, 60000)
    for shared in (False, True):
        memory = Memory(40 * GIB, 0 if shared else 30 * GIB, shared)
        plan = make_plan(spec, config, dtype=torch.bfloat16, context_tokens=60000, output_tokens=0, memory=memory)
        fixed, batch = plan.weight_bytes + plan.activation_bytes, plan.batch
        assert batch > 0

        def fits(n, fixed=fixed, memory=memory, shared=shared):
            on_device, on_host = fixed + n * price.device_bytes, n * price.host_bytes
            if shared:
                return on_device + on_host <= memory.device_bytes
            return on_device <= memory.device_bytes and on_host <= memory.host_bytes

        assert fits(batch)
        assert not fits(batch + 1)


def test_what_cannot_fit_is_refused_with_figures():
    plan = make_plan(
        llama_8b(), PAPER, dtype=torch.bfloat16, context_tokens=100000, output_tokens=0, memory=Memory(10 * GIB, GIB)
    )
    with pytest.raises(CapacityError) as error:
        require_fit(plan)
    for figure in (plan.weight_bytes, plan.chosen.sequence_host_bytes, 10 * GIB, GIB):
        assert f"{figure:,}" in str(error.value)
    assert "largest batch that fits is 0" in str(error.value)


def test_lengths_beyond_the_model_are_refused_naming_both_numbers():
    with pytest.raises(RequestError, match=r"131,073 tokens together; llama takes 131,072"):
        make_plan(
            llama_8b(), PAPER, dtype=torch.bfloat16, context_tokens=131072, output_tokens=1, memory=Memory(GIB, GIB)
        )
    with pytest.raises(ConfigError, match="3 entries and the model has 2 layers"):
        make_plan(
            tiny_spec(),
            ShadowKVConfig(rank=(1, 2, 3)),
            dtype=torch.float32,
            context_tokens=10,
            output_tokens=0,
            memory=Memory(GIB, GIB),
        )


def test_a_context_that_fits_the_exact_region_is_said_to_stay_dense():
    plan = make_plan(
        llama_8b(), PAPER, dtype=torch.bfloat16, context_tokens=2000, output_tokens=500, memory=Memory(80 * GIB, GIB)
    )
    assert "attended exactly" in " ".join(plan.lines())
    assert plan.chosen.host_bytes == {}


def test_declared_bytes_are_allocated_by_the_engine(device):
    decoder = tiny_decoder(device)
    plan = make_plan(
        decoder.spec, PAPER, dtype=torch.float32, context_tokens=4000, output_tokens=96, memory=Memory(GIB, GIB)
    )
    engine = tiny_engine(PAPER, device, decoder=decoder)
    seq = engine.runner.cache.open(4096)
    assert engine.runner.cache.device_arena.used_bytes == plan.chosen.sequence_device_bytes
    assert engine.runner.cache.host_arena.used_bytes == plan.chosen.sequence_host_bytes
    engine.runner.cache.release(seq)


def test_memory_is_what_was_asked_for_or_a_share_of_what_is_free():
    cpu = torch.device("cpu")
    assert find_memory(cpu, 5 * GIB, 2 * GIB) == Memory(5 * GIB, 2 * GIB)
    free = find_memory(cpu, None, None)
    assert free.shared
    assert 0 < free.device_bytes <= available_host_bytes() * 1.05
