"""Sizes of known models, for runs without a checkpoint.

Each entry is what the model's public config.json says about its sizes, read by the same code as a checkpoint's.
"""

from typing import Any

from shadowkv.errors import ConfigError
from shadowkv.models.config_reader import spec_from_config
from shadowkv.models.spec import ModelSpec


def _config(
    model_type: str,
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    positions: int,
    theta: float,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    config = {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return config | (more or {})


GEOMETRIES: dict[str, dict[str, Any]] = {
    # meta-llama/Llama-3.1-8B-Instruct
    "llama-3.1-8b": _config(
        "llama",
        4096,
        14336,
        32,
        32,
        8,
        128256,
        131072,
        500000.0,
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ),
    # gradientai/Llama-3-8B-Instruct-Gradient-1048k
    "llama-3-8b-1m": _config("llama", 4096, 14336, 32, 32, 8, 128256, 1048576, 3580165449.0),
    # THUDM/glm-4-9b-chat-1m-hf
    "glm-4-9b": _config(
        "glm",
        4096,
        13696,
        40,
        32,
        4,
        151552,
        1048576,
        1e8,
        {"head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True},
    ),
    # 01-ai/Yi-9B-200K
    "yi-9b": _config("llama", 4096, 11008, 48, 32, 4, 64000, 262144, 1e7),
    # Qwen/Qwen3-8B, with the yarn scaling that its page gives for 128K
    "qwen3-8b": _config(
        "qwen3",
        4096,
        12288,
        36,
        32,
        8,
        151936,
        40960,
        1e6,
        {
            "head_dim": 128,
            "attention_bias": False,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
    ),
    # Qwen/Qwen2.5-7B-Instruct, with the yarn scaling that its page gives for 128K
    "qwen2.5-7b": _config(
        "qwen2",
        3584,
        18944,
        28,
        28,
        4,
        152064,
        32768,
        1e6,
        {
            "rms_norm_eps": 1e-6,
            "use_sliding_window": False,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
    ),
    # mistralai/Mistral-7B-Instruct-v0.3
    "mistral-7b": _config("mistral", 4096, 14336, 32, 32, 8, 32768, 32768, 1e6, {"sliding_window": None}),
    # HuggingFaceTB/SmolLM2-135M
    "smollm2-135m": _config("llama", 576, 1536, 30, 9, 3, 49152, 8192, 100000.0, {"tie_word_embeddings": True}),
    # No model: small enough to try the command on a CPU.
    "tiny": _config("llama", 64, 96, 2, 4, 2, 96, 65536, 10000.0),
}
"""By the name on the command line."""


def geometry_spec(name: str) -> ModelSpec:
    """The spec of a known model.

    Raises:
        ConfigError: there is no such entry; lists those there are.
    """
    if name not in GEOMETRIES:
        raise ConfigError(f"--geometry is {name!r}; allowed: {', '.join(GEOMETRIES)}")
    return spec_from_config(GEOMETRIES[name])
