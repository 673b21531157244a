"""From a config.json (or what a GGUF header says in its words) to a ModelSpec. Reads no weights.

transformers' config classes do the reading, so that defaults and the old and new ways of writing RoPE
parameters mean here what they mean there.
"""

import copy
import math
from dataclasses import dataclass

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from shadowkv.errors import CheckpointError, UnsupportedModelError
from shadowkv.models.families import Config, Family, family_of
from shadowkv.models.layers import ACTIVATIONS
from shadowkv.models.spec import ModelSpec, RopeSpec

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

_SETTINGS_THAT_MUST_BE_OFF: dict[str, tuple[object, ...]] = {
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "scale_emb": (None, 1),
    "scale_depth": (None,),
    "dim_model_base": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "kv_lora_rank": (None, 0),
    "q_lora_rank": (None, 0),
    "attention_chunk_size": (None,),
    "clip_qkv": (None,),
    "alibi": (None, False),
    "use_alibi": (None, False),
    "parallel_attn": (None, False),
    "use_parallel_residual": (None, False),
    "no_rope_layers": (None, []),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "vision_config": (None,),
}
"""Settings that change what a model computes and that nothing here implements, with their neutral values."""


_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_MOST_LAYERS, _LARGEST = 10_000, 1 << 40


@dataclass(frozen=True)
class ConfigOverrides:
    """What an adapter changes in its base model's config."""

    rope_theta: float | None = None
    max_position_embeddings: int | None = None


def family_of_config(config: Config) -> Family:
    """The family that a config.json belongs to. Raises like :func:`family_of`."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no model_type; it names the model's architecture")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(f"architectures is {architectures!r} in config.json; it must be a list of names")
    return family_of(model_type, architectures)


def spec_from_config(config: Config, overrides: ConfigOverrides | None = None) -> ModelSpec:
    """What the model of this config is.

    Args:
        config: a config.json; it is not changed.

    Raises:
        UnsupportedModelError: the architecture, or a setting that changes the computation, is not implemented.
        CheckpointError: the config is incomplete or contradicts itself.
    """
    family = family_of_config(config)
    _refuse_unimplemented(config)
    parsed = _parse(family, config, overrides or ConfigOverrides())
    _check_sizes(parsed)
    rope = _rope_spec(family, parsed)
    heads, hidden = parsed.num_attention_heads, parsed.hidden_size
    kv_heads = parsed.num_key_value_heads or heads
    if heads % kv_heads:
        raise CheckpointError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if parsed.hidden_act not in ACTIVATIONS:
        raise UnsupportedModelError(f"hidden_act is {parsed.hidden_act!r}; implemented: {', '.join(ACTIVATIONS)}")
    positions = _scaled_positions(rope)
    context, limit = _context(family, parsed, rope, positions)
    return ModelSpec(
        architecture=family.name,
        layers=parsed.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(parsed),
        ffn=parsed.intermediate_size,
        vocab=parsed.vocab_size,
        norm_eps=parsed.rms_norm_eps,
        activation=parsed.hidden_act,
        rope=rope,
        qk_norm=family.qk_norm,
        qkv_bias=_decide(family.qkv_bias, parsed),
        o_bias=_decide(family.o_bias, parsed),
        mlp_bias=_decide(family.mlp_bias, parsed),
        sandwich_norms=family.sandwich_norms,
        tied_embeddings=bool(parsed.tie_word_embeddings),
        max_position_tokens=positions,
        context_tokens=context,
        context_limit=limit,
        dtype=_dtype(config),
    )


def _refuse_unimplemented(config: Config) -> None:
    for key, neutral in _SETTINGS_THAT_MUST_BE_OFF.items():
        if key in config and config[key] not in neutral:
            value = config[key]
            shown = value.get("quant_method", "set") if isinstance(value, dict) else repr(value)
            raise UnsupportedModelError(f"{key} ({shown}) in config.json is not implemented")


def _parse(family: Family, config: Config, overrides: ConfigOverrides) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    config_type = family.config_type or family.model_type
    try:
        if family.translate is not None:
            config = family.translate(config)
        # transformers reads an absent head_dim as hidden / heads, and a null one not at all in places.
        if config.get("head_dim", 0) is None:
            del config["head_dim"]
        _normalise_rope(config, overrides)
        if overrides.max_position_embeddings is not None:
            config["max_position_embeddings"] = overrides.max_position_embeddings
        return CONFIG_MAPPING[config_type].from_dict(config)
    except UnsupportedModelError:
        raise
    except KeyError as error:
        raise CheckpointError(f"config.json lacks {error} for a {family.name} model") from error
    except Exception as error:  # transformers' checks raise many types, some of them private to huggingface_hub
        raise CheckpointError(f"config.json does not describe a {family.name} model: {error}") from error


def _check_sizes(parsed: PreTrainedConfig) -> None:
    """A damaged header must not become a division by zero or a list of a billion layers."""
    for name in (*_SIZES, "num_key_value_heads", "head_dim"):
        value = getattr(parsed, name, None)
        if value is None and name not in _SIZES:
            continue
        most = _MOST_LAYERS if name == "num_hidden_layers" else _LARGEST
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise CheckpointError(f"{name} is {value!r}; it must be an integer from 1 to {most}")
    if not (isinstance(parsed.rms_norm_eps, float) and 0 <= parsed.rms_norm_eps < 1):
        raise CheckpointError(f"rms_norm_eps is {parsed.rms_norm_eps!r}; it must be from 0 to 1")
    theta = (parsed.rope_parameters or {}).get("rope_theta")
    if not (isinstance(theta, (int, float)) and 0 < theta < math.inf):
        raise CheckpointError(f"rope_theta is {theta!r}; it must be a positive number")


def _normalise_rope(config: Config, overrides: ConfigOverrides) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        parameters = config.get(key)
        if not isinstance(parameters, dict):
            continue
        if any(isinstance(value, dict) for value in parameters.values()):
            raise UnsupportedModelError(f"{key} differs between layers in config.json; that is not implemented")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind == "su":  # the first name of longrope
            kind = parameters["rope_type"] = "longrope"
            parameters.pop("type", None)
        if kind not in ROPE_KINDS:
            raise UnsupportedModelError(
                f"the RoPE type {kind!r} is not implemented; there are: {', '.join(ROPE_KINDS)}"
            )
        if overrides.rope_theta is not None and "rope_theta" in parameters:
            parameters["rope_theta"] = overrides.rope_theta
    if overrides.rope_theta is not None:
        config["rope_theta"] = overrides.rope_theta


def _head_dim(parsed: PreTrainedConfig) -> int:
    return int(getattr(parsed, "head_dim", None) or parsed.hidden_size // parsed.num_attention_heads)


def _decide(axis: bool | str, parsed: PreTrainedConfig) -> bool:
    return bool(getattr(parsed, axis)) if isinstance(axis, str) else axis


def _dtype(config: Config) -> torch.dtype:
    """float32 where the config does not say, since that loses nothing."""
    named = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if named not in dtypes:
        raise UnsupportedModelError(
            f"the checkpoint's dtype {named} is not implemented; there are: {', '.join(dtypes)}"
        )
    return dtypes[named]


def _rope_spec(family: Family, parsed: PreTrainedConfig) -> RopeSpec:
    parameters = dict(parsed.rope_parameters or {})
    share = parameters.get("partial_rotary_factor")
    if not family.partial_rope and share not in (None, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor is {share} in config.json; {family.name} models have none")
    head_dim = _head_dim(parsed)
    rotary_dim = int(head_dim * (share if share is not None else 1.0))
    if rotary_dim % 2:
        raise UnsupportedModelError(
            f"RoPE turns pairs, but {rotary_dim} of the head's {head_dim} dimensions are to turn"
        )
    kind = str(parameters.get("rope_type", "default"))
    original = parameters.get("original_max_position_embeddings")
    if kind in ("llama3", "yarn", "longrope") and not (isinstance(original, int) and 1 <= original <= _LARGEST):
        raise CheckpointError(f"original_max_position_embeddings is {original!r}; {kind} RoPE needs a positive integer")
    return RopeSpec(
        kind=kind,
        parameters=parameters,
        rotary_dim=rotary_dim,
        interleaved=family.interleaved_rope,
        trained_tokens=int(parsed.max_position_embeddings),
    )


def _scaled_positions(rope: RopeSpec) -> int:
    """Positions after scaling, by the rule that vLLM derives its longest context with.

    llama3 and longrope configs state the scaled number already; yarn counts from the original one.
    """
    if rope.kind in ("default", "llama3", "longrope"):
        return rope.trained_tokens
    factor = rope.parameters.get("factor")
    if not isinstance(factor, (int, float)) or not 0 < factor <= _LARGEST:
        raise CheckpointError(f"the RoPE type {rope.kind} needs a positive factor in config.json; it is {factor!r}")
    start = rope.parameters["original_max_position_embeddings"] if rope.kind == "yarn" else rope.trained_tokens
    assert isinstance(start, int)
    return int(start * factor)


def _context(family: Family, parsed: PreTrainedConfig, rope: RopeSpec, positions: int) -> tuple[int, str]:
    layer_types = set(getattr(parsed, "layer_types", None) or ["full_attention"])
    if unknown := layer_types - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(f"layer_types holds {', '.join(sorted(unknown))}, which is not implemented")
    window = getattr(parsed, "sliding_window", None)
    windowed = family.window == "every layer" or (family.window == "layer types" and "sliding_attention" in layer_types)
    if windowed and window is not None and window < positions:
        return (
            window,
            f"sliding_window {window}: attention beyond it is not full, and sliding windows are not implemented",
        )
    if positions != rope.trained_tokens:
        return positions, f"{rope.kind} RoPE scaling makes {positions} of {rope.trained_tokens} trained positions"
    return positions, f"max_position_embeddings {positions}"
