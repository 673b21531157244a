"""The harness on a tiny random model: every sample once, whatever interrupts it; tables with honest differences."""

import json

import pytest

from shadowkv.config import FullConfig, ShadowKVConfig
from shadowkv.errors import CheckpointError, ConfigError
from shadowkv.eval.harness import Answers, Harness, Method, with_budget
from shadowkv.eval.report import cell, tables
from shadowkv.eval.sample import Frame, Sample
from shadowkv.eval.suite import GROUPS, find_tasks
from tests.test_front_door import open_llm

SPARSE = ShadowKVConfig(rank=16, budget_tokens=16, outlier_chunks=2, recent_chunks=7)
LENGTH = 400


def samples(turns: int | None = None) -> list[Sample]:
    made = []
    for index in range(3):
        context = "".join(chr(33 + (index * 7 + i * i) % 90) for i in range(300))
        for turn in range(turns or 1):
            made.append(
                Sample(
                    task="letters",
                    index=index * (turns or 1) + turn,
                    context=context,
                    question=f"what is {turn}?",
                    answer_prefix="",
                    references=("a",),
                    max_new_tokens=6,
                    metric="string_match_all",
                    turn=turn if turns else None,
                    separator=" ",
                )
            )
    return made


@pytest.fixture
def harness(device, tmp_path):
    def make() -> Harness:
        llm = open_llm(device, FullConfig())
        return Harness(llm, Answers(tmp_path / "answers.jsonl"), {"model": "tiny", "seed": 1})

    return make


def unseen(stage: str, done: int, total: int) -> None:
    pass


def run(harness: Harness, method: Method, made: list[Sample]) -> None:
    harness.run(made, lambda sample: Frame(between=" "), LENGTH, method, unseen)


@pytest.mark.parametrize("turns", [None, 3])
def test_every_sample_is_answered_once_and_a_broken_run_goes_on(harness, tmp_path, turns):
    made, path = samples(turns), tmp_path / "answers.jsonl"
    methods = [Method("full", FullConfig()), with_budget("shadowkv", SPARSE, 0.05, LENGTH)]
    first = harness()
    for method in methods:
        run(first, method, made)
    whole = path.read_bytes()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert len(rows) == len({Answers.key(row) for row in rows}) == 2 * len(made)
    assert all(0 <= row["score"] <= 1 and row["model"] == "tiny" for row in rows)
    assert {row["attention"] for row in rows if row["method"] == "shadowkv 5.00%"} == {"sparse"}
    for cut in (0, len(whole) // 3, len(whole) - 5, len(whole)):
        path.write_bytes(whole[:cut])
        again = harness()
        for method in methods:
            run(again, method, made)
        text = path.read_bytes()
        kept = {Answers.key(json.loads(line)): json.loads(line) for line in text.splitlines()}
        assert len(kept) == len(text.splitlines()) == 2 * len(made)
        for row in rows:  # greedy answers are the same in every run
            assert kept[Answers.key(row)]["prediction"] == row["prediction"]


def test_other_settings_are_another_run(harness):
    one = harness()
    run(one, with_budget("shadowkv", SPARSE, 0.05, LENGTH), samples())
    run(one, with_budget("shadowkv", SPARSE, 0.10, LENGTH), samples())
    assert len(one.answers.rows) == 6
    assert {row["settings"]["budget_tokens"] for row in one.answers.rows} == {20, 40}


def test_a_damaged_file_of_answers_is_refused_with_the_line(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"a": 1\n{"b": 2}\n')
    with pytest.raises(CheckpointError, match="line 1 is not JSON"):
        Answers(path)


def row(method: str, index: int, score: float, task: str = "t") -> dict[str, object]:
    return {"task": task, "length": 100, "index": index, "turn": None, "method": method, "score": score}


def test_a_difference_is_shown_only_where_it_is_one():
    rows = [row("full", i, 1.0) for i in range(40)]
    rows += [row("worse", i, float(i % 2)) for i in range(40)]
    rows += [row("same", i, float(i != 3)) for i in range(40)]
    rows += [row("more", i, 1.0) for i in range(60)]  # samples that full attention has not answered are no pairs
    columns, lines = tables(rows)[100]
    assert columns == ["task", "full", "worse", "same", "more"]
    assert ", -50.0 [" in lines[0][2]
    assert "[" not in lines[0][1] + lines[0][3] + lines[0][4]
    assert cell(rows, "t", "more").samples == 60
    assert cell(rows, "t", "absent") is None


def test_tasks_and_groups():
    assert [task.name for task in find_tasks(["vt", "niah_turns", "vt"])] == ["vt", "niah_turns"]
    assert [task.name for task in find_tasks(["ruler"])] == list(GROUPS["ruler"])
    with pytest.raises(ConfigError, match="no task 'vtt'"):
        find_tasks(["vtt"])
