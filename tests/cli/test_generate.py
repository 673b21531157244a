"""``shadowkv generate`` against a fake model that answers with the end of its prompt, backwards."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.fakes import FakeLLM


def test_prompt_streams_to_stdout_and_the_rest_to_stderr(llm: FakeLLM, run: Run) -> None:
    result = run("generate", "m", "--prompt", "abc", "--no-chat", "--max-tokens", 3)
    assert (result.exit_code, result.stdout) == (0, "cba\n")
    assert "3 tokens, ended by length" in result.stderr
    assert "hit rate 0.75, cache 2 KiB device, 4 KiB host" in result.stderr


def test_quiet(llm: FakeLLM, run: Run) -> None:
    result = run("generate", "m", "--prompt", "abc", "--no-chat", "--max-tokens", 3, "--quiet")
    assert (result.stdout, result.stderr) == ("cba\n", "")


def test_chat_template_is_the_default(llm: FakeLLM, run: Run) -> None:
    result = run("generate", "m", "--prompt", "abc", "--max-tokens", 100, "--quiet")
    assert result.stdout == "<user>abc</user><assistant>"[::-1] + "\n"


def test_chat_without_a_template_is_refused(llm: FakeLLM, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "has_chat_template", False)
    assert run("generate", "m", "--prompt", "abc", "--quiet", "--max-tokens", 3).stdout == "cba\n"
    result = run("generate", "m", "--prompt", "abc", "--chat")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr


def test_prompt_file_and_stdin(llm: FakeLLM, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("xyz", encoding="utf-8")
    words = ("generate", "m", "--no-chat", "--max-tokens", 3, "--quiet")
    assert run(*words, "--prompt-file", file).stdout == "zyx\n"
    assert run(*words, stdin="xyz").stdout == "zyx\n"
    assert run(*words, "--prompt-file", "-", stdin="xyz").stdout == "zyx\n"


def test_a_context_is_computed_once_for_all_questions(llm: FakeLLM, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.txt"
    file.write_text("long text", encoding="utf-8")
    words = ("generate", "m", "--context", file, "--question", "one?", "--question", "two?", "--quiet")
    result = run(*words, "--max-tokens", 100)

    assert (
        result.stdout[::-1].strip()
        == "<user>long text\n\ntwo?</user><assistant>\n<user>long text\n\none?</user><assistant>"
    )
    assert llm.contexts == [len("<user>long text\n\n")]
    assert llm.released == 1


def test_json_has_everything(llm: FakeLLM, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.txt"
    file.write_text("text", encoding="utf-8")
    result = run("generate", "m", "--context", file, "--question", "q?", "--json", "--n", 2, "--logprobs", 1)
    document = json.loads(result.stdout)
    (output,) = document["outputs"]
    assert document["method"]["name"] == "shadowkv"
    assert document["plan"] == {"fake": True}
    assert document["context"]["tokens"] == len("<user>text\n\n")
    assert output["question"] == "q?"
    assert len(output["completions"]) == 2
    assert output["completions"][0]["stats"]["hit_rate"] == 0.75
    assert output["completions"][0]["finish_reason"] == "length"


def test_several_samples_are_all_printed(llm: FakeLLM, run: Run) -> None:
    result = run("generate", "m", "--prompt", "abc", "--no-chat", "--n", 2, "--max-tokens", 3, "--quiet")
    assert result.stdout == "cba\n---\ncba\n"


def test_an_answer_that_ends_in_an_error_fails_the_command(llm: FakeLLM, run: Run) -> None:
    result = run("generate", "m", "--prompt", "FAIL", "--quiet")
    assert result.exit_code == 1
    assert "error: layer 3 has NaN keys" in result.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--prompt", "a", "--prompt-file", "f"], "--prompt and --prompt-file exclude each other"),
        (["--prompt", "a", "--context", "f", "--question", "q"], "--prompt and --context exclude each other"),
        (["--question", "q"], "--question asks about a --context"),
        (["--context", "f"], "--context needs at least one --question"),
        (["--context", "f", "--question", " "], "a --question is empty"),
        (["--prompt", "  "], "--prompt is empty"),
        (["--prompt", "a", "--logprobs", "2"], "--logprobs are only in --json"),
        (["--prompt", "a", "--max-batch", "0"], "--max-batch is 0; it must be at least 1"),
        (["--prompt-file", "-"], "standard input is empty"),
    ],
)
def test_inputs_that_contradict(llm: FakeLLM, run: Run, words: list[str], says: str) -> None:
    result = run("generate", "m", *words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert says in result.stderr


def test_files_are_named(llm: FakeLLM, run: Run, tmp_path: Path) -> None:
    result = run("generate", "m", "--prompt-file", tmp_path / "none.txt")
    assert (result.exit_code, result.stderr) == (1, f"error: {tmp_path / 'none.txt'}: No such file or directory\n")
    bad = tmp_path / "latin.txt"
    bad.write_bytes(b"caf\xe9")
    result = run("generate", "m", "--prompt-file", bad)
    assert (result.exit_code, result.stderr) == (2, f"error: {bad} is not UTF-8 text: byte 0xe9 at offset 3\n")


def test_unknown_flag(run: Run) -> None:
    assert run("generate", "m", "--no-such-flag").exit_code == 2
