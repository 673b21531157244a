"""``shadowkv compare`` says what is wrong with a question before it loads the model that would answer it."""

import json
from pathlib import Path

import pytest

from shadowkv.cli.compare import swept
from shadowkv.config import ShadowKVConfig
from shadowkv.engine.tokenizer import Tokenizer
from shadowkv.errors import ConfigError
from shadowkv.models import load
from tests.cli.conftest import Run
from tests.cli.fakes import FakeTokenizer
from tests.cli.test_plan import LLAMA_3_8B


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A model of 1,024 tokens without weights, and a text of 2,000."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_3_8B, "max_position_embeddings": 1024}))
    (tmp_path / "text").write_text("x" * 1999)
    monkeypatch.setattr(Tokenizer, "load", lambda path: FakeTokenizer())
    monkeypatch.setattr(load, "load_decoder", lambda *_, **__: pytest.fail("weights are loaded"))
    return ["compare", tmp_path, "--text", tmp_path / "text"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--steps", 0), "--steps is 0; it must be at least 1"),
        (("--prompt-tokens", 0), "--prompt-tokens is 0; it must be at least 1"),
        (("--json", "--markdown"), "--json and --markdown exclude each other; give one"),
        (("--prompt-tokens", 3000, "--steps", 8), "the text has 2000 tokens and 3009 are needed"),
        (("--prompt-tokens", 1020, "--steps", 8), "1,020 tokens of prompt and 8 steps; llama takes 1,024"),
        (("--passage", "neither"), "--passage is 'neither'; allowed: natural, copy, both"),
        (("--methods", "quest,telepathy"), "--methods names 'telepathy'"),
        (("--budget", "3%,0%"), "--budget is '0%'"),
        (("--sweep", "rank"), "--sweep has 'rank'; give SETTING=VALUE"),
    ],
)
def test_refusals(run: Run, words: list[object], more: tuple[object, ...], says: str) -> None:
    result = run(*words, *more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr


def test_a_switch_can_be_swept() -> None:
    found = swept(ShadowKVConfig(), "reuse=yes,no")
    assert found == [("reuse=yes", ShadowKVConfig(reuse=True)), ("reuse=no", ShadowKVConfig(reuse=False))]
    with pytest.raises(ConfigError, match=r"--reuse: 'maybe' is not allowed; allowed: yes, no"):
        swept(ShadowKVConfig(), "reuse=maybe")
