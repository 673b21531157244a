"""What a GGUF header says, in the words of config.json. Whatever it says and is not understood is refused."""

from dataclasses import replace
from typing import Any

from shadowkv.errors import CheckpointError, UnsupportedModelError
from shadowkv.models.config_reader import ConfigOverrides, spec_from_config
from shadowkv.models.families import FAMILIES, Config
from shadowkv.models.gguf_file import GgufFile
from shadowkv.models.spec import ModelSpec

ARCHITECTURES = tuple(f.model_type for f in FAMILIES if f.gguf_names is not None)

_PLAIN = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
}
_REQUIRED = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
_READ_ELSEWHERE = {"vocab_size", "attention.value_length", "rope.dimension_count", "expert_used_count"}
_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.finetuned": "",
}


def spec_from_gguf(file: GgufFile, overrides: ConfigOverrides | None = None) -> ModelSpec:
    """What the model in this file is; its header suffices.

    Raises:
        UnsupportedModelError: the architecture, or a key that the header holds, is not implemented.
        CheckpointError: the header is incomplete or contradicts itself.
    """
    spec = spec_from_config(config_from_gguf(file), overrides)
    if "rope_freqs.weight" not in file.tensors:
        return spec
    if spec.rope.kind != "default":
        raise UnsupportedModelError(f"{file.path} holds rope_freqs.weight and {spec.rope.kind} RoPE scaling together")
    return replace(spec, rope=replace(spec.rope, divisors=tuple(_vector(file, "rope_freqs.weight"))))


def config_from_gguf(file: GgufFile) -> Config:
    """The header as a config.json."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"the GGUF architecture {architecture} in {file.path} is not implemented; "
            f"there are: {', '.join(ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    keys = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    _check_keys(file, keys)
    config: Config = {"model_type": architecture, "dtype": "bfloat16"}
    config |= {name: keys[key] for key, name in _PLAIN.items() if key in keys}
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} holds no token_embd.weight")
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    config.setdefault("head_dim", config["hidden_size"] // max(config["num_attention_heads"], 1))
    if keys.get("attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise UnsupportedModelError(
            f"values of width {keys['attention.value_length']} beside keys of {config['head_dim']}"
        )
    rotary = keys.get("rope.dimension_count", config["head_dim"])
    if rotary != config["head_dim"]:
        config["partial_rotary_factor"] = rotary / max(config["head_dim"], 1)
    if config.get("sliding_window"):
        if architecture == "llama":  # Mistral is written as llama; only the window tells
            config["model_type"] = "mistral"
    else:
        config["sliding_window"] = None
    if scaling := _rope_scaling(file, keys):
        config["rope_scaling"] = scaling
        if scaling["rope_type"] == "longrope":
            config["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return config


def _check_keys(file: GgufFile, keys: dict[str, Any]) -> None:
    known = _PLAIN.keys() | _SCALING.keys() | _READ_ELSEWHERE | {"rope.scale_linear"}
    if unknown := sorted(keys.keys() - known):
        raise UnsupportedModelError(f"{file.path} sets {', '.join(unknown)}, which is not implemented")
    for key in _REQUIRED:
        if key not in keys:
            raise CheckpointError(f"{file.path} lacks {key} in its header")
    for key in _PLAIN:
        if isinstance(keys.get(key), list):
            raise UnsupportedModelError(f"{file.path} sets {key} per layer, which is not implemented")
    for key in (*_PLAIN, *_READ_ELSEWHERE):
        if key in keys and (not isinstance(keys[key], (int, float)) or isinstance(keys[key], bool)):
            raise CheckpointError(f"{file.path} is damaged: {key} is {keys[key]!r}")


def _rope_scaling(file: GgufFile, keys: dict[str, Any]) -> dict[str, Any] | None:
    if keys.get("rope.scale_linear", 1.0) != 1.0:
        return {"rope_type": "linear", "factor": keys["rope.scale_linear"]}
    scaling = {name: keys[key] for key, name in _SCALING.items() if name and key in keys}
    longrope = "rope_factors_long.weight" in file.tensors
    if longrope:
        for side in ("short", "long"):
            name = f"rope_factors_{side}.weight"
            if name not in file.tensors or not file.holds(name):
                raise CheckpointError(f"{file.path} ends before {name}, which its RoPE needs")
            scaling[f"{side}_factor"] = _vector(file, name)
        if "original_max_position_embeddings" not in scaling:
            raise CheckpointError(f"{file.path} lacks rope.scaling.original_context_length in its header")
        scaling["rope_type"] = "longrope"
    if scaling.get("rope_type", "none") == "none":
        return None
    if scaling["rope_type"] == "yarn" and scaling.pop("attention_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{file.path} sets rope.scaling.attn_factor for yarn, which is not implemented")
    return scaling


def _vector(file: GgufFile, name: str) -> list[float]:
    """Empty where the file ends before it."""
    if not file.holds(name):
        return []
    values: list[float] = file.read(name, 0, file.tensors[name].shape[0]).tolist()
    return values
