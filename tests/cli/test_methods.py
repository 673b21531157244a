"""Every cache method is there on the command line, with its own settings and defaults."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from shadowkv.cli.options import field_docs, methods
from tests.cli.conftest import Run
from tests.cli.test_plan import LLAMA_3_8B


@pytest.mark.parametrize("config", methods().values(), ids=methods())
def test_every_setting_has_help(config: type) -> None:
    assert {item.name for item in fields(config)} <= set(field_docs(config))


def test_a_flag_of_several_methods_shows_each_ones_default(run: Run) -> None:
    shown = " ".join(run("plan", "--help").stdout.split())
    assert "always attended. Default: 8 (selection, quest, loki, infinigen, oracle, random); 4 (streaming)." in shown
    assert "Where the values of the context live. Default: host (shadowkv); device (selection, quest" in shown
    assert "Tokens selected per KV head and step. Default: 2048." in shown


@pytest.mark.parametrize("name", methods())
def test_every_method_is_planned(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    words = ["plan", tmp_path, "--json", "--method", name, "--context", "128k", "--gpu-memory", "80GiB"]
    plan = json.loads(run(*words, "--host-memory", "500GiB").stdout)
    assert plan["chosen"]["method"] == name
    share = plan["chosen"]["sequence_device_bytes"] / plan["full"]["sequence_device_bytes"]
    if name in ("snapkv", "streaming"):
        assert share < 0.05
    elif name != "full":
        bounds = {"shadowkv": (0.1, 0.2), "selection": (1.05, 1.1), "quest": (1.05, 1.1), "loki": (1.1, 1.15)}
        bounds["infinigen"] = (1.14, 1.16)
        low, high = bounds.get(name, (1.0, 1.0))
        assert low <= share <= high
    if "value_store" in {item.name for item in fields(methods()[name])}:
        moved = json.loads(run(*words, "--host-memory", "500GiB", "--value-store", "host").stdout)
        assert moved["chosen"]["sequence_host_bytes"] == plan["full"]["sequence_device_bytes"] // 2
