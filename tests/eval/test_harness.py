"""The harness on a tiny random model: every sample once, whatever interrupts it; tables with honest differences."""

import json
from dataclasses import replace

import pytest

from shadowkv.config import FullConfig, SamplingParams, ShadowKVConfig, SnapKVConfig
from shadowkv.errors import CapacityError, CheckpointError, ConfigError
from shadowkv.eval.harness import Answers, Harness, Method, with_budget
from shadowkv.eval.report import MEAN, cell, tables
from shadowkv.eval.sample import Frame, Sample, by_context
from shadowkv.eval.suite import GROUPS, find_tasks
from shadowkv.lineup import Lineup
from tests.engine.tiny import END, assert_idle
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
    def make(methods: list[Method], rows: int = 4) -> Harness:
        configs = [method.config for method in methods]
        lineup = Lineup(
            open_llm(device, FullConfig(), device_bytes=256 << 20), configs, context_tokens=LENGTH, max_rows=rows
        )
        return Harness(lineup, Answers(tmp_path / "answers.jsonl"), {"model": "tiny", "seed": 1})

    return make


def unseen(stage: str, done: int, total: int) -> None:
    pass


def run(harness: Harness, methods: list[Method], made: list[Sample]) -> None:
    harness.run(made, lambda sample: Frame(between=" "), LENGTH, methods, unseen)
    for method in methods:
        assert_idle(harness.lineup.member(method.config).engine)


def sparse(share: float) -> Method:
    return with_budget(Method("shadowkv", SPARSE), share, LENGTH)


@pytest.mark.parametrize("turns", [None, 3])
def test_every_sample_is_answered_once_and_a_broken_run_goes_on(harness, tmp_path, turns):
    made, path = samples(turns), tmp_path / "answers.jsonl"
    methods = [Method("full", FullConfig()), sparse(0.05)]
    run(harness(methods), methods, made)
    whole = path.read_bytes()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert len(rows) == len({Answers.key(row) for row in rows}) == 2 * len(made)
    assert all(0 <= row["score"] <= 1 and row["model"] == "tiny" for row in rows)
    assert {row["attention"] for row in rows if row["method"] == "shadowkv 5.00%"} == {"sparse"}
    assert {(row["method_name"], row["budget"]) for row in rows} == {("full", None), ("shadowkv", 0.05)}
    for cut in (0, len(whole) // 3, len(whole) - 5, len(whole)):
        path.write_bytes(whole[:cut])
        run(harness(methods), methods, made)
        text = path.read_bytes()
        kept = {Answers.key(json.loads(line)): json.loads(line) for line in text.splitlines()}
        assert len(kept) == len(text.splitlines()) == 2 * len(made)
        for row in rows:  # greedy answers are the same in every run
            assert kept[Answers.key(row)]["prediction"] == row["prediction"]


@pytest.mark.parametrize("turns", [None, 3, -3])
def test_answers_are_those_of_each_question_asked_alone(harness, device, turns):
    """Whatever is computed once, taken from a record, or answered beside others."""
    made = [replace(one, turn=None) if turns == -3 else one for one in samples(turns and abs(turns))]
    methods = [Method("full", FullConfig()), sparse(0.05), Method("snapkv", SnapKVConfig(budget_tokens=64))]
    many, frame = harness(methods), Frame(between=" ")
    run(many, methods, made)
    for method in methods:
        alone = {}
        for group in by_context(made):
            llm = open_llm(device, method.config)
            head, rest = frame.parts(group[0])
            if len(group) == 1:
                (output,) = llm.generate(head + rest, SamplingParams(max_tokens=6))
                alone[group[0].index] = output.completions[0].text
                continue
            with llm.context(head) as context:
                for place, one in enumerate(group):
                    text = frame.next_turn(one) if turns == 3 and place else frame.parts(one)[1]
                    if place and turns == 3 and context.token_ids[-1] == END:
                        text = text.removeprefix(" ")  # the answer ended with it already
                    (output,) = context.generate(text, SamplingParams(max_tokens=6), keep=turns == 3)
                    alone[one.index] = output.completions[0].text
        got = {row["index"]: row["prediction"] for row in many.answers.rows if row["method"] == method.label}
        assert got == alone


def test_a_prompt_is_computed_once_for_all_methods(harness):
    methods = [Method("full", FullConfig()), sparse(0.05), sparse(0.10)]
    one = harness(methods)
    run(one, methods, samples())
    prompts = sum(len(f"{s.context} {s.question}") for s in samples())
    assert one.lineup.llm.computed_tokens == prompts
    for method in methods:  # at most five steps an answer
        assert one.lineup.member(method.config).computed_tokens <= 5 * len(samples())


def test_fewer_run_together_where_memory_is_short_and_too_little_is_refused(device):
    llm, configs = open_llm(device, FullConfig(), device_bytes=16 << 20), [FullConfig(), SPARSE]
    rows = [Lineup(llm, configs, context_tokens=tokens, max_rows=100).rows for tokens in (400, 800, 1600)]
    assert 100 > rows[0] > rows[1] > rows[2] >= 1
    with pytest.raises(CapacityError, match=r"comparing 2 methods at 8,000 tokens needs .* Compare fewer"):
        Lineup(llm, configs, context_tokens=8000, max_rows=100)


def test_other_settings_are_another_run(harness):
    methods = [sparse(0.05), sparse(0.10)]
    one = harness(methods)
    run(one, methods, samples())
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
    assert columns == ["method", "t"]
    texts = dict(lines)
    assert list(texts) == ["full", "worse", "same", "more"]
    assert ", -50.0 [" in texts["worse"]
    assert "[" not in texts["full"] + texts["same"] + texts["more"]
    assert cell(rows, "t", "more").samples == 60
    assert cell(rows, "t", "absent") is None


def test_the_mean_weighs_tasks_the_same_and_is_there_only_for_methods_that_did_all():
    rows = [row("full", i, 1.0, task) for i in range(20) for task in ("easy", "hard")]
    rows += [row("half", i, float(task == "easy"), task) for i in range(20) for task in ("easy", "hard")]
    rows += [row("part", i, 1.0, "easy") for i in range(20)]
    columns, lines = tables(rows)[100]
    assert columns == ["method", MEAN, "easy", "hard"]
    assert lines[0][1:] == ["100.0 (100 to 100)", "100", "100"]
    assert lines[1][1:] == ["50.0 (50 to 50), -50.0 [-50, -50]", "100", "0 [-100, -100]"]
    assert lines[2][1:] == ["", "100", ""]


def test_tasks_and_groups():
    assert [task.name for task in find_tasks(["vt", "niah_turns", "vt"])] == ["vt", "niah_turns"]
    assert [task.name for task in find_tasks(["ruler"])] == list(GROUPS["ruler"])
    assert [task.name for task in find_tasks(["dense_evidence:3:count"])] == ["dense_evidence:3:count"]
    for wrong in ("dense_evidence:0", "dense_evidence:many", "dense_evidence:3:why", "dense_evidence:"):
        with pytest.raises(ConfigError, match=f"the task is '{wrong}'; give dense_evidence:NEEDLES"):
            find_tasks([wrong])
    with pytest.raises(ConfigError, match="no task 'vtt'"):
        find_tasks(["vtt"])
