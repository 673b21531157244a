"""GGUF files written with gguf's own writer, against the same model in safetensors; and damaged ones."""

import contextlib
import random
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType as Storage
from transformers import PreTrainedModel

from shadowkv.engine.tokenizer import Tokenizer
from shadowkv.errors import CheckpointError, UnsupportedModelError
from shadowkv.models.decoder import Decoder
from shadowkv.models.gguf_file import GgufFile
from shadowkv.models.load import load_decoder, load_spec
from shadowkv.models.locate import locate
from shadowkv.models.rope import build_rope
from tests.models.tiny_models import all_logits, prompt_of, save, tiny_model

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def _interleave(weights: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Rows as llama.cpp stores those of q and k: row 2j+p of a head is its row p*D/2 + j."""
    rows = weights.shape[0]
    width = rows // heads
    order = [h * width + p * (width // 2) + j for h in range(heads) for j in range(width // 2) for p in range(2)]
    assert sorted(order) == list(range(rows))
    return weights[order]


def _write(
    model: PreTrainedModel, path: Path, storage: Storage, extra: dict[str, Any] | None = None, **arrays: numpy.ndarray
) -> Path:
    """The model as GGUF; its own matrices are rounded to the storage, so that both hold the same numbers."""
    config = model.config
    architecture = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([f"<{i}>" for i in range(1000)])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in (extra or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{architecture}.{key}", value)
    tied = config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if tied and name == "lm_head.weight":
            continue
        weights = parameter.detach().numpy()
        kind = storage if weights.ndim == 2 else Storage.F32
        if weights.ndim == 2:
            weights = gguf.quants.dequantize(gguf.quants.quantize(weights, kind), kind)
            parameter.data.copy_(torch.tensor(weights))
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if architecture == "llama" and part in name:
                weights = _interleave(weights, heads)
        stored = gguf.quants.quantize(numpy.ascontiguousarray(weights), kind)
        writer.add_tensor(_gguf_name(name), stored, raw_dtype=kind)
    for name, array in arrays.items():
        writer.add_tensor(f"{name}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _weights(decoder: Decoder) -> list[torch.Tensor]:
    layers = [t for layer in decoder.layers for t in vars(layer).values() if t is not None]
    return [decoder.embed, decoder.norm, decoder.head, *layers]


CASES = [
    ("llama", {}, Storage.Q4_1),
    ("llama", {"tie_word_embeddings": True}, Storage.Q8_0),
    ("llama", {"attention_bias": True, "mlp_bias": True}, Storage.F16),
    ("llama", {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 24}, Storage.Q4_0),
    ("qwen2", {}, Storage.Q8_0),
    ("qwen3", {"head_dim": 32}, Storage.Q4_1),
    ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}, Storage.BF16),
    ("phi3", {}, Storage.Q5_0),
]


@pytest.mark.parametrize(("model_type", "changes", "storage"), CASES)
def test_equal_to_the_same_model_in_safetensors(
    model_type: str, changes: dict[str, object], storage: Storage, tmp_path: Path, device: torch.device
) -> None:
    model = tiny_model(model_type, changes)
    file = _write(model, tmp_path / "tiny.gguf", storage)
    save(model, tmp_path / "same")
    ours, same = (load_decoder(locate(m), device=device, dtype=torch.float32) for m in (file, tmp_path / "same"))
    assert ours.spec.dtype == torch.bfloat16
    for a, b in zip(_weights(ours), _weights(same), strict=True):
        assert torch.equal(a, b)
    assert ours.spec.norm_eps == pytest.approx(same.spec.norm_eps, rel=1e-7)  # a float32 in the header
    assert all_logits(ours, prompt_of(20)).argmax(-1).equal(all_logits(same, prompt_of(20)).argmax(-1))


def test_the_header_alone_gives_the_spec(tmp_path: Path) -> None:
    path = _write(tiny_model("llama", {}), tmp_path / "whole.gguf", Storage.Q8_0)
    reader = gguf.GGUFReader(path)
    assert {t.name: tuple(reversed(t.shape.tolist())) for t in reader.tensors} == dict(GgufFile(path).shapes)
    assert {t.name: t.data_offset for t in reader.tensors} == {n: t.offset for n, t in GgufFile(path).tensors.items()}
    header = tmp_path / "header.gguf"
    header.write_bytes(path.read_bytes()[: reader.data_offset])
    assert load_spec(locate(header)) == load_spec(locate(path))
    with pytest.raises(CheckpointError, match=r"ends before \S+ does"):
        load_decoder(locate(header))


def test_truncated_and_damaged_files(tmp_path: Path) -> None:
    path = _write(tiny_model("llama", {}), tmp_path / "whole.gguf", Storage.Q8_0)
    content = path.read_bytes()
    data_start = gguf.GGUFReader(path).data_offset
    for end in (5, 20, 300, data_start // 2, data_start - 64):
        path.write_bytes(content[:end])
        with pytest.raises(CheckpointError, match="ends within its header"):
            load_spec(locate(path))
    path.write_bytes(content[:-500])
    with pytest.raises(CheckpointError, match="ends before"):
        load_decoder(locate(path))
    with pytest.raises(CheckpointError, match=r"ends before \S+ does; fetch it again"):
        Tokenizer.load(path)  # transformers would read the tensors, and speak of shapes
    for changed, message in (
        (b"GGML" + content[4:], "not a GGUF file"),
        (content[:4] + b"\x63" + content[5:], "version 99"),
        (content[:8] + b"\xff" * 8 + content[16:], "GGUF|header|damaged|GGML"),
        (b"", "cannot be read"),
    ):
        path.write_bytes(changed)
        with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
            load_spec(locate(path))


def test_damaged_headers_raise_only_what_is_documented(tmp_path: Path) -> None:
    path = _write(tiny_model("llama", {}), tmp_path / "whole.gguf", Storage.Q8_0)
    content, header = path.read_bytes(), gguf.GGUFReader(path).data_offset
    choose = random.Random(0)
    # The metadata and the list of tensors; the vocabulary between them is stepped over.
    zone = [*range(520), *range(header - 1700, header)]
    for _ in range(300):
        damaged = bytearray(content)
        damaged[choose.choice(zone)] = choose.choice([0, 1, 255, choose.randrange(256)])
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointError, UnsupportedModelError):
            load_spec(locate(path))


def test_missing_and_extra_tensors(tmp_path: Path) -> None:
    model = tiny_model("llama", {})
    path = _write(model, tmp_path / "extra.gguf", Storage.F32, ghost=numpy.zeros(3, numpy.float32))
    with pytest.raises(CheckpointError, match=r"ghost\.weight \[3\] has no place"):
        load_decoder(locate(path))
    path = _write(model, tmp_path / "missing.gguf", Storage.F32)
    content = path.read_bytes().replace(b"blk.1.ffn_down.weight", b"blk.9.ffn_down.weight")
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down\.weight.*missing"):
        load_decoder(locate(path))


def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_model("llama", {})
    for extra, named in (
        ({"attention.scale": 0.5}, r"attention\.scale"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"expert_count": 8}, "num_experts"),
        ({"rope.scaling.type": "mystery"}, "mystery"),
        ({"rope.dimension_count": 8}, "partial_rotary_factor"),
    ):
        path = _write(model, tmp_path / "tiny.gguf", Storage.F32, extra)
        with pytest.raises(UnsupportedModelError, match=named):
            load_spec(locate(path))
    path.write_bytes(path.read_bytes().replace(b"llama", b"gemma"))
    with pytest.raises(UnsupportedModelError, match=r"gemma.*llama, .*qwen3"):
        load_spec(locate(path))


def test_rope_settings_of_the_header(tmp_path: Path) -> None:
    model = tiny_model("llama", {})
    for extra, kind, tokens in (
        ({"rope.scaling.type": "none"}, "default", 256),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "linear", 512),
        ({"rope.scale_linear": 4.0}, "linear", 1024),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
            "yarn",
            512,
        ),
        ({"attention.sliding_window": 100}, "default", 100),
    ):
        path = _write(model, tmp_path / "tiny.gguf", Storage.F32, extra)
        spec = load_spec(locate(path))
        assert spec.rope.kind == kind
        assert spec.context_tokens == tokens


def test_frequency_divisors_of_llama_3_1(tmp_path: Path, device: torch.device) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = tiny_model("llama", {"rope_parameters": rope | {"original_max_position_embeddings": 64}})
    wanted = model.model.rotary_emb.inv_freq
    default = 1.0 / (1e4 ** (torch.arange(0, 16, 2).float() / 16))
    divisors = (default / wanted).numpy()
    assert divisors.max() > 3
    path = _write(model, tmp_path / "tiny.gguf", Storage.F32, rope_freqs=divisors)
    decoder = load_decoder(locate(path), device=device, dtype=torch.float32)
    decoder.rope.row(1)
    cos, sin = decoder.rope.cos_sin(torch.ones(1, device=device), torch.zeros(1, device=device))
    # Two roundings (the division here and the one in the model) of angles of at most one radian, and an ulp of a
    # number below 1 in each of the two functions that are compared.
    for ours, theirs in ((cos, wanted.cos()), (sin, wanted.sin())):
        assert (ours[0].cpu() - theirs).abs().max() <= 2 * torch.finfo(torch.float32).eps
    header = tmp_path / "header.gguf"
    header.write_bytes(path.read_bytes()[: gguf.GGUFReader(path).data_offset])
    planned = load_spec(locate(header))
    assert planned.weight_bytes(torch.float16) == decoder.spec.weight_bytes(torch.float16)
    with pytest.raises(CheckpointError, match="0 numbers for 8 frequencies"):
        build_rope(planned).row(1)


def test_longrope_factors_of_phi3(tmp_path: Path) -> None:
    short, long = (numpy.linspace(1, end, 8, dtype=numpy.float32) for end in (2, 5))
    settings = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
    }
    model = tiny_model("phi3", {"original_max_position_embeddings": 32, "rope_parameters": settings})
    path = _write(
        model,
        tmp_path / "tiny.gguf",
        Storage.F32,
        {"rope.scaling.original_context_length": 32, "rope.dimension_count": 16},
        rope_factors_short=short,
        rope_factors_long=long,
    )
    save(model, tmp_path / "same")
    ours, same = (load_decoder(locate(m), dtype=torch.float32) for m in (path, tmp_path / "same"))
    for tokens in (20, 50):
        assert torch.equal(all_logits(ours, prompt_of(tokens)), all_logits(same, prompt_of(tokens)))
