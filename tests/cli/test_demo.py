"""The demo's document, its accounts and its output; the model is fake, the real one runs in ``make demo``."""

import json
from dataclasses import replace

import pytest

from shadowkv.errors import RequestError
from shadowkv.eval.demo import FACTS, INTRODUCTION, Answer, MethodResult, agreement, lost, manual
from tests.cli.conftest import Run
from tests.cli.fakes import FakeLLM, FakeTokenizer


def test_facts_lie_where_they_say() -> None:
    text = manual(FakeTokenizer(), 30_000)  # type: ignore[arg-type]
    assert text.startswith(INTRODUCTION)
    assert len(text) >= 30_000
    for fact in FACTS:
        assert text.count(fact.sentence) == 1
        assert fact.expected in fact.sentence
        assert fact.expected not in fact.question + fact.answer_prefix
        assert abs(100 * text.index(fact.sentence) / len(text) - fact.depth_percent) < 5


def test_the_manual_has_an_end() -> None:
    with pytest.raises(RequestError, match="the manual has"):
        manual(FakeTokenizer(), 10_000_000)  # type: ignore[arg-type]


def test_no_text_is_refused(llm: FakeLLM, run: Run) -> None:
    shown = run("demo", "--tokens", "0")
    assert (shown.exit_code, shown.stderr) == (2, "error: --tokens is 0; it must be at least 1\n")


def result(*answers: tuple[bool, tuple[int, ...]]) -> MethodResult:
    made = tuple(Answer(f"q{i}", "e", "t", right, tokens) for i, (right, tokens) in enumerate(answers))
    return MethodResult("m", made, 100, 2.0, 10, 5.0, 1, 2, None)


def test_accounts() -> None:
    full = result((True, (1, 2, 3)), (False, (4,)))
    assert agreement(full, full) == 1.0
    assert agreement(full, result((True, (1, 9)), (True, (4,)))) == 0.5
    assert lost(full, result((False, ()), (False, ()))) == ["q0"]
    assert (full.prefill_tokens_per_second, full.decode_tokens_per_second) == (50.0, 2.0)
    assert replace(full, decode_seconds=0.0).decode_tokens_per_second is None


def test_command(llm: FakeLLM, run: Run) -> None:
    shown = run("demo", "--tokens", "2k", "--quiet")
    assert shown.exit_code == 0, shown.stderr
    for text in ("prefill", "decode", "cache on the device", "cache on the host", "hit rate", "100.0%", "75.0%"):
        assert text in shown.stdout
    document = json.loads(run("demo", "--tokens", "2k", "--quiet", "--json").stdout)
    assert [one["method"] for one in document["results"]] == ["full attention", "ShadowKV"]
    assert document["agreement"] == 1.0
    assert len(document["results"][0]["answers"]) == len(FACTS)


def test_an_answer_that_ends_in_an_error_is_no_wrong_answer(
    llm: FakeLLM, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shadowkv.eval.demo.FACTS", (replace(FACTS[0], question="FAIL"),))
    shown = run("demo", "--tokens", "2k", "--quiet")
    assert (shown.exit_code, shown.stderr) == (1, "error: full attention, 'FAIL': layer 3 has NaN keys\n")
