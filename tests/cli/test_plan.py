"""``shadowkv plan`` reads a config and nothing else."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 1048576,
    "rope_theta": 3580165449.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return tmp_path


def test_the_papers_settings(run: Run, model: Path) -> None:
    result = run("plan", model, "--context", "128k", "--rank", 160, "--gpu-bandwidth", "2TB/s", "--hit-rate", 0.6)
    assert result.exit_code == 0, result.output
    assert "7.08 by the paper's formula, 6.26 in true bytes" in result.stdout
    assert "equivalent bandwidth: 7.16 TB/s" in result.stdout
    for kind in (
        "weights",
        "activations",
        "coefficients",
        "bases",
        "landmarks",
        "outliers",
        "resident chunks",
        "values",
    ):
        assert kind in result.stdout
    assert "limited by" in result.stdout


def test_json(run: Run, model: Path) -> None:
    result = run("plan", model, "--json", "--method", "full", "--gpu-memory", "24GiB", "--output-tokens", "2k")
    plan = json.loads(result.stdout)
    assert plan["memory"]["device_bytes"] == 24 << 30
    assert plan["context_tokens"] + plan["output_tokens"] == 131072
    assert plan["chosen"]["method"] == plan["full"]["method"] == "full"
    assert plan["chosen"]["sequence_device_bytes"] == 131072 * 2 * 1024 * 32 * 2


def test_refusals(run: Run, model: Path, tmp_path: Path) -> None:
    result = run("plan", model, "--context", "2M")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "2,098,176 tokens together" in result.stderr
    assert run("plan", tmp_path / "nothing").exit_code == 1
    assert run("plan", model, "--dtype", "int4").exit_code == 2


def test_a_context_as_long_as_the_model_takes_leaves_the_answer_what_is_left(run: Run, model: Path) -> None:
    for context, output in (("1M", 0), ("1048000", 576), ("8k", 1024)):
        result = run("plan", model, "--json", "--context", context)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["output_tokens"] == output
    assert run("plan", model, "--context", "1M", "--output-tokens", 1).exit_code == 2


def test_a_short_model_keeps_most_of_its_length_for_the_context(run: Run, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**LLAMA_3_8B, "max_position_embeddings": 256}))
    plan = json.loads(run("plan", model, "--json").stdout)
    assert (plan["context_tokens"], plan["output_tokens"]) == (224, 32)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--hit-rate", "2"), "--hit-rate is 2; it must be from 0 to 1"),
        (("--hit-rate", "-0.1"), "--hit-rate is -0.1; it must be from 0 to 1"),
        (("--pcie-bandwidth", "0"), "--pcie-bandwidth is 0; it must be more than 0"),
        (("--gpu-bandwidth", "0"), "--gpu-bandwidth is 0; it must be more than 0"),
        (("--output-tokens", "2M"), "--output-tokens is 2,097,152; llama takes 1,048,576 tokens in all"),
    ],
)
def test_silly_numbers(run: Run, model: Path, words: tuple[str, str], says: str) -> None:
    result = run("plan", model, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
