"""``shadowkv bench`` and ``shadowkv check`` on a machine without a GPU."""

import json
from pathlib import Path

import pytest
import torch

from shadowkv.bench.statistics import Spread
from shadowkv.ops.contract.base import Traffic
from tests.bench.fakes import H200
from tests.cli.conftest import Run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")

QUICK = ("--geometry", "tiny", "--context", "1k", "--batch", 2, "--steps", 2, "--warmup", 1)
ROOM = ("--gpu-memory", "64MiB", "--host-memory", "64MiB", "--budget-tokens", 128, "--outlier-chunks", 4)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ((), "give either --model or --geometry"),
        (("--geometry", "tiny", "--model", "m"), "give either --model or --geometry"),
        (("--geometry", "huge"), "--geometry is 'huge'; allowed: llama-3.1-8b"),
        ((*QUICK, "--methods", "full,best"), "--methods names 'best'; allowed: full"),
        ((*QUICK, "--steps", 0), "--steps is 0; it must be at least 1"),
        ((*QUICK, "--warmup", 0), "--warmup is 0; it must be at least 1"),
        ((*QUICK, "--context", "1k,0"), "--context is '1k,0'; each must be at least 1"),
        ((*QUICK, "--batch", 0), "--batch is 0; give at least 1, or max"),
        ((*QUICK, "--batch", "many"), "'many' is not a whole number"),
        ((*QUICK, "--hit-rate", 2), "--hit-rate is 2; give a number from 0 to 1, or measured"),
        ((*QUICK, "--prefill", "none"), "--prefill: 'none' is not allowed; allowed: synthetic, real"),
        ((*QUICK, "--text", "x"), "--text is for real prompts"),
        ((*QUICK, "--prefill", "real", "--text", "x"), "--text needs the tokenizer of a --model"),
        ((*QUICK, "--context", "1m"), "context and output are 1,048,587 tokens together; llama takes 65,536"),
    ],
)
def test_refusals(run: Run, more: tuple[object, ...], says: str) -> None:
    result = run("bench", "decode", *more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr


def test_decode_prints_tables_and_writes_both_files(run: Run, tmp_path: Path) -> None:
    result = run("bench", "decode", *QUICK, *ROOM, "--output", tmp_path / "new", "--quiet", "--hit-rate", 0.5)
    assert result.exit_code == 0, result.stderr
    for piece in ("tiny in float32, random weights", "shadowkv", "synthetic hit rate 0.5", "synthetic: synthetic keys"):
        assert piece in result.stdout
    document = json.loads((tmp_path / "new" / "decode.json").read_text())
    assert [row["method"] for row in document["rows"]] == ["full", "shadowkv"]
    assert document["measured"]["commit"]
    assert document["ceilings"] is None
    page = (tmp_path / "new" / "decode.md").read_text()
    assert "| 1,024 | full | 2 |" in page
    assert "synthetic: random weights" in page


def test_decode_as_json(run: Run) -> None:
    result = run("bench", "decode", *QUICK, *ROOM, "--methods", "shadowkv", "--prefill", "real", "--json", "--quiet")
    document = json.loads(result.stdout)
    (row,) = document["rows"]
    assert (row["context_tokens"], row["batch"], row["speedup"]) == (1024, 2, None)
    assert row["prefill_s"] > row["index_s"] > 0
    assert row["synthetic"] == ["random weights", "prompts of random tokens"]


def test_nothing_fits(run: Run) -> None:
    result = run("bench", "decode", *QUICK, "--gpu-memory", "1MiB", "--host-memory", "1MiB")
    assert result.exit_code == 1
    assert "one sequence of 1,035 tokens needs" in result.stderr


def test_kernels_are_timed_on_a_gpu_only(run: Run) -> None:
    result = run("bench", "kernels")
    assert result.exit_code == 2
    assert "kernels are timed on a GPU only, and the device is cpu" in result.stderr


def test_kernels_beside_the_library(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of the command but the GPU's part."""
    from shadowkv.bench import ceilings, checks, kernels, library, timing

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(timing, "require_gpu", lambda device: None)
    monkeypatch.setattr(timing, "Stopwatch", lambda device: None)
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda watch: H200)
    spread, traffic = Spread(2.0, 1.9, 2.1, 30), Traffic(4_320_000_000)

    def row(by: str) -> kernels.Timed:
        return kernels.timed("attention", "dense, 7 x 8 tokens", torch.bfloat16, by, spread, traffic, H200)

    wrong = checks.Checked("score", "bfloat16", 2, 1, 3.0, failures=["case: out: error 3, allowed 1"])
    monkeypatch.setattr(kernels, "time_ops", lambda *_: kernels.KernelRun([row("shadowkv")], [wrong]))
    monkeypatch.setattr(library, "time_library", lambda *_: [row("torch flash")])
    result = run("bench", "kernels", "--output", tmp_path)
    assert result.exit_code == 1
    assert "error: score is not timed, since it fails its check: case: out: error 3, allowed 1" in result.stderr
    assert "torch flash" in result.stdout
    assert "50% HBM" in result.stdout
    document = json.loads((tmp_path / "kernels.json").read_text())
    assert [(row["by"], row["limit"], row["share"]) for row in document["rows"]] == [
        ("shadowkv", "HBM", 0.5),
        ("torch flash", "HBM", 0.5),
    ]
    assert document["ceilings"] == H200.to_dict()
    assert document["refused"][0]["op"] == "score"


def test_check_refuses_a_cpu_without_the_interpreter(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = run("check")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "set TRITON_INTERPRET=1" in result.stderr


def test_check_in_the_interpreter(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = run("check", "--ops", "overwrite_logits", "--quiet")
    assert result.exit_code == 0, result.stderr
    assert "kernels, interpreted" in result.stdout
    document = json.loads(run("check", "--ops", "overwrite_logits", "--json", "--quiet").stdout)
    assert document["kernels"] == "interpreted"
    assert [(row["dtype"], row["cases"] - row["passed"]) for row in document["rows"]] == [
        ("float32", 0),
        ("float16", 0),
    ]


def test_a_wrong_kernel_is_named_and_fails_the_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from shadowkv.bench import checks

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    wrong = checks.Checked("score", "float16", 2, 1, 3.0, failures=["case: out: error 3, allowed 1"])
    monkeypatch.setattr(checks, "check_ops", lambda *_: [wrong])
    result = run("check", "--quiet")
    assert result.exit_code == 1
    assert "error: score in float16: case: out: error 3, allowed 1" in result.stderr


def test_check_names_an_unknown_operation(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = run("check", "--ops", "sorcery")
    assert result.exit_code == 2
    assert "there is no operation 'sorcery'" in result.stderr
