"""LoRA adapters against dense W + scale * B A made by hand, and everything about them that is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from shadowkv.errors import CheckpointError, UnsupportedModelError
from shadowkv.models.load import load_decoder, load_spec
from shadowkv.models.locate import locate
from tests.models.tiny_models import all_logits, assert_as_exact, in_float64, prompt_of, rounding_of, save, tiny_model

SPLIT = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
FUSED = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
RANKS = {"q_proj": 6, "layers.1.mlp.down_proj": 2}
ALPHAS = {"q_proj": 3, r"layers\.0\.self_attn\..*": 16}


def _write_adapter(
    directory: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None, **config: object
) -> Path:
    directory.mkdir(exist_ok=True)
    stated = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False, **config}
    (directory / "adapter_config.json").write_text(json.dumps(stated))
    save_file(tensors, directory / "adapter_model.safetensors", metadata=metadata)
    return directory


def _random_updates(model: PreTrainedModel, modules: list[str]) -> dict[str, Tensor]:
    """lora_A and lora_B for these modules, of rank 4 or as RANKS says."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for module in modules:
        rows, columns = model.get_submodule(module).weight.shape
        rank = next((r for end, r in RANKS.items() if module.endswith(end)), 4)
        for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            noise = torch.randn(shape, generator=generator) / columns**0.5
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = noise
    return tensors


def _merge_by_hand(model: PreTrainedModel, tensors: dict[str, Tensor], scale_of: dict[str, float]) -> None:
    for module, scale in scale_of.items():
        a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        weight = model.get_submodule(module).weight
        with torch.no_grad():
            weight.copy_(weight.double() + scale * (b.double() @ a.double()))


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize(
    ("model_type", "parts", "more"),
    [("llama", SPLIT, ["lm_head"]), ("phi3", FUSED, []), ("glm", [*SPLIT[:4], *FUSED[2:]], [])],
)
def test_merged_like_by_hand(
    model_type: str, parts: list[str], more: list[str], rslora: bool, tmp_path: Path, device: torch.device
) -> None:
    model = tiny_model(model_type, {"head_dim": 16} if model_type == "glm" else {})
    save(model, tmp_path / "base")
    modules = [f"model.layers.{i}.{part}" for i in range(2) for part in parts] + more
    tensors = _random_updates(model, modules)
    adapter = _write_adapter(tmp_path / "adapter", tensors, rank_pattern=RANKS, alpha_pattern=ALPHAS, use_rslora=rslora)
    decoder = load_decoder(locate(tmp_path / "base", adapter), device=device, dtype=torch.float32)

    scale_of = {}
    for module in modules:  # peft's rule, written out for the patterns above
        rank = 6 if module.endswith(".q_proj") else 2 if module == "model.layers.1.mlp.down_proj" else 4
        alpha = 3 if module.endswith(".q_proj") else 16 if ".layers.0.self_attn." in module else 8
        scale_of[module] = alpha / (rank**0.5 if rslora else rank)
    _merge_by_hand(model, tensors, scale_of)
    model = model.to(device)
    ids = prompt_of(30)[None].to(device)
    with torch.no_grad():
        truth = in_float64(model)(ids).logits[0].cpu()
    # A merged weight is rounded a few times, a product with it once for each of at least 64 terms.
    assert_as_exact(all_logits(decoder, prompt_of(30)), truth, rounding_of(decoder, prompt_of(30)))


@pytest.fixture
def base(tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    model = tiny_model("llama", {})
    return model, save(model, tmp_path / "base")


@pytest.mark.parametrize(
    "setting",
    [
        {"use_dora": True},
        {"use_some_future_variant": True},
        {"bias": "all"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"fan_in_fan_out": True},
        {"init_lora_weights": "pissa"},
        {"layer_replication": [[0, 2]]},
        {"peft_type": "IA3"},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_variants_are_refused_by_name(
    setting: dict[str, object], base: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    model, directory = base
    tensors = _random_updates(model, ["model.layers.0.self_attn.k_proj"])
    adapter = _write_adapter(tmp_path / "adapter", tensors, **setting)
    with pytest.raises(UnsupportedModelError, match=next(iter(setting))):
        load_spec(locate(directory, adapter))


def test_every_update_needs_a_weight(base: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    model, directory = base
    tensors = _random_updates(model, ["model.layers.0.self_attn.k_proj"])
    for module in ("model.layers.7.self_attn.k_proj", "model.layers.0.self_attn.qkv_proj", "model.embed_tokens"):
        moved = {name.replace("model.layers.0.self_attn.k_proj", module): t for name, t in tensors.items()}
        adapter = _write_adapter(tmp_path / "adapter", moved)
        with pytest.raises(CheckpointError, match=f"updates {module}"):
            load_decoder(locate(directory, adapter))


def test_tensors_that_do_not_fit(base: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    model, directory = base
    stem = "base_model.model.model.layers.0.self_attn.k_proj.lora_"
    good = _random_updates(model, ["model.layers.0.self_attn.k_proj"])
    a, b = good[f"{stem}A.weight"], good[f"{stem}B.weight"]
    for tensors, config, message in (
        ({f"{stem}A.weight": a}, {}, "only one of lora_A and lora_B"),
        ({f"{stem}A.weight": a, f"{stem}B.weight": b[:, :3].contiguous()}, {}, "do not multiply"),
        (good, {"r": 5}, "rank 5"),
        ({f"{stem}A.weight": a[:, :9].contiguous(), f"{stem}B.weight": b}, {}, r"\[32, 9\].*\[32, 64\]"),
    ):
        adapter = _write_adapter(tmp_path / "adapter", tensors, **config)
        with pytest.raises(CheckpointError, match=message):
            load_decoder(locate(directory, adapter))
    adapter = _write_adapter(tmp_path / "adapter", {"base_model.model.model.embed_tokens.lora_embedding_A": a})
    with pytest.raises(UnsupportedModelError, match="lora_embedding_A"):
        load_decoder(locate(directory, adapter))


def test_config_overrides(base: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    model, directory = base
    tensors = _random_updates(model, ["model.layers.0.self_attn.k_proj"])
    adapter = _write_adapter(tmp_path / "adapter", tensors, metadata={"rope_theta": "250000.0", "format": "pt"})
    spec = load_spec(locate(directory, adapter))
    assert spec.rope.parameters["rope_theta"] == 250000.0
    assert spec.context_tokens == 256
    overrides = adapter / "shadowkv.json"
    overrides.write_text('{"rope_theta": 5e5, "max_position_embeddings": 1024}')
    spec = load_spec(locate(directory, adapter))
    assert spec.rope.parameters["rope_theta"] == 5e5
    assert spec.context_tokens == 1024
    for content, message in (
        ('{"rope_scale": 2}', "rope_scale.*allowed: rope_theta, max_position_embeddings"),
        ('{"rope_theta": "wide"}', "not a number"),
        ('{"max_position_embeddings": 0}', "positive"),
    ):
        overrides.write_text(content)
        with pytest.raises(CheckpointError, match=message):
            load_spec(locate(directory, adapter))


def test_missing_files(base: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    _, directory = base
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        locate(directory, tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is missing"):
        load_spec(locate(directory, tmp_path))
