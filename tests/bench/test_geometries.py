"""Known models' sizes give known numbers of weights and bytes per token."""

import pytest
import torch

from shadowkv.bench.geometries import GEOMETRIES, geometry_spec
from shadowkv.cache.full import FullCache
from shadowkv.config import FullConfig
from shadowkv.errors import ConfigError

BILLIONS = {
    "llama-3.1-8b": 8.03,
    "llama-3-8b-1m": 8.03,
    "glm-4-9b": 9.48,
    "yi-9b": 8.83,
    "qwen3-8b": 8.19,
    "qwen2.5-7b": 7.62,
    "mistral-7b": 7.25,
    "smollm2-135m": 0.135,
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_entry_is_a_model(name: str) -> None:
    spec = geometry_spec(name)
    assert spec.heads % spec.kv_heads == 0
    if name in BILLIONS:
        assert spec.parameters() / 1e9 == pytest.approx(BILLIONS[name], rel=0.005)
        assert spec.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("llama-3.1-8b", 131072),
        ("llama-3-8b-1m", 1048576),
        ("glm-4-9b", 1048576),
        ("yi-9b", 262144),
        ("qwen3-8b", 131072),
        ("qwen2.5-7b", 131072),
        ("mistral-7b", 32768),
    ],
)
def test_contexts(name: str, tokens: int) -> None:
    assert geometry_spec(name).context_tokens == tokens


def test_a_llama_token_is_128_kib() -> None:
    geometry = geometry_spec("llama-3.1-8b").geometry(torch.bfloat16)
    assert FullCache.price(geometry, FullConfig(), 1024).device_bytes == 1024 * 128 * 1024


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--geometry is 'gpt'; allowed: llama-3.1-8b, "):
        geometry_spec("gpt")
