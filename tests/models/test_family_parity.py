"""Every family against transformers in float64: logits of a prompt, logits and tokens of a greedy continuation."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from shadowkv.models.decoder import Decoder
from shadowkv.models.load import load_decoder
from shadowkv.models.locate import locate
from tests.models.tiny_models import (
    all_logits,
    assert_as_exact,
    continue_with_decoder,
    continue_with_transformers,
    in_float64,
    prompt_of,
    rounding_of,
    save,
    tiny_model,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
PHI3_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.7 * i for i in range(8)],
    "partial_rotary_factor": 1.0,
}


@dataclass(frozen=True)
class Case:
    name: str
    model_type: str
    changes: dict[str, object] = field(default_factory=dict)
    prompts: tuple[int, ...] = (33,)
    new_tokens: int = 8
    sharded: bool = False
    seed: int = 0


def _heads(heads: int, kv_heads: int, head_dim: int, **more: object) -> dict[str, object]:
    hidden = more.pop("hidden_size", heads * head_dim)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        **more,
    }


CASES = [
    Case("llama", "llama"),
    Case("llama sharded", "llama", sharded=True),
    Case("llama tied", "llama", {"tie_word_embeddings": True}, seed=1),
    Case("llama biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Case("llama gelu", "llama", {"hidden_act": "gelu"}),
    Case("llama tanh gelu", "llama", {"hidden_act": "gelu_pytorch_tanh"}),
    Case("mistral", "mistral", {"sliding_window": None}),
    Case("qwen2", "qwen2", sharded=True),
    Case("qwen2 tied", "qwen2", {"tie_word_embeddings": True}),
    Case("qwen3", "qwen3", {"head_dim": 16}),
    Case("qwen3 biases", "qwen3", {"head_dim": 16, "attention_bias": True}, seed=1),
    Case("phi3", "phi3", sharded=True),
    Case("phi3 partial", "phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}),
    Case("glm", "glm", {"head_dim": 16}),
    Case("glm no bias", "glm", {"head_dim": 16, "attention_bias": False}),
    Case("glm4", "glm4", {"head_dim": 16}),
    # RoPE, at lengths that cross a switch where there is one.
    Case("rope llama3", "llama", {"rope_parameters": LLAMA3}, prompts=(5, 120)),
    Case("rope linear", "llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    Case(
        "rope dynamic",
        "llama",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0},
        },
        prompts=(28, 32, 50),
    ),
    Case("rope yarn", "llama", {"rope_parameters": YARN}, prompts=(5, 120)),
    Case("rope yarn qwen3", "qwen3", {"head_dim": 16, "rope_parameters": YARN}, prompts=(5,)),
    Case("rope yarn factor", "llama", {"rope_parameters": YARN | {"attention_factor": 0.9, "beta_fast": 16.0}}),
    Case(
        "rope yarn mscale",
        "llama",
        {"rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.8, "truncate": False}},
    ),
    Case(
        "rope longrope",
        "phi3",
        {
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 32,
            "rope_parameters": PHI3_LONGROPE,
        },
        prompts=(28, 32, 33, 60),
    ),
    # Head widths and groups.
    *(Case(f"width {d}", "llama", _heads(4, 2, d, hidden_size=64), new_tokens=4) for d in (64, 80, 96, 128, 256)),
    *(Case(f"group 32/{k}", "llama", _heads(32, k, 8), new_tokens=4) for k in (32, 8, 1)),
    Case(
        "hidden 1024, 16 heads of 128", "qwen3", _heads(16, 8, 128, hidden_size=1024, num_hidden_layers=1), new_tokens=4
    ),
]


def _check(model: PreTrainedModel, decoder: Decoder, case: Case) -> None:
    for tokens in case.prompts:
        truth_model = in_float64(model)  # a fresh one: transformers' dynamic RoPE remembers its longest sequence
        prompt = prompt_of(tokens)
        with torch.no_grad():
            truth = truth_model(prompt[None].to(model.device)).logits[0].cpu()
        # Where the switch of rows makes cached keys stale, transformers 5.17 drops the cache and then runs
        # the last token alone, without any context (later versions run the whole text, which is what
        # generating without a cache does in all of them).
        cached = not decoder.rope.recompute_on_switch
        known = continue_with_transformers(truth_model, prompt, case.new_tokens, use_cache=cached)
        allowed = rounding_of(decoder, torch.cat([prompt, torch.tensor(known.tokens)]))
        assert_as_exact(all_logits(decoder, prompt), truth, allowed)
        first, second = known.logits.topk(2).values.unbind(1)
        assert (first - second > 2 * allowed).all(), "a close call; take another seed"
        ours = continue_with_decoder(decoder, prompt, case.new_tokens)
        assert ours.tokens == known.tokens
        assert_as_exact(ours.logits, known.logits, allowed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_and_greedy_tokens_equal_transformers(case: Case, tmp_path: Path, device: torch.device) -> None:
    model = tiny_model(case.model_type, case.changes, case.seed)
    save(model, tmp_path, sharded=case.sharded)
    assert (tmp_path / "model.safetensors.index.json").exists() == case.sharded
    decoder = load_decoder(locate(tmp_path), device=device, dtype=torch.float32)
    assert decoder.spec.architecture == case.model_type
    _check(model.to(device), decoder, case)


def test_the_original_glm_layout(tmp_path: Path, device: torch.device) -> None:
    """transformers has no class for it: a glm checkpoint under the original names, config keys and fusions."""
    model = tiny_model("glm", {"head_dim": 16, "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"}})
    save(model, tmp_path)
    old = load_file(tmp_path / "model.safetensors")
    new = {
        "transformer.embedding.word_embeddings.weight": old.pop("model.embed_tokens.weight"),
        "transformer.encoder.final_layernorm.weight": old.pop("model.norm.weight"),
        "transformer.output_layer.weight": old.pop("lm_head.weight"),
        "transformer.rotary_pos_emb.inv_freq": torch.zeros(4),
    }
    for i in range(2):
        source, target = f"model.layers.{i}.", f"transformer.encoder.layers.{i}."
        for kind in ("weight", "bias"):
            qkv = [old.pop(f"{source}self_attn.{p}_proj.{kind}") for p in "qkv"]
            new[f"{target}self_attention.query_key_value.{kind}"] = torch.cat(qkv)
        for theirs, original in (
            ("input_layernorm", "input_layernorm"),
            ("post_attention_layernorm", "post_attention_layernorm"),
            ("self_attn.o_proj", "self_attention.dense"),
            ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ):
            new[f"{target}{original}.weight"] = old.pop(f"{source}{theirs}.weight")
    assert not old
    save_file(new, tmp_path / "model.safetensors")
    config = {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "num_layers": 2,
        "padded_vocab_size": 97,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 4,
        "kv_channels": 16,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "layernorm_epsilon": model.config.rms_norm_eps,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "rope_ratio": 5,
        "seq_length": 256,
        "original_rope": True,
        "rmsnorm": True,
        "post_layer_norm": True,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    decoder = load_decoder(locate(tmp_path), device=device, dtype=torch.float32)
    assert decoder.spec.dtype == torch.bfloat16
    assert decoder.spec.rope.interleaved
    assert decoder.spec.rope.rotary_dim == 8
    _check(model.to(device), decoder, Case("chatglm", "glm"))
