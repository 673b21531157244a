"""The users' files: both dialects of each benchmark, and what is said about a bad row."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shadowkv.errors import RequestError
from shadowkv.eval.files import (
    read_infinitebench,
    read_key_values,
    read_longbench,
    read_longbench2,
    read_ruler,
    read_scbench,
    read_table,
)
from shadowkv.eval.sample import Sample, by_context
from shadowkv.eval.scorers import score
from tests.eval.tasks import solved

Row = dict[str, object]


def write(folder: Path, *rows: object, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    return path


RULER: Row = {"index": 0, "input": "<user> text What? </user> ", "outputs": ["12", "34"], "length": 4000}
TABLE: Row = {
    "context": "text\n\n",
    "question": "What?",
    "answer_prefix": "It is",
    "answer": ["12"],
    "task": "niah_single_1",
    "max_new_tokens": 128,
}
LONGBENCH: Row = {
    "input": "Who?",
    "context": "text",
    "answers": ["Ann", "Anna"],
    "length": 4100,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "1",
}
LONGBENCH2: Row = {f"choice_{letter}": f"text {letter}" for letter in "ABCD"} | {
    "_id": "1",
    "domain": "law",
    "difficulty": "easy",
    "length": "short",
    "question": "Which?",
    "answer": "C",
    "context": "text",
}
INFINITE: Row = {"id": 0, "context": "text", "input": "Which?", "answer": "12", "options": []}
TURNS: Row = {
    "id": 0,
    "context": "text",
    "multi_turns": [{"input": "first?", "answer": "a1"}, {"input": "second?", "answer": ["a2"]}],
}


def test_ruler_old_and_new(tmp_path: Path) -> None:
    (old,) = read_ruler(write(tmp_path, RULER), "vt")
    (new,) = read_ruler(write(tmp_path, RULER | {"answer_prefix": "They are:"}), "vt")
    assert (old.user_text, old.answer_prefix) == (RULER["input"], "")
    assert (new.user_text, new.answer_prefix) == (RULER["input"], "They are:")
    for sample in (old, new):
        assert (sample.task, sample.layout, sample.max_new_tokens) == ("vt[official]", "complete", 30)
        assert sample.metric == "string_match_all"
        assert solved(sample)
        assert score(sample, "12") == 0.5


@pytest.mark.parametrize(
    ("text", "user", "prefix"),
    [
        (
            "text\nWhat is it? The special magic number for a is",
            "text\nWhat is it?",
            "The special magic number for a is",
        ),
        ("Answer: x\nQuestion: y? Answer: They are:", "Answer: x\nQuestion: y?", "Answer: They are:"),
        ("nothing of the kind", "nothing of the kind", ""),
    ],
)
def test_an_older_files_answer_prefix_goes_after_the_header(tmp_path: Path, text: str, user: str, prefix: str) -> None:
    (sample,) = read_ruler(write(tmp_path, RULER | {"input": text}), "niah_single_1", templated=False)
    assert (sample.user_text, sample.answer_prefix, sample.layout) == (user, prefix, "chat")


def test_ruler_fixture(material: Callable[[str], Path]) -> None:
    path = material("ruler/ruler4096_mk3.20.jsonl")
    samples = list(read_ruler(path, "niah_multikey_3"))
    assert len(samples) == 20
    assert all(solved(sample) and sample.references[0] in sample.context for sample in samples)
    for sample in read_ruler(path, "niah_multikey_3", templated=False):
        assert sample.context.endswith("?")
        assert sample.answer_prefix.startswith("The special magic uuid for ")
        assert sample.answer_prefix.endswith(" is")


def test_key_value_fixture(material: Callable[[str], Path]) -> None:
    samples = list(read_key_values(material("ruler/litm_kv140.20.jsonl")))
    assert len(samples) == 20
    for sample in samples:
        assert len(json.loads(sample.context.partition("\n\n")[2])) == 140
        assert sample.task == "key_values[litm_kv140.20]"
        assert solved(sample)


def test_table_rows_share_their_context(tmp_path: Path) -> None:
    path = write(tmp_path, TABLE, TABLE | {"question": "And?"}, TABLE | {"context": "other", "task": "qa_1"})
    groups = list(by_context(read_table(path)))
    assert [len(group) for group in groups] == [2, 1]
    assert groups[0][0].user_text == "text\n\nWhat?"
    assert groups[1][0].metric == "string_match_part"
    assert all(solved(sample) for group in groups for sample in group)
    (plural,) = read_table(write(tmp_path, {**TABLE, "answers": ["7"], "task": "mine"}), metric="longbench_f1")
    assert (plural.references, plural.metric) == (("7",), "longbench_f1")


def test_longbench_dialects(tmp_path: Path) -> None:
    (first,) = read_longbench(write(tmp_path, LONGBENCH))
    assert (first.task, first.metric, first.max_new_tokens) == ("longbench_hotpotqa", "longbench_f1", 32)
    assert first.user_text.startswith("text\n\nAnswer the question")
    assert "Who?" in first.question
    assert first.facts["bucket"] == "4-8k"
    other = {"context": "The text: ", "question": "Who?", "answer_prefix": "It is", "answers": ["Ann"]}
    (second,) = read_longbench(write(tmp_path, {**other, "task": "trec_e", "all_classes": ["Ann", "Bo"]}))
    assert (second.user_text, second.answer_prefix) == ("The text: Who?", "It is")
    assert (second.layout, second.classes) == ("plain", ("Ann", "Bo"))
    assert score(second, "\nAnn\nBo") == 1
    assert score(first, "Anna\nBo") == pytest.approx(2 / 3)


def test_longbench_prompts_as_published(tmp_path: Path) -> None:
    prompts = write(tmp_path, {"hotpotqa": "Read {context} and say {input} now."}, name="dataset2prompt.json")
    (sample,) = read_longbench(write(tmp_path, LONGBENCH | {"context": "{input} x"}), prompts=prompts)
    assert (sample.context, sample.question) == ("Read {input} x", " and say Who? now.")
    bad = write(tmp_path, {"hotpotqa": "Read it."}, name="bad.json")
    with pytest.raises(RequestError, match="hotpotqa"):
        list(read_longbench(write(tmp_path, LONGBENCH), prompts=bad))


@pytest.mark.parametrize("name", ["multi_news", "multifieldqa_zh", "passage_retrieval_zh"])
def test_longbench_fixtures(name: str, material: Callable[[str], Path]) -> None:
    samples = list(read_longbench(material(f"longbench/lb_{name}.20.jsonl")))
    assert len(samples) == 20
    assert {sample.task for sample in samples} == {f"longbench_{name}"}
    if name == "multifieldqa_zh":
        pytest.importorskip("jieba", reason="jieba cuts Chinese texts into words; it is not installed")
    for sample in samples[:5]:
        assert score(sample, sample.references[0]) == pytest.approx(1)
        assert score(sample, "") == 0


def test_longbench2(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([LONGBENCH2, LONGBENCH2 | {"answer": "A"}]))
    samples = list(read_longbench2(path))
    assert [score(one, "The correct answer is (C).") for one in samples] == [1, 0]
    assert samples[0].facts["difficulty"] == "easy"
    assert all(f"({letter}) text {letter}" in samples[0].question for letter in "ABCD")
    (guessed, _) = read_longbench2(path, compensated=True)
    assert score(guessed, "no idea") == 0.25
    assert score(guessed, "") == 0


@pytest.mark.parametrize(
    ("task", "changes", "right", "wrong"),
    [
        ("passkey", {}, "12", "13"),
        ("kv_retrieval", {"answer": "ab-c"}, 'It is "ab-c".', "ab-cd"),
        ("longbook_choice_eng", {"answer": ["y"], "options": ["x", "y", "z", "w"]}, "B", "A"),
        ("code_debug", {"answer": "g", "options": ["f", "g", "h", "i"]}, "The answer is: g", "The answer is: f"),
        ("math_find", {"answer": 12}, "12", "11"),
        ("math_calc", {"answer": [1, 2]}, "1, 2", "2, 1"),
        ("longdialogue_qa_eng", {"answer": ["ANN"]}, "Ann", "Bo"),
        ("longbook_qa_chn", {"answer": ["厦门"]}, "厦门。", "北京"),
        ("longbook_sum_eng", {"answer": ["long text"], "input": ""}, "long text", "other"),
    ],
)
def test_infinitebench(task: str, changes: Row, right: str, wrong: str, tmp_path: Path) -> None:
    (sample,) = read_infinitebench(write(tmp_path, INFINITE | changes, name=f"{task}.jsonl"))
    assert sample.task == f"infinitebench_{task}"
    assert score(sample, right) == 1
    assert score(sample, wrong) == score(sample, "") == 0


def test_scbench_turns(tmp_path: Path) -> None:
    path = write(tmp_path, TURNS, TURNS, name="scbench_kv.jsonl")
    groups = list(by_context(read_scbench(path)))
    assert [one.turn for group in groups for one in group] == [0, 1, 0, 1]
    assert {one.max_new_tokens for group in groups for one in group} == {150}
    assert [one.turn for one in read_scbench(path, dialogue=False)] == [None] * 4
    mixed = {
        "context": "text",
        "multi_turns": [
            {"task": "scbench_summary", "input": "Summary?", "answer": "long"},
            {"task": "scbench_passkey", "input": "Key?", "answer": "123"},
        ],
    }
    summary, passkey = read_scbench(write(tmp_path, mixed), "summary_with_needles")
    assert (summary.task, summary.max_new_tokens) == ("scbench_summary_with_needles/summary", 800)
    assert (passkey.metric, passkey.max_new_tokens) == ("infinitebench_first_integer", 15)
    choice: Row = {"input": "q", "answer": "y", "options": ["x", "y"]}
    (one,) = read_scbench(write(tmp_path, {"input": "text", "multi_turns": [choice]}), "choice_eng")
    assert score(one, " B") == 1
    with pytest.raises(RequestError, match="repoqa"):
        list(read_scbench(path, "repoqa"))


def as_ruler(path: Path) -> Iterator[Sample]:
    return read_ruler(path, "vt")


def as_infinite(path: Path) -> Iterator[Sample]:
    return read_infinitebench(path, "longbook_choice_eng")


def as_turns(path: Path) -> Iterator[Sample]:
    return read_scbench(path, "kv")


BAD: list[tuple[Callable[[Path], Iterator[Sample]], Row, Row, str]] = [
    (as_ruler, RULER, {"input": 3}, "input"),
    (as_ruler, RULER, {"input": " "}, "input"),
    (as_ruler, RULER, {"outputs": []}, "outputs"),
    (as_ruler, RULER, {"outputs": [""]}, "outputs"),
    (as_ruler, RULER, {"outputs": [["12"]]}, "outputs"),
    (as_ruler, RULER, {"length": "long"}, "length"),
    (as_ruler, RULER, {"answer_prefix": 1}, "answer_prefix"),
    (read_table, TABLE, {"answer": None}, "answer"),
    (read_table, TABLE, {"context": None}, "context"),
    (read_table, TABLE, {"max_new_tokens": 0}, "max_new_tokens"),
    (read_table, TABLE, {"max_new_tokens": True}, "max_new_tokens"),
    (read_table, TABLE, {"question": 4}, "question"),
    (read_key_values, {"ordered_kv_records": [["a", "b"]], "key": "a", "value": "b"}, {"key": "c"}, "key"),
    (read_key_values, {"key": "a", "value": "b"}, {"ordered_kv_records": [["a"]]}, "ordered_kv_records"),
    (read_longbench, LONGBENCH, {"answers": []}, "answers"),
    (read_longbench, LONGBENCH, {"dataset": 3}, "dataset"),
    (read_longbench, LONGBENCH, {"input": None}, "input"),
    (read_longbench, LONGBENCH, {"all_classes": {"a": 1}}, "all_classes"),
    (read_longbench2, LONGBENCH2, {"answer": "E"}, "answer"),
    (read_longbench2, LONGBENCH2, {"choice_B": None}, "choice_B"),
    (as_infinite, INFINITE, {"answer": ["q"], "options": ["x", "y"]}, "answer"),
    (as_turns, TURNS, {"multi_turns": []}, "multi_turns"),
    (as_turns, TURNS, {"multi_turns": [3]}, "multi_turns"),
    (as_turns, TURNS, {"multi_turns": [{"input": "q", "answer": ""}]}, "answer"),
]


@pytest.mark.parametrize(("read", "good", "changes", "field"), BAD)
def test_a_bad_row_is_named(
    read: Callable[[Path], Iterator[Sample]], good: Row, changes: Row, field: str, tmp_path: Path
) -> None:
    rows = [good | changes] if read in (read_key_values, as_infinite) else [good, good | changes]
    with pytest.raises(RequestError) as raised:
        list(read(write(tmp_path, *rows)))
    assert f"rows.jsonl, line {len(rows)}" in str(raised.value)
    assert f"field {field!r}" in str(raised.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"input": "x"', "line 1: not valid JSON"),
        ("\n3\n", "line 2: it is of type int"),
        ('[3, {"a": 1}]', "record 0: it is of type int"),
        ("[1", "not valid JSON"),
        ("\n \n", "no rows"),
    ],
)
def test_bad_files_are_named(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(RequestError, match=said):
        list(read_ruler(path, "vt"))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        list(read_ruler(tmp_path / "absent.jsonl", "vt"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="UTF-8"):
        list(read_table(tmp_path / "binary"))


def test_unknown_tasks_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, LONGBENCH | {"dataset": "what"})
    for read in (read_longbench, read_infinitebench, read_scbench, lambda path: read_ruler(path, "what")):
        with pytest.raises(RequestError, match=r"no (task|dataset)"):
            list(read(path))


def test_line_breaks_of_unicode_do_not_end_a_row(tmp_path: Path) -> None:
    (sample,) = read_ruler(write(tmp_path, RULER | {"input": "one\u2028two\x85three"}), "vt")
    assert sample.context == "one\u2028two\x85three"
