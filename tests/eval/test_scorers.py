"""Scores against known values, and one rule for all: an empty answer never scores."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowkv.errors import ConfigError
from shadowkv.eval.sample import Sample
from shadowkv.eval.scorers import METRICS, score, score_text
from shadowkv.eval.scorers.interval import percent
from shadowkv.eval.scorers.rouge import rouge_l, rouge_l_sum

INFINITEBENCH = {
    "passkey": ("first_integer", 100.0),
    "number_string": ("first_integer", 100.0),
    "kv_retrieval": ("word", 89.0),
    "longdialogue_qa_eng": ("word_upper", 8.5),
    "longbook_choice_eng": ("choice", 67.25),
    "longbook_qa_eng": ("f1", 22.44),
    "longbook_qa_chn": ("f1_zh", 25.96),
    "math_find": ("first_number", 60.0),
    "code_run": ("last_integer", 23.25),
    "code_debug": ("code_debug", 37.06),
}


@pytest.mark.parametrize("task", INFINITEBENCH)
def test_infinitebench_published_scores(task: str, material: Callable[[str], Path]) -> None:
    metric, published = INFINITEBENCH[task]
    scores = []
    for line in material(f"infinitebench/gpt4_{task}.jsonl").read_text(encoding="utf-8").split("\n"):
        if line.strip():
            row = json.loads(line)
            truth = row["ground_truth"] if isinstance(row["ground_truth"], list) else [row["ground_truth"]]
            scores.append(score_text(f"infinitebench_{metric}", row["prediction"], [str(one) for one in truth]))
    assert percent(scores) == published


REFERENCES = {"json_facts": ['{"id": "a", "x": "1"}'], "infinitebench_code_debug": ["name", "A"]}
CHINESE = ("longbench_f1_zh", "longbench_rouge_zh")


@pytest.mark.parametrize("prediction", ["", " ", "\n", "\t \r\n", "\u3000"])
@pytest.mark.parametrize("metric", METRICS)
def test_an_empty_answer_never_scores(metric: str, prediction: str) -> None:
    assert score_text(metric, prediction, REFERENCES.get(metric, ["1"]), ["id", "1"]) == 0


@given(metric=st.sampled_from([one for one in METRICS if one not in CHINESE]), prediction=st.text(max_size=40))
def test_every_answer_has_a_score(metric: str, prediction: str) -> None:
    assert 0 <= score_text(metric, prediction, REFERENCES.get(metric, ["12"]), ["id", "12"]) <= 1


@pytest.mark.parametrize("references", [[], [""]])
def test_without_reference_there_is_no_score(references: list[str]) -> None:
    with pytest.raises(ConfigError, match="no reference"):
        score_text("string_match_all", "anything", references)


def test_unknown_metrics_are_refused() -> None:
    with pytest.raises(ConfigError, match="string_match_all"):
        score_text("string_match", "a", ["a"])


KNOWN = [
    ("string_match_all", "It is 12 and ABC.", ["12", "abc", "x"], 2 / 3),
    ("string_match_all", "12\x0034", ["1234"], 0),
    ("string_match_part", "maybe PARIS", ["London", "Paris"], 1),
    ("string_match_part", "maybe", ["London", "maybe not"], 0),
    ("reference_part", "maybe", ["London", "maybe not"], 1),
    ("reference_needle", "1234567 it is", ["1234567"], 1),
    ("reference_needle", "It is 1234567.", ["1234567"], 1),
    ("reference_needle", "It is 12345678.", ["1234567"], 0),
    ("reference_needle", "The 1e9b-23 one", ["1e9b-23"], 1),
    ("reference_numbers", "1, 22 and 333", ["1", "33"], 0.5),
    ("reference_words", "abc, DEFG", ["ABC", "DEF"], 0.5),
    ("longbench_f1", "the big red fox", ["A red fox"], 0.8),
    ("longbench_f1", "nothing", ["A red fox", "nothing"], 1),
    ("longbench_retrieval", "Paragraph 3, or 4", ["Paragraph 3"], 0.5),
    ("longbench_retrieval", "段落27", ["段落27"], 1),
    ("longbench_count", "12", ["12"], 1),
    ("longbench_count", "12 12 7", ["12"], 2 / 3),
    ("longbench_code", "# no\nreturn x + 1\nmore", ["return x + 1"], 1),
    ("longbench_code", "```", ["return"], 0),
    ("longbench2_choice", "*The correct answer is (B)*", ["B"], 1),
    ("longbench2_choice", "The correct answer is B", ["B"], 1),
    ("longbench2_choice", "B", ["B"], 0),
    ("longbench2_choice_compensated", "B", ["B"], 0.25),
    ("longbench2_choice_compensated", "The correct answer is A", ["B"], 0),
    ("infinitebench_leading_numbers", "1, 2, 4", ["1", "2", "3", "4"], 0.5),
    ("infinitebench_first_number", "it is 12.5", ["12"], 1),
    ("infinitebench_first_number", "it is 12.5", ["12.5"], 1),
    ("infinitebench_choice", "The answer is: B", ["text", "B"], 1),
    ("infinitebench_choice", "I think C", ["text", "B"], 0),
    ("infinitebench_choice", "text", ["text", "B"], 0),
    ("scbench_choice", " text", ["text", "B"], 1),
    ("scbench_choice", " B", ["text", "B"], 1),
    ("scbench_contained", "x-abc-y", ["abc"], 1),
    ("scbench_any_contained", "it was gaggi", ["Remo", "GAGGI"], 1),
    ("infinitebench_word_upper", "it was remo", ["GAGGI", "REMO"], 0),
    ("exact_number", "It is 1,234.", ["1234"], 1),
    ("exact_number", "12345", ["1234"], 0),
]


@pytest.mark.parametrize(("metric", "prediction", "references", "expected"), KNOWN)
def test_known_scores(metric: str, prediction: str, references: list[str], expected: float) -> None:
    assert score_text(metric, prediction, references) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [("Sports", 1), ("Sports and News", 0.5), ("News", 0), ("nothing", 0), ("Sports results", 1)],
)
def test_classification_shares_among_the_named(prediction: str, expected: float) -> None:
    assert score_text("longbench_classification", prediction, ["Sports"], ["Sports", "News"]) == expected


def test_a_class_within_the_right_one_is_not_counted() -> None:
    assert (
        score_text("longbench_classification", "Sports results", ["Sports results"], ["Sports", "Sports results"]) == 1
    )
    assert score_text("longbench_classification", "abc", ["abc"], ["a", "ab", "abc"]) == 0.5  # as upstream does it


def test_the_first_class_named_is_the_answer() -> None:
    assert score_text("first_class", "the Fox, not the owl", ["fox"], ["owl", "fox"]) == 1
    assert score_text("first_class", "the owl, not the fox", ["fox"], ["owl", "fox"]) == 0


FACTS = [json.dumps({"id": f"p{i}", "city": f"c{i}", "kg": str(i)}) for i in range(4)]


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        (f"[{', '.join(FACTS)}]", 1),
        (", ".join(FACTS) + ', {"id": "p9", "ci', 1),
        (f"```json\n[{FACTS[0]}, {FACTS[1]}", 2 / 3),
        ('{"id": "P0", "city": " C0", "kg": 0}', 0.4),
        (", ".join(FACTS) + ', {"id": "p5", "city": "c", "kg": "5"}' * 4, 16 / 18),
        ('{"city": "c0"}', 0),
        ("p0 c0 0", 0),
        ("{" * 5000, 0),
    ],
)
def test_facts_in_json(prediction: str, expected: float) -> None:
    assert score_text("json_facts", prediction, FACTS, ["id"]) == pytest.approx(expected)


def test_rouge_by_hand() -> None:
    assert rouge_l("a b c d", "a c e") == pytest.approx(2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3), abs=1e-6)
    assert rouge_l("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5") == pytest.approx(
        2 * (4 / 8) * (4 / 5) / (4 / 8 + 4 / 5), abs=1e-6
    )  # Lin's example of the union
    assert rouge_l_sum("w1 w2 w6 w7 w8\nw1 w3 w8 w9 w5", "W1 w2, w3 w4 w5!") == pytest.approx(
        2 * (4 / 10) * (4 / 5) / (4 / 10 + 4 / 5)
    )
    assert rouge_l("...", "a") == rouge_l_sum("...", "a") == 0


def longest(left: list[str], right: list[str]) -> int:
    if not left or not right:
        return 0
    if left[-1] == right[-1]:
        return longest(left[:-1], right[:-1]) + 1
    return max(longest(left[:-1], right), longest(left, right[:-1]))


def test_rouge_of_one_sentence_is_the_longest_subsequence() -> None:
    rng = random.Random(0)
    for _ in range(40):
        left, right = (rng.sample("abcdefgh", rng.randrange(1, 8)) for _ in range(2))
        same = longest(left, right)
        expected = 2 * same / (len(left) + len(right))
        assert rouge_l_sum(" ".join(left), " ".join(right)) == pytest.approx(expected)
        assert rouge_l(" ".join(left), " ".join(right)) == pytest.approx(expected, abs=1e-6)


def test_chinese_scores_need_a_package_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jieba", None)
    with pytest.raises(ConfigError, match=r"\[eval\]"):
        score_text("longbench_f1_zh", "厦门大学", ["厦门大学。"])


def test_chinese_scores() -> None:
    pytest.importorskip("jieba", reason="jieba cuts Chinese texts into words; it is not installed")
    assert score_text("longbench_f1_zh", "厦门大学", ["厦门大学。"]) == 1
    assert score_text("longbench_rouge_zh", "厦门大学", ["厦门大学"]) == pytest.approx(1)


def sample(task: str, references: tuple[str, ...], metric: str = "string_match_all") -> Sample:
    return Sample(task, 0, "c", "q", "", references, 8, metric)


@pytest.mark.parametrize(
    ("one", "prediction", "ours", "reference"),
    [
        (sample("niah_single_3[book]", ("1e9b",)), "It is 1e9b5", 1, 0),
        (sample("niah_multivalue", ("12", "34")), "123 and 34", 1, 0.5),
        (sample("vt", ("ABC", "DEF")), "ABCD DEF", 1, 0.5),
        (sample("qa_1[squad]", ("Paris or so",), "string_match_part"), "Paris", 0, 1),
        (sample("longbench_hotpotqa", ("Paris",), "longbench_f1"), "Paris", 1, 1),
    ],
)
def test_the_reference_codes_rules(one: Sample, prediction: str, ours: float, reference: float) -> None:
    assert score(one, prediction) == ours
    assert score(one, prediction, reference_rules=True) == reference
