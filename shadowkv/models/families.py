"""The model families: one entry each, along a closed list of axes. Nothing else in the package asks for a family.

To add one, add an entry. An axis that is a string names the config attribute that decides it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shadowkv.errors import UnsupportedModelError

Config = dict[str, Any]
"""A config.json, as it was read."""


@dataclass(frozen=True)
class Names:
    """What a checkpoint calls its modules; ``{i}`` stands for the layer.

    ``layer`` maps each piece of a layer to its module. The pieces: input_norm, q, k, v (or qkv), q_norm,
    k_norm, o, attention_out_norm, mlp_norm, gate, up (or gate_up), down, mlp_out_norm. Fused pieces hold
    q, k, v and gate, up below each other.
    """

    embed: str
    norm: str
    head: str
    prefix: str
    layer: Mapping[str, str] = field(hash=False)
    ignored: tuple[str, ...] = ()
    """Regular expressions of tensors that say nothing the config does not say."""


_HF_LAYER = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_SANDWICH = {"attention_out_norm": "post_self_attn_layernorm", "mlp_out_norm": "post_mlp_layernorm"}


def _fused(layer: Mapping[str, str], *, qkv: str | None = None, gate_up: str | None = None) -> Mapping[str, str]:
    fused = dict(layer)
    for name, module, parts in (("qkv", qkv, ("q", "k", "v")), ("gate_up", gate_up, ("gate", "up"))):
        if module is not None:
            for part in parts:
                del fused[part]
            fused[name] = module
    return fused


_HF_FUSED_MLP = _fused(_HF_LAYER, gate_up="mlp.gate_up_proj")


def _hf(layer: Mapping[str, str]) -> Names:
    return Names(
        embed="model.embed_tokens",
        norm="model.norm",
        head="lm_head",
        prefix="model.layers.{i}.",
        layer=layer,
        ignored=(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
    )


_CHATGLM_NAMES = Names(
    embed="transformer.embedding.word_embeddings",
    norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
    prefix="transformer.encoder.layers.{i}.",
    layer={
        "input_norm": "input_layernorm",
        "qkv": "self_attention.query_key_value",
        "o": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "gate_up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    ignored=(r"transformer\.rotary_pos_emb\.inv_freq",),
)

_GGUF_LAYER = {
    "input_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def _gguf(layer: Mapping[str, str], ignored: tuple[str, ...] = ()) -> Names:
    return Names("token_embd", "output_norm", "output", "blk.{i}.", layer, ignored)


@dataclass(frozen=True)
class Family:
    """Where one family stands on every axis."""

    name: str
    model_type: str
    """What config.json calls it."""
    architectures: tuple[str, ...]
    names: Names
    config_type: str = ""
    """The transformers config class to read it with, by model type; the family's own by default."""
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    interleaved_rope: bool = False
    partial_rope: bool = False
    """Whether ``partial_rotary_factor`` is part of the family."""
    window: Literal["never", "every layer", "layer types"] = "never"
    """Which layers ``sliding_window`` applies to."""
    gguf_names: Names | None = None
    """None: GGUF files of the family are refused."""
    gguf_permuted: bool = False
    """Rows of q and k are stored for interleaved RoPE and must be put back."""
    translate: Callable[[Config], Config] | None = None
    """Turns another repository's config keys into those of ``config_type``."""


def _chatglm_config(config: Config) -> Config:
    """GLM's original keys (custom code on the Hub) in the words of transformers' GlmConfig."""
    fixed: dict[str, tuple[object, ...]] = {
        "rmsnorm": (True,),
        "post_layer_norm": (True,),
        "add_bias_linear": (False,),
        "apply_residual_connection_post_layernorm": (False,),
        "original_rope": (True,),
        "interleaved_qkv": (False,),
        "pre_seq_len": (None, 0),
        "quantization_bit": (None, 0),
    }
    for key, allowed in fixed.items():
        if key in config and config[key] not in allowed:
            raise UnsupportedModelError(f"{key} is {config[key]!r} in config.json; implemented: {allowed[0]!r}")
    heads = config["num_attention_heads"]
    grouped = config.get("multi_query_attention", False)
    translated: Config = {
        "num_hidden_layers": config["num_layers"],
        "vocab_size": config["padded_vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["ffn_hidden_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": config["multi_query_group_num"] if grouped else heads,
        "head_dim": config["kv_channels"],
        "max_position_embeddings": config["seq_length"],
        "rms_norm_eps": config["layernorm_epsilon"],
        "attention_bias": config.get("add_qkv_bias", False),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "rope_theta": 10000.0 * config.get("rope_ratio", 1.0),
        # Half of every head is rotated, whatever the config says: RotaryEmbedding(kv_channels // 2).
        "partial_rotary_factor": 0.5,
        "hidden_act": "silu",
    }
    for key in ("torch_dtype", "dtype", "quantization_config"):
        if key in config:
            translated[key] = config[key]
    return translated


FAMILIES = (
    Family(
        name="llama",
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        names=_hf(_HF_LAYER),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        gguf_names=_gguf(_GGUF_LAYER, (r"rope_freqs\.weight",)),
        gguf_permuted=True,
    ),
    Family(
        name="mistral",
        model_type="mistral",
        architectures=("MistralForCausalLM",),
        names=_hf(_HF_LAYER),
        window="every layer",
        gguf_names=_gguf(_GGUF_LAYER),
        gguf_permuted=True,
    ),
    Family(
        name="qwen2",
        model_type="qwen2",
        architectures=("Qwen2ForCausalLM",),
        names=_hf(_HF_LAYER),
        qkv_bias=True,
        window="layer types",
        gguf_names=_gguf(_GGUF_LAYER),
    ),
    Family(
        name="qwen3",
        model_type="qwen3",
        architectures=("Qwen3ForCausalLM",),
        names=_hf(_HF_LAYER),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        window="layer types",
        gguf_names=_gguf(_GGUF_LAYER),
    ),
    Family(
        name="phi3",
        model_type="phi3",
        architectures=("Phi3ForCausalLM",),
        names=_hf(_fused(_HF_FUSED_MLP, qkv="self_attn.qkv_proj")),
        partial_rope=True,
        window="every layer",
        gguf_names=_gguf(
            _fused(_GGUF_LAYER, qkv="attn_qkv", gate_up="ffn_up"), (r"rope_factors_(long|short)\.weight",)
        ),
    ),
    Family(
        name="glm",
        model_type="glm",
        architectures=("GlmForCausalLM",),
        names=_hf(_HF_FUSED_MLP),
        qkv_bias="attention_bias",
        interleaved_rope=True,
        partial_rope=True,
    ),
    Family(
        name="chatglm",
        model_type="chatglm",
        architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration"),
        names=_CHATGLM_NAMES,
        config_type="glm",
        qkv_bias="attention_bias",
        interleaved_rope=True,
        partial_rope=True,
        translate=_chatglm_config,
    ),
    Family(
        name="glm4",
        model_type="glm4",
        architectures=("Glm4ForCausalLM",),
        names=_hf({**_HF_FUSED_MLP, **_SANDWICH}),
        qkv_bias="attention_bias",
        sandwich_norms=True,
        interleaved_rope=True,
        partial_rope=True,
    ),
)


def family_of(model_type: str, architectures: list[str]) -> Family:
    """The entry for a config.json's ``model_type`` and ``architectures``.

    Raises:
        UnsupportedModelError: there is none; lists those there are.
    """
    for family in FAMILIES:
        if family.model_type == model_type:
            if architectures and not set(architectures) & set(family.architectures):
                raise UnsupportedModelError(
                    f"the checkpoint is a {', '.join(architectures)}; of {model_type} models only "
                    f"{', '.join(family.architectures)} can be run"
                )
            return family
    known = ", ".join(f"{f.model_type} ({f.architectures[0]})" for f in FAMILIES)
    named = f"{model_type} ({', '.join(architectures)})" if architectures else model_type
    raise UnsupportedModelError(f"the architecture {named} is not implemented; there are: {known}")
