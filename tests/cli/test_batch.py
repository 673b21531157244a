"""``shadowkv batch``: a bad line loses no other, and an interruption costs nothing that is finished."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shadowkv.cli import batch
from shadowkv.cli.batch_files import open_results
from shadowkv.cli.batch_run import BatchRun
from shadowkv.errors import ConfigError
from tests.cli.conftest import Run
from tests.cli.fakes import FakeLLM
from tests.repo.tree import ROOT


def request(custom_id: str, prompt: object = "hello", **body: object) -> str:
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, **body}}
    return json.dumps(line, ensure_ascii=False)


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(request(f"id-{i}", "x" * (i + 1), max_tokens=2) for i in range(9)), encoding="utf-8")
    return path


def test_every_line_is_answered(llm: FakeLLM, run: Run, source: Path, tmp_path: Path) -> None:
    result = run("batch", "m", source, "--output", tmp_path / "out.jsonl", "--max-batch", 2)
    assert result.exit_code == 0, result.stderr
    assert "9 lines answered, 0 failed, 0 were there already" in result.stderr
    found = rows(tmp_path / "out.jsonl")
    assert {row["custom_id"] for row in found} == {f"id-{i}" for i in range(9)}
    assert len({row["id"] for row in found}) == 9
    response = found[0]["response"]
    assert isinstance(response, dict)
    assert (response["status_code"], found[0]["error"]) == (200, None)
    assert response["body"]["usage"]["completion_tokens"] in (1, 2)
    assert llm.deepest <= 4


def test_chat_and_several_prompts(llm: FakeLLM, run: Run, tmp_path: Path) -> None:
    chat = {"custom_id": "c", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "yo"}]}}
    (tmp_path / "in").write_text(json.dumps(chat) + "\n" + request("p", ["one", "two"], max_tokens=3), encoding="utf-8")
    assert run("batch", "m", tmp_path / "in", "--output", tmp_path / "out").exit_code == 0
    found = {row["custom_id"]: row["response"]["body"]["choices"] for row in rows(tmp_path / "out")}  # type: ignore[index]
    assert found["c"][0]["message"]["content"] == "<user>yo</user><assistant>"[::-1]
    assert [choice["text"] for choice in found["p"]] == ["eno", "owt"]


def test_bad_lines_become_error_lines(llm: FakeLLM, run: Run, tmp_path: Path) -> None:
    llm.max_prompt = 50
    lines = [
        request("good"),
        "{not json",
        "[1]",
        json.dumps({"url": "/v1/completions", "body": {"prompt": "a"}}),
        request("good"),
        json.dumps({"custom_id": "url", "url": "/v1/nothing", "body": {}}),
        json.dumps({"custom_id": "get", "method": "GET", "url": "/v1/completions", "body": {}}),
        request("param", temperature="hot"),
        request("bias", logit_bias={"1": 2}),
        request("long", "x" * 100),
        request("half", ["short", "x" * 100]),
        request("empty", ""),
        request("broken", "FAIL"),
        "",
        request("also good"),
    ]
    (tmp_path / "in").write_text("\n".join(lines), encoding="utf-8")
    result = run("batch", "m", tmp_path / "in", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    found = rows(tmp_path / "out")
    assert len(found) == len([line for line in lines if line])
    codes = {(row["custom_id"], row.get("line")): row["error"] and row["error"]["code"] for row in found}  # type: ignore[index]
    assert codes == {
        ("good", None): None,
        (None, 2): "invalid_json",
        (None, 3): "invalid_json",
        (None, 4): "missing_custom_id",
        ("good", 5): "duplicate_custom_id",
        ("url", None): "invalid_url",
        ("get", None): "invalid_method",
        ("param", None): "invalid_type",
        ("bias", None): "unsupported_parameter",
        ("long", None): "invalid_request",
        ("half", None): "invalid_request",
        ("empty", None): "empty_prompt",
        ("broken", None): "server_error",
        ("also good", None): None,
    }
    statuses = {row["custom_id"]: row["response"]["status_code"] for row in found if row["custom_id"] != "good"}  # type: ignore[index]
    assert (statuses["long"], statuses["broken"], statuses["also good"]) == (400, 500, 200)
    assert len(llm.cancelled) == 1
    before = (tmp_path / "out").read_bytes()
    assert run("batch", "m", tmp_path / "in", "--output", tmp_path / "out").exit_code == 0
    assert (tmp_path / "out").read_bytes() == before, "a second run has nothing to do"


def test_retry_errors(llm: FakeLLM, run: Run, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(request("a") + "\n" + request("b", "x" * 100) + "\n" + "{", encoding="utf-8")
    llm.max_prompt = 50
    run("batch", "m", tmp_path / "in", "--output", tmp_path / "out")
    llm.max_prompt = 500
    result = run("batch", "m", tmp_path / "in", "--output", tmp_path / "out", "--retry-errors")
    assert "1 lines answered, 1 failed, 1 were there already" in result.stderr
    failed = {row["custom_id"]: row["error"] is not None for row in rows(tmp_path / "out")}
    assert failed == {"a": False, "b": False, None: True}


def test_interrupted_and_resumed(llm: FakeLLM, run: Run, source: Path, tmp_path: Path) -> None:
    llm.die_after = 1
    result = run("batch", "m", source, "--output", tmp_path / "out", "--max-batch", 2)
    assert result.exit_code == 130
    assert "run the same command again" in result.stderr
    assert len(rows(tmp_path / "out")) == 3
    again = FakeLLM()
    llm.die_after, llm.queue, llm.submitted = None, [], again.submitted
    assert run("batch", "m", source, "--output", tmp_path / "out").exit_code == 0
    assert len(llm.submitted) == 6
    assert sorted(str(row["custom_id"]) for row in rows(tmp_path / "out")) == [f"id-{i}" for i in range(9)]


def test_overwrite(llm: FakeLLM, run: Run, source: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert run("batch", "m", source, "--output", tmp_path / "out", "--overwrite").exit_code == 0
    assert len(llm.submitted) == 18
    assert len(rows(tmp_path / "out")) == 9


def test_finished_lines_that_left_the_input_are_told(llm: FakeLLM, run: Run, source: Path, tmp_path: Path) -> None:
    run("batch", "m", source, "--output", tmp_path / "out")
    source.write_text(request("id-0") + "\n" + request("new"), encoding="utf-8")
    result = run("batch", "m", source, "--output", tmp_path / "out", "--quiet")
    assert "warning: 8 finished custom_ids are not in" in result.stderr
    assert "id-1, id-2, id-3" in result.stderr


def test_refused_files(llm: FakeLLM, run: Run, source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    for output in (source, tmp_path / "link"):
        result = run("batch", "m", source, "--output", output)
        assert (result.exit_code, "--output is the input" in result.stderr) == (2, True)
    assert run("batch", "m", tmp_path / "none", "--output", tmp_path / "out").exit_code == 2
    for text in ("my diary\n", "my diary", '{"a": 1}\n', '{"id": "batch_req_1", "error": null}\n'):
        (tmp_path / "diary").write_text(text, encoding="utf-8")
        result = run("batch", "m", source, "--output", tmp_path / "diary")
        assert (result.exit_code, "name another --output" in result.stderr) == (2, True)
        assert (tmp_path / "diary").read_text(encoding="utf-8") == text


def test_outputs_that_cannot_be_read_back_are_refused(llm: FakeLLM, run: Run, source: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for output in ("/dev/full", "/dev/zero", tmp_path / "pipe", tmp_path, "-"):
        result = run("batch", "m", source, "--output", output)
        assert (result.exit_code, f"--output {output} is no file" in result.stderr) == (2, True), result.stderr
    assert not Path("-").exists()


def test_nothing_to_do_loads_nothing(
    llm: FakeLLM, run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("batch", "m", source, "--output", tmp_path / "out")
    monkeypatch.setattr(batch, "open_llm", lambda *_: pytest.fail("the model is loaded"))
    result = run("batch", "m", source, "--output", tmp_path / "out")
    assert (result.exit_code, "9 lines are there already; nothing is left to do" in result.stderr) == (0, True)
    (tmp_path / "empty").write_text("\n\n")
    result = run("batch", "m", tmp_path / "empty", "--output", tmp_path / "none")
    assert (result.exit_code, result.stderr) == (2, f"error: {tmp_path / 'empty'} holds no requests\n")
    assert not (tmp_path / "none").exists()


def test_a_disk_that_fills_up_keeps_what_is_whole(source: Path, tmp_path: Path) -> None:
    """The kernel writes the part of the last line that fits, and says so only by its number of bytes."""
    finish(source, tmp_path / "whole")
    room = (tmp_path / "whole").stat().st_size - 20
    program = (
        "import resource, sys, pathlib\n"
        "from tests.cli.test_batch import finish\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, resource.RLIM_INFINITY))\n"
        "finish(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))\n"
    )
    output = tmp_path / "out"
    child = subprocess.run(
        [sys.executable, "-c", program, source, output], capture_output=True, cwd=ROOT, check=False, text=True
    )
    assert "File too large" in child.stderr
    assert output.stat().st_size == room
    finish(source, output)
    assert sorted(str(row["custom_id"]) for row in rows(output)) == [f"id-{i}" for i in range(9)]


def test_half_a_surrogate_pair_survives(llm: FakeLLM, run: Run, tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"custom_id": "\\ud800", "url": "/v1/completions", "body": {"prompt": "a"}}')
    for _ in range(2):
        assert run("batch", "m", tmp_path / "in", "--output", tmp_path / "out").exit_code == 0
    assert len(llm.submitted) == 1


def finish(source: Path, output: Path, *, die_after: int | None = None) -> FakeLLM:
    """One run over the files, without the command around it."""
    llm = FakeLLM(die_after=die_after)
    results = open_results(output)
    try:
        run = BatchRun(llm, "m", results, look_ahead=4, default_max_tokens=None)  # type: ignore[arg-type]
        run.work(source, lambda *_: None)
    except KeyboardInterrupt:
        pass
    finally:
        results.close()
    return llm


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_torn_at_any_byte_then_resumed(source: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Whatever a crash leaves of the output, a second run ends with each line exactly once."""
    output = tmp_path / "out"
    output.unlink(missing_ok=True)
    finish(source, output, die_after=data.draw(st.integers(0, 4)))
    whole = output.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    output.write_bytes(whole[:cut])
    kept = whole[:cut].count(b"\n")
    llm = finish(source, output)
    assert sorted(str(row["custom_id"]) for row in rows(output)) == [f"id-{i}" for i in range(9)]
    assert output.read_bytes().startswith(whole[: whole.rfind(b"\n", 0, cut) + 1])
    assert len(llm.submitted) in (9 - kept, 9 - kept - 1), "only what is not there is done again"


def test_a_foreign_line_in_the_middle_is_refused(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    finish(source, output)
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join([lines[0], b"\x00\x00\x00\n", *lines[1:]]))
    with pytest.raises(ConfigError, match="line 2, is not a result"):
        open_results(output)
