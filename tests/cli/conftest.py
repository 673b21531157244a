"""The commands, run in this process against a fake model."""

from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from shadowkv.cli import app as app_module
from shadowkv.cli import batch, demo, generate
from tests.cli.fakes import FakeLLM

Run = Callable[..., Result]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()
    for module in (batch, generate, demo):
        monkeypatch.setattr(module, "open_llm", lambda model, cache, load, terminal: fake)
    monkeypatch.setattr(generate, "just_enough", lambda load, model, texts, sampling: load)
    return fake


@pytest.fixture
def run() -> Run:
    def call(*args: object, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(app_module.app, [str(arg) for arg in args], input=stdin)

    return call
