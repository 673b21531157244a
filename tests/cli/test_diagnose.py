"""``shadowkv diagnose`` from files to files on a tiny model, and what it refuses before it loads one."""

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shadowkv import ShadowKVConfig
from shadowkv.cli.app import app
from shadowkv.cli.options import flags_of, words_of
from shadowkv.config import QuestConfig
from shadowkv.diagnose.figures import FIGURES
from shadowkv.engine.tokenizer import Tokenizer
from shadowkv.eval import plotting
from shadowkv.models import load
from tests.cli.conftest import Run
from tests.cli.fakes import FakeTokenizer
from tests.cli.test_plan import LLAMA_3_8B
from tests.engine import vocabularies
from tests.models.tiny_models import save, tiny_model

SMALL = ("--prompt-tokens", 512, "--steps", 3, "--query-tokens", 8, "--keep", "80%")
PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, and two texts."""
    folder = tmp_path_factory.mktemp("diagnose")
    vocabularies.save("byte_level", folder / "model")
    save(tiny_model("llama", {"vocab_size": 400, "max_position_embeddings": 1024}), folder / "model")
    letters = random.Random(0)
    for name in ("text", "other"):
        (folder / name).write_text("".join(letters.choice("abcdefgh ,\n") for _ in range(2500)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def ended(files: Path) -> Result:
    """One whole run."""
    words = ("diagnose", files / "model", "--text", files / "text", "--other", files / "other", *SMALL)
    result = CliRunner().invoke(app, [str(word) for word in (*words, "--output", files / "out" / "one")])
    assert result.exit_code == 0, result.output
    return result


def test_tables_figures_and_numbers(ended: Result, files: Path) -> None:
    out = files / "out" / "one"
    whole = json.loads((out / "diagnose.json").read_text(encoding="utf-8"))
    assert {path.name for path in out.iterdir()} == {"diagnose.json", *(f"{name}.png" for name in FIGURES)}
    assert all((out / f"{name}.png").read_bytes().startswith(PNG) for name in FIGURES)
    assert [text["name"] for text in whole["similarity"]["texts"]] == ["the prompt's second half", str(files / "other")]
    assert whole["measured"]["commit"]
    part = whole["recommendation"]
    assert part["device_bytes"] <= part["allowed_bytes"] <= 0.8 * part["full_attention_bytes"]
    for shown in ("recommended: ", part["python"], " ".join(part["flags"])):
        assert shown in ended.stdout


def test_flags_and_python_make_the_same_settings(ended: Result, files: Path) -> None:
    part = json.loads((files / "out" / "one" / "diagnose.json").read_text(encoding="utf-8"))["recommendation"]
    config = eval(part["python"], {"ShadowKVConfig": ShadowKVConfig})
    assert words_of(config) == part["flags"]
    flags, words = {flag.option: flag for flag in flags_of(ShadowKVConfig)}, iter(part["flags"])
    assert ShadowKVConfig(**{flags[word].field: flags[word].value(next(words)) for word in words}) == config


def test_a_figure_can_be_drawn_again_from_the_json(ended: Result, files: Path, tmp_path: Path) -> None:
    out = files / "out" / "one"
    whole = json.loads((out / "diagnose.json").read_text(encoding="utf-8"))
    again = plotting.save_figure(FIGURES["reuse"](whole), tmp_path / "reuse.png")
    assert again.read_bytes() == (out / "reuse.png").read_bytes()


def test_without_matplotlib_the_rest_is_there(run: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    words = ("diagnose", files / "model", "--text", files / "text", *SMALL, "--json", "--quiet")
    result = run(*words, "--output", files / "bare")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"error: {plotting.MISSING}"
    assert "pip install 'shadowkv-inference[figures]'" in plotting.MISSING
    assert [path.name for path in (files / "bare").iterdir()] == ["diagnose.json"]
    assert json.loads(result.stdout) == json.loads((files / "bare" / "diagnose.json").read_text(encoding="utf-8"))


def test_settings_as_words() -> None:
    config = ShadowKVConfig(rank=(1, 2), attend="resident", centre_keys=False)
    assert words_of(config) == ["--rank", "1,2", "--attend", "resident", "--no-centre-keys"]
    assert words_of(QuestConfig(page_tokens=8)) == ["--method", "quest", "--page-tokens", "8"]
    assert words_of(ShadowKVConfig()) == []


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A model of 2,048 tokens without weights, and a text of 1,500."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_3_8B, "max_position_embeddings": 2048}))
    for name, length in (("text", 1499), ("short", 40), ("empty", 0)):
        (tmp_path / name).write_text("x" * length)
    monkeypatch.setattr(Tokenizer, "load", lambda path: FakeTokenizer())
    monkeypatch.setattr(load, "load_decoder", lambda *_, **__: pytest.fail("weights are loaded"))
    monkeypatch.chdir(tmp_path)
    return ["diagnose", tmp_path, "--text", "text", "--output", "out"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--steps", 1), "--steps is 1; it must be at least 2"),
        (("--prompt-tokens", 500), "--prompt-tokens is 500; it must be at least 512"),
        (("--prompt-tokens", 2000), "2,000 tokens of prompt and 64 steps; llama takes 2,048"),
        (("--prompt-tokens", 1400), "the text has 1,500 tokens and 1,529 are needed"),
        (("--prompt-tokens", 1024, "--other", "short"), "short has 41 tokens and 512 are needed"),
        (("--prompt-tokens", 1024, "--other", "empty"), "empty is empty"),
        (("--keep", "0%"), "--keep: '0%' is not a share; give one above 0 and up to 1, such as 1.56% or 0.0156"),
        (
            ("--keep", "15%", "--device-bytes-per-token", 20000),
            "--keep and --device-bytes-per-token exclude each other",
        ),
        (("--prompt-tokens", 1024, "--keep", "1%"), "the least that ShadowKV takes is"),
        (("--budget", "2"), "--budget: '2' is not a share"),
        (("--device", "abacus"), "device is 'abacus'"),
        (("--dtype", "int8"), "dtype is 'int8'"),
    ],
)
def test_refusals(run: Run, words: list[object], tmp_path: Path, more: tuple[object, ...], says: str) -> None:
    result = run(*words, *more)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert says in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_not_there(run: Run, words: list[object]) -> None:
    result = run(*words, "--other", "nowhere")
    assert result.exit_code == 1
    assert "nowhere: No such file or directory" in result.stderr
