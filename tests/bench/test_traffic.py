"""The account of a step's bytes, against the specification's figures."""

import pytest
import torch

from shadowkv.bench.geometries import geometry_spec
from shadowkv.bench.traffic import Step, full_kv_bytes, step_traffic, weight_bytes
from shadowkv.config import FullConfig, QuestConfig, ShadowKVConfig

LLAMA = geometry_spec("llama-3.1-8b")
TOKENS = 122 * 1024


def test_full_attention_reads_128_kib_a_token() -> None:
    traffic = step_traffic(LLAMA, FullConfig(), Step(7, TOKENS, 2))
    assert traffic is not None
    assert traffic.device["keys and values"] == 7 * TOKENS * 128 * 1024
    assert traffic.bus_bytes == 0
    assert traffic.total.device_bytes == sum(traffic.device.values())


def test_weights_without_the_rows_of_an_embedding_that_is_no_head() -> None:
    assert weight_bytes(LLAMA, 2) == (LLAMA.parameters() - 128256 * 4096) * 2
    tied = geometry_spec("smollm2-135m")
    assert weight_bytes(tied, 2) == tied.weight_bytes(torch.bfloat16)


def test_shadowkv() -> None:
    """Landmarks 1.02 GB, attention 0.32 GB and values 40 MB at 30 % misses of 2,048 tokens, as counted by hand."""
    misses = 0.3 * 256 * 32 * 8
    traffic = step_traffic(LLAMA, ShadowKVConfig(), Step(1, TOKENS, 2, misses))
    assert traffic is not None
    assert traffic.device["index"] / 1e9 == pytest.approx(1.02, rel=0.01)
    assert traffic.device["attended keys and values"] / 1e9 == pytest.approx(0.33, rel=0.03)
    assert traffic.bus_bytes == pytest.approx(misses * 8 * 128 * 2)
    assert traffic.bus_bytes / 1e6 == pytest.approx(40, rel=0.02)
    assert traffic.device["coefficients and bases"] == pytest.approx(
        misses * 8 * 160 * 2 + 32 * 1024 * 160 * 2, rel=0.01
    )


def test_shadowkv_attends_what_is_resident() -> None:
    config = ShadowKVConfig(attend="resident", resident_tokens=4096)
    usual, more = (step_traffic(LLAMA, one, Step(1, TOKENS, 2)) for one in (ShadowKVConfig(), config))
    assert usual is not None
    assert more is not None
    kind = "attended keys and values"
    assert more.device[kind] - usual.device[kind] == 2 * 2048 * 32 * 8 * 128 * 2


def test_a_short_sequence_is_attended_exactly() -> None:
    traffic = step_traffic(LLAMA, ShadowKVConfig(), Step(2, 1000, 2))
    assert traffic is not None
    assert traffic.device["keys and values"] == full_kv_bytes(LLAMA, Step(2, 1000, 2))


def test_values_on_the_device_cross_no_bus() -> None:
    traffic = step_traffic(LLAMA, ShadowKVConfig(value_store="device"), Step(1, TOKENS, 2, 1000.0))
    assert traffic is not None
    assert traffic.bus_bytes == 0
    assert traffic.device["values, read"] == 1000 * 8 * 128 * 2


def test_methods_without_an_account() -> None:
    assert step_traffic(LLAMA, QuestConfig(), Step(1, TOKENS, 2)) is None
