"""A checkpoint that is damaged or does not match its config is refused, by the name of the tensor or file."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shadowkv.errors import CheckpointError, UnsupportedModelError
from shadowkv.models.load import load_decoder
from shadowkv.models.locate import locate
from tests.models.tiny_models import all_logits, prompt_of, save, tiny_model

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return save(tiny_model("llama", {}), tmp_path / "llama")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save(tiny_model("llama", {}), tmp_path / "sharded", sharded=True)


def _edit(directory: Path, **changes: Tensor | None) -> None:
    """Replace tensors (``None`` removes one); dots in names are written as double underscores."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path)


def _fails(directory: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_decoder(locate(directory))


def test_missing_tensor(whole: Path) -> None:
    _edit(whole, **{DOWN: None})
    _fails(whole, f"{DOWN}.*missing")


def test_missing_head_of_an_untied_model(whole: Path) -> None:
    _edit(whole, lm_head__weight=None)
    _fails(whole, "lm_head.weight.*missing")


def test_extra_tensor(whole: Path) -> None:
    _edit(whole, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    _fails(whole, r"self_attn\.q_proj\.bias \[64\] has no place")


def test_layer_beyond_the_config(whole: Path) -> None:
    _edit(whole, **{"model.layers.2.input_layernorm.weight": torch.zeros(64)})
    _fails(whole, r"layers\.2\.input_layernorm")


def test_misshapen_tensor(whole: Path) -> None:
    _edit(whole, **{DOWN: torch.zeros(64, 95)})
    _fails(whole, rf"{DOWN} is \[64, 95\].*\[64, 96\]")


def test_numbers_that_cannot_be_read(whole: Path) -> None:
    _edit(whole, **{DOWN: torch.zeros(64, 96, dtype=torch.int8)})
    with pytest.raises(UnsupportedModelError, match="int8"):
        load_decoder(locate(whole))


def test_frequencies_in_the_file_are_ignored(whole: Path) -> None:
    before = all_logits(load_decoder(locate(whole)), prompt_of(5))
    _edit(whole, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert torch.equal(all_logits(load_decoder(locate(whole)), prompt_of(5)), before)


def test_a_tied_model_may_hold_its_head_twice(tmp_path: Path) -> None:
    directory = save(tiny_model("llama", {"tie_word_embeddings": True}), tmp_path)
    before = all_logits(load_decoder(locate(directory)), prompt_of(5))
    _edit(directory, lm_head__weight=load_file(directory / "model.safetensors")["model.embed_tokens.weight"].clone())
    assert torch.equal(all_logits(load_decoder(locate(directory)), prompt_of(5)), before)


@pytest.mark.parametrize("kept_bytes", [0, 7, 500, 20_000])
def test_truncated_file(whole: Path, kept_bytes: int) -> None:
    path = whole / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    _fails(whole, "model.safetensors is truncated or damaged")


def test_truncated_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-3])
    _fails(sharded, f"{shard.name} is truncated")


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    _fails(sharded, f"{shard.name} is missing")


def test_index_that_names_what_its_shard_does_not_hold(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost.weight"] = sorted(set(content["weight_map"].values()))[0]
    index.write_text(json.dumps(content))
    _fails(sharded, "model.ghost.weight should be in")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../b.safetensors"}}'])
def test_broken_index(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    _fails(sharded, "model.safetensors.index.json")


def test_pickled_weights_are_refused(whole: Path) -> None:
    (whole / "model.safetensors").rename(whole / "pytorch_model.bin")
    _fails(whole, "pickled weights only.*save_pretrained")


def test_no_weights(whole: Path) -> None:
    (whole / "model.safetensors").unlink()
    _fails(whole, "neither model.safetensors nor")


@pytest.mark.parametrize("factors", [[1.0] * 7, [0.0] * 8, ["wide"] * 8])
def test_rope_factors_that_make_no_frequencies(tmp_path: Path, factors: list[object]) -> None:
    """Found when the model is loaded, also where only long prompts would meet them."""
    settings = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    directory = save(
        tiny_model("phi3", {"original_max_position_embeddings": 32, "rope_parameters": settings}), tmp_path
    )
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"]["long_factor"] = factors
    (directory / "config.json").write_text(json.dumps(config))
    _fails(directory, "long_factor")


def test_broken_config(whole: Path) -> None:
    (whole / "config.json").write_text("{,")
    _fails(whole, "config.json cannot be read as JSON")
