"""What is decided where a setting leaves it open."""

from dataclasses import replace

import pytest
import torch

from shadowkv.cache.shadowkv_layout import ExactRegion
from shadowkv.config import FullConfig, ShadowKVConfig
from shadowkv.engine.choices import SPARSE_LAYER_SECONDS, dense_tokens
from shadowkv.engine.memory import Memory
from shadowkv.engine.placement import choose_plan
from shadowkv.errors import CapacityError
from tests.engine.test_plan import GIB, llama_8b

HBM = 4.3e12
ROOMY = Memory(130 * GIB, 100 * GIB)


def test_dense_is_chosen_where_its_reading_costs_less_than_choosing() -> None:
    geometry = llama_8b().geometry(torch.bfloat16)
    config = ShadowKVConfig()
    limits = [dense_tokens(geometry, config, batch, HBM) for batch in (1, 4, 64)]
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] >= ExactRegion.of(config).slots
    # At the limit of one row, both take equally long by the model.
    token = 2 * geometry.key_dim * 2 * geometry.layers
    dense = limits[0] * token / HBM
    sparse = (limits[0] * token / 16 + ExactRegion.of(config).slots * token) / HBM
    assert dense == pytest.approx(sparse + geometry.layers * SPARSE_LAYER_SECONDS, rel=0.01)


def test_alone_a_short_context_stays_whole_and_a_long_one_is_compressed() -> None:
    spec = llama_8b()
    plan, config = choose_plan(spec, ShadowKVConfig(), torch.bfloat16, ROOMY, 16384, 1, bandwidth=HBM)
    assert plan.chosen.host_bytes == {}
    assert config.dense_tokens == 16384
    plan, config = choose_plan(spec, ShadowKVConfig(), torch.bfloat16, ROOMY, 122880, 1, bandwidth=HBM)
    assert plan.chosen.host_bytes
    assert config.dense_tokens < 122880
    assert f"{config.dense_tokens:,} tokens" in plan.note
    whole = ShadowKVConfig(dense_tokens=config.dense_tokens)
    needed = choose_plan(spec, whole, torch.bfloat16, ROOMY, config.dense_tokens, 1, bandwidth=None)[0]
    assert plan.device_arena_bytes >= needed.chosen.sequence_device_bytes


def test_what_was_said_is_not_decided_again() -> None:
    spec, said = llama_8b(), ShadowKVConfig(dense_tokens=0, resident_tokens=2048)
    assert choose_plan(spec, said, torch.bfloat16, ROOMY, 16384, 1, bandwidth=HBM)[1] == said
    assert choose_plan(spec, FullConfig(), torch.bfloat16, ROOMY, 16384, 1, bandwidth=HBM)[1] == FullConfig()
    usual = ShadowKVConfig()
    assert choose_plan(spec, usual, torch.bfloat16, ROOMY, 16384, 1, bandwidth=None)[1] == usual


def test_spare_memory_keeps_more_chunks_resident_and_costs_no_row() -> None:
    spec, config = llama_8b(), ShadowKVConfig(dense_tokens=0)
    before, _ = choose_plan(spec, config, torch.bfloat16, ROOMY, 122880, 64, bandwidth=None)
    plan, decided = choose_plan(spec, config, torch.bfloat16, ROOMY, 122880, 64, bandwidth=HBM)
    assert before.chosen.limit == "host memory"
    assert plan.batch == before.batch
    assert decided == replace(config, resident_tokens=4 * config.budget_tokens)
    tight = Memory(40 * GIB, 100 * GIB)
    before, _ = choose_plan(spec, config, torch.bfloat16, tight, 122880, 64, bandwidth=None)
    plan, decided = choose_plan(spec, config, torch.bfloat16, tight, 122880, 64, bandwidth=HBM)
    assert before.chosen.limit == "device memory"
    assert plan.batch == before.batch
    assert plan.weight_bytes + plan.activation_bytes + plan.chosen.step_bytes + plan.device_arena_bytes <= 40 * GIB


@pytest.mark.parametrize("device", [17, 24, 40, 80, 130])
@pytest.mark.parametrize("context", [16384, 65536, 122880])
@pytest.mark.parametrize("max_batch", [1, 4, 64])
@pytest.mark.parametrize("said", [None, 8192])
def test_what_is_decided_fits(device: int, context: int, max_batch: int, said: int | None) -> None:
    memory, config = Memory(device * GIB, 60 * GIB), ShadowKVConfig(dense_tokens=said)
    try:
        plan, _ = choose_plan(llama_8b(), config, torch.bfloat16, memory, context, max_batch, bandwidth=HBM)
    except CapacityError:
        return
    taken = plan.weight_bytes + plan.activation_bytes + plan.chosen.step_bytes + plan.device_arena_bytes
    assert taken <= memory.device_bytes


def test_a_whole_sequence_that_was_asked_for_has_room() -> None:
    config = ShadowKVConfig(dense_tokens=65536)
    plan, _ = choose_plan(llama_8b(), config, torch.bfloat16, Memory(130 * GIB, 20 * GIB), 122880, 64, bandwidth=None)
    needed = choose_plan(llama_8b(), config, torch.bfloat16, ROOMY, 65536, 1, bandwidth=None)[0]
    assert plan.device_arena_bytes >= needed.chosen.sequence_device_bytes
    with pytest.raises(CapacityError, match="dense_tokens is 65,536"):
        choose_plan(llama_8b(), config, torch.bfloat16, Memory(25 * GIB, 60 * GIB), 122880, 64, bandwidth=None)
