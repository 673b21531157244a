"""From config.json to a spec: sizes, bytes, the longest context, and everything that is refused by name."""

from pathlib import Path

import pytest
import torch

from shadowkv.errors import CheckpointError, UnsupportedModelError
from shadowkv.models.config_reader import ConfigOverrides, spec_from_config
from shadowkv.models.families import Config
from shadowkv.models.load import load_decoder, load_spec
from shadowkv.models.locate import locate
from tests.models.tiny_models import save, tiny_model

LLAMA: Config = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
QWEN2: Config = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL: Config = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("phi3", {}),
        ("glm4", {"head_dim": 16}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_bytes_are_the_bytes_allocated(
    model_type: str, changes: Config, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = tiny_model(model_type, changes)
    save(model, tmp_path)
    seen: list[tuple[int, int]] = []
    decoder = load_decoder(locate(tmp_path), dtype=dtype, progress=lambda done, of: seen.append((done, of)))
    tensors = [decoder.embed, decoder.norm]
    tensors += [] if decoder.head is decoder.embed else [decoder.head]
    tensors += [t for layer in decoder.layers for t in vars(layer).values() if t is not None]
    allocated = sum(t.untyped_storage().nbytes() for t in tensors)
    assert allocated == decoder.spec.weight_bytes(dtype) == load_spec(locate(tmp_path)).weight_bytes(dtype)
    assert decoder.spec.parameters() == sum(p.numel() for p in model.parameters())
    assert seen[-1] == (allocated, allocated)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_geometry_and_head_width() -> None:
    spec = spec_from_config(LLAMA)
    geometry = spec.geometry(torch.float16)
    assert (geometry.layers, geometry.heads, geometry.kv_heads, geometry.head_dim) == (2, 4, 2, 16)
    assert geometry.dtype == torch.float16
    assert spec.dtype == torch.bfloat16
    assert spec_from_config(LLAMA | {"head_dim": 128}).head_dim == 128
    assert spec_from_config(QWEN2 | {"head_dim": None}).head_dim == 16


def _rope(kind: str, **more: object) -> Config:
    return {"rope_scaling": {"rope_type": kind, **more}}


YARN_64K = _rope("yarn", factor=4.0, original_max_position_embeddings=16384)


@pytest.mark.parametrize(
    ("config", "tokens", "reason"),
    [
        (LLAMA, 4096, "max_position_embeddings 4096"),
        (LLAMA | _rope("linear", factor=4.0), 16384, "linear RoPE scaling"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192, "dynamic RoPE scaling"),
        (LLAMA | YARN_64K, 65536, "yarn RoPE scaling"),
        (LLAMA | {"max_position_embeddings": 65536} | YARN_64K, 65536, "max_position_embeddings"),
        (
            LLAMA
            | {"max_position_embeddings": 131072}
            | _rope(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
            ),
            131072,
            "max_position_embeddings",
        ),
        (MISTRAL | {"sliding_window": 1000}, 1000, "sliding_window 1000"),
        (MISTRAL | {"sliding_window": None}, 4096, "max_position"),
        (MISTRAL | {"sliding_window": 8192}, 4096, "max_position"),
        (QWEN2 | {"sliding_window": 1000}, 4096, "max_position"),
        (QWEN2 | {"sliding_window": 1000, "use_sliding_window": True, "max_window_layers": 1}, 1000, "sliding_window"),
        (QWEN2 | {"sliding_window": 1000, "use_sliding_window": True, "max_window_layers": 2}, 4096, "max_position"),
    ],
)
def test_the_longest_context_and_its_reason(config: Config, tokens: int, reason: str) -> None:
    spec = spec_from_config(config)
    assert spec.context_tokens == tokens
    assert reason in spec.context_limit


def test_old_and_new_ways_of_writing_rope() -> None:
    old = spec_from_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = spec_from_config(LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}})
    assert old.rope.kind == new.rope.kind == "linear"
    assert old.rope.parameters["rope_theta"] == new.rope.parameters["rope_theta"] == 5e5
    assert spec_from_config(LLAMA).rope.parameters["rope_theta"] == 1e4


@pytest.mark.parametrize(
    "rope", [{}, {"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}]
)
def test_overrides_win(rope: Config) -> None:
    spec = spec_from_config(LLAMA | rope, ConfigOverrides(rope_theta=1e6, max_position_embeddings=32768))
    assert spec.rope.parameters["rope_theta"] == 1e6
    assert spec.context_tokens == 32768


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, r"mamba \(MambaForCausalLM\).*llama.*chatglm"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"attention_multiplier": 0.01}, "attention_multiplier"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"hidden_act": "relu"}, "relu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "mrope"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: Config, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        spec_from_config(LLAMA | changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": None}, "model_type"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": "all"}}, "rope"),
        ({"architectures": 3}, "architectures"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads|LlamaConfig|llama"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"rope_theta": -1.0}, "rope_theta"),
    ],
)
def test_a_config_that_contradicts_itself(changes: Config, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        spec_from_config(LLAMA | changes)


def test_original_glm_settings_are_checked() -> None:
    chatglm: Config = {"model_type": "chatglm", "architectures": ["ChatGLMModel"], "num_layers": 2}
    with pytest.raises(UnsupportedModelError, match="post_layer_norm is False"):
        spec_from_config(chatglm | {"post_layer_norm": False})
    with pytest.raises(CheckpointError, match="num_attention_heads"):
        spec_from_config(chatglm)
