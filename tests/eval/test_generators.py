"""Needle grid and turns, key-values, dense evidence, extraction: solvable, placed as asked, within the length."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv.engine.tokenizer import Tokenizer
from shadowkv.errors import ConfigError, RequestError
from shadowkv.eval.dense_evidence import dense_evidence
from shadowkv.eval.extraction import FIELDS, KEY, extraction
from shadowkv.eval.haystack import Haystack, depths_of, plant, sentences
from shadowkv.eval.key_values import key_values
from shadowkv.eval.needle_grid import DEPTHS, at_depths, needle_grid, needle_turns
from shadowkv.eval.sample import Frame, Length, Sample, by_context, cut_middle
from shadowkv.eval.scorers import score_text
from tests.eval.tasks import made_or_refused, solved, words_length

HAY = Haystack.generated()
Maker = Callable[[Length, int], Iterator[Sample]]

MAKERS: dict[str, Maker] = {
    "grid": lambda length, seed: needle_grid(length, HAY, depths=(0, 0.5, 1), samples=2, seed=seed),
    "turns": lambda length, seed: needle_turns(length, HAY, turns=4, samples=2, seed=seed),
    "key_values": lambda length, seed: key_values(length, samples=2, questions=3, seed=seed),
    "dense_values": lambda length, seed: dense_evidence(length, HAY, 8, samples=2, seed=seed),
    "dense_majority": lambda length, seed: dense_evidence(length, HAY, 20, ask="majority", samples=2, seed=seed),
    "dense_count": lambda length, seed: dense_evidence(length, HAY, 20, ask="count", samples=2, seed=seed),
    "extraction": lambda length, seed: extraction(length, HAY, 6, samples=2, seed=seed),
    "extraction_some": lambda length, seed: extraction(length, HAY, 12, asked=3, samples=2, seed=seed),
}


@pytest.mark.parametrize("name", MAKERS)
def test_solvable_within_the_length_and_repeatable(name: str) -> None:
    length = words_length(2048)
    samples = list(MAKERS[name](length, 1))
    assert samples
    assert all(solved(sample) and length.fits(sample) for sample in samples)
    assert samples == list(MAKERS[name](length, 1))
    assert [one.context for one in samples] != [one.context for one in MAKERS[name](length, 2)]


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(list(MAKERS)), limit=st.integers(512, 8192))
def test_lengths_are_kept_and_used(name: str, limit: int) -> None:
    length = words_length(limit)
    samples, refused = made_or_refused(lambda: MAKERS[name](length, 0))
    if refused:
        assert "give a larger length" in refused
        assert limit < 700
    assert all(length.fits(sample) for sample in samples)
    if name != "turns":  # their length holds all turns
        assert all(length.total_tokens(sample) > limit - 30 for sample in samples)


@pytest.mark.parametrize("name", MAKERS)
def test_impossible_lengths_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match="give a larger length"):
        list(MAKERS[name](words_length(40), 0))


@pytest.mark.smollm2
@pytest.mark.parametrize("name", MAKERS)
def test_lengths_in_a_models_tokens(name: str, smollm2: Tokenizer) -> None:
    length = Length.of(smollm2, 3000, chat=True)
    assert all(length.fits(sample) and solved(sample) for sample in MAKERS[name](length, 0))


def test_the_grid_has_every_depth() -> None:
    samples = list(needle_grid(words_length(4096), HAY, samples=3))
    assert len(samples) == 30
    assert Counter(sample.facts["depth"] for sample in samples) == dict.fromkeys(DEPTHS, 3)
    for sample in samples:
        wanted = float(sample.facts["depth"])
        assert wanted - 0.02 <= sample.depths[0] <= wanted + 0.001
        assert sample.task == "needle_grid[generated]"


def test_needles_stand_between_sentences() -> None:
    text = at_depths(["One is here.", "Two is here.", "Three is here."], ["N1.", "N2.", "N3."], [0, 0.5, 1])
    assert text == "N1. One is here. N2. Two is here. Three is here. N3."


def test_turns_share_a_context_and_ask_for_each_needle_once() -> None:
    length = words_length(2048)
    groups = list(by_context(needle_turns(length, HAY, turns=5, samples=3)))
    assert [len(group) for group in groups] == [5, 5, 5]
    for group in groups:
        assert [one.turn for one in group] == [0, 1, 2, 3, 4]
        assert len({one.references for one in group}) == 5
        assert sorted(one.depths[0] for one in group) == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9], abs=0.03)
        whole = length.total_tokens(group[0]) + sum(
            len(f"</assistant> <user> {one.question} </user> <assistant> {one.answer_prefix}".split())
            + one.max_new_tokens
            for one in group[1:]
        )
        assert length.limit_tokens - 30 < whole <= length.limit_tokens
        assert whole == length.total_tokens(group[0]) + length.later_tokens(group)
    assert [one.depths for one in groups[0]] != [one.depths for one in groups[1]]


def test_questions_on_one_object() -> None:
    groups = list(by_context(key_values(words_length(2048), samples=2, questions=4, depths=(0, 0.3, 0.6, 1))))
    assert [len(group) for group in groups] == [4, 4]
    content = json.loads(groups[0][0].context.partition("\n\n")[2])
    for sample, depth in zip(groups[0], (0, 0.3, 0.6, 1), strict=True):
        key = re.search('"(.*)"', sample.question)[1]  # type: ignore[index]
        assert content[key] == sample.references[0]
        assert sample.depths[0] == pytest.approx(depth, abs=0.01)


@pytest.mark.parametrize("needles", [1, 10, 100, 1000])
@pytest.mark.parametrize("ask", ["values", "majority", "count"])
def test_evidence_is_spread_evenly(needles: int, ask: str) -> None:
    sample = next(dense_evidence(words_length(40_000), HAY, needles, ask=ask))  # type: ignore[arg-type]
    assert sample.context.count("One of the special magic") == needles
    assert sample.task == f"dense_{ask}_{needles}[generated]"
    assert solved(sample)
    assert list(sample.depths) == pytest.approx([(i + 0.5) / needles for i in range(needles)], abs=0.05)


@pytest.mark.parametrize("needles", [4, 10, 100, 999])
def test_the_majority_is_clear(needles: int) -> None:
    sample = next(dense_evidence(words_length(40_000), HAY, needles, ask="majority"))
    counts = Counter(re.findall(r"is: (\w+)\.", sample.context)).most_common()
    assert sum(count for _, count in counts) == needles
    assert counts[0][0] == sample.references[0]
    assert len(counts) == 1 or counts[0][1] - counts[1][1] >= max(2, needles // 10)


def test_too_many_needles_are_refused() -> None:
    with pytest.raises(RequestError, match="500 needles"):
        list(dense_evidence(words_length(4096), HAY, 500))
    for bad in (
        lambda: dense_evidence(words_length(4096), HAY, 0),
        lambda: extraction(words_length(4096), HAY, 2, asked=3),
    ):
        with pytest.raises(ConfigError):
            list(bad())
    with pytest.raises(ConfigError, match="majority"):
        list(dense_evidence(words_length(4096), HAY, 3, ask="all"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="depth"):
        list(needle_grid(words_length(4096), HAY, depths=(1.5,)))
    with pytest.raises(ConfigError, match="turn"):
        list(needle_turns(words_length(4096), HAY, turns=0))
    with pytest.raises(ConfigError, match="question"):
        list(key_values(words_length(4096), questions=0))
    with pytest.raises(ConfigError, match="depths"):
        list(key_values(words_length(4096), questions=2, depths=(0.5,)))


def test_records_are_told_and_scored_by_fact() -> None:
    sample = next(extraction(words_length(4096), HAY, 12, asked=3))
    records = [json.loads(reference) for reference in sample.references]
    assert all(set(record) == {KEY, *FIELDS} for record in records)
    assert all(record[KEY] in sample.question for record in records)
    assert all(str(value) in sample.context for record in records for value in record.values())
    half = json.dumps([records[0], {**records[1], "city": "Nowhere"}])
    assert 0.5 < score_text(sample.metric, half[1:], sample.references, sample.classes) < 1


def test_haystacks_begin_again_and_keep_their_text(tmp_path: Path) -> None:
    assert Haystack.of_text("a  b\nc", "x").take(7) == ["a", "b", "c", "a", "b", "c", "a"]
    assert Haystack.generated(3).take(50) == Haystack.generated(3).take(500)[:50]
    assert HAY.take(40) != Haystack.generated(3).take(40)
    path = tmp_path / "essays.json"
    path.write_text('{"text": "One. Two."}')
    assert Haystack.of_file(path).name == "essay"
    for name, content in (("a.json", "[]"), ("b.json", '{"text": 1}'), ("c.txt", " \n"), ("d.json", "{")):
        (tmp_path / name).write_text(content)
        with pytest.raises(RequestError, match=name):
            Haystack.of_file(tmp_path / name, name)
    with pytest.raises(RequestError, match="missing"):
        Haystack.of_file(tmp_path / "missing.txt")


def test_a_book_is_a_haystack(material: Callable[[str], Path]) -> None:
    book = Haystack.of_file(material("text/moby_dick.txt"))
    samples = list(needle_grid(words_length(8192), book, depths=(0.2, 0.8)))
    assert [sample.task for sample in samples] == ["needle_grid[book]"] * 2
    assert all(solved(sample) for sample in samples)


def test_sentences_end_at_their_punctuation() -> None:
    assert sentences('He said "no." Then! What?  (Yes.) End') == ['He said "no."', "Then!", "What?", "(Yes.)", "End"]


def test_planting_keeps_order_and_finds_needles() -> None:
    assert plant(["a", "b", "c"], ["x", "y", "z"], [3, 0, 0]) == ["y", "z", "a", "b", "c", "x"]
    assert depths_of("abcd", ["a", "c"]) == (0, 0.5)
    with pytest.raises(RequestError, match="'x'"):
        depths_of("abcd", ["x"])


def test_the_middle_is_cut() -> None:
    length = words_length(60)
    long = Sample("t", 0, " ".join(map(str, range(1000))), "the question", "", ("a",), 10, "string_match_all")
    cut = cut_middle(long, length, str.split, " ".join)  # type: ignore[arg-type]
    assert length.limit_tokens - 3 <= length.total_tokens(cut) <= length.limit_tokens
    assert cut.context.startswith("0 1 2 ")
    assert cut.context.endswith(" 998 999")
    assert cut_middle(cut, length, str.split, " ".join) == cut  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="the question"):
        cut_middle(long, words_length(12), str.split, " ".join)  # type: ignore[arg-type]


@pytest.mark.smollm2
def test_a_prompts_parts_are_its_template(smollm2: Tokenizer) -> None:
    """Turn by turn, the text is what the template makes of the whole conversation."""
    first, second = list(needle_turns(Length.of(smollm2, 1000, chat=True), HAY, turns=2))
    frame = Frame.of_chat(smollm2)
    answers = [f" {one.references[0]}." for one in (first, second)]
    text = "".join(frame.parts(first)) + answers[0] + frame.next_turn(second)
    whole = [
        {"role": "user", "content": first.user_text},
        {"role": "assistant", "content": first.answer_prefix + answers[0]},
        {"role": "user", "content": second.question},
    ]
    assert text == smollm2.render_chat(whole) + second.answer_prefix
    plain = Frame.of_text(smollm2)
    assert plain.parts(first) == (first.context + "\n\n", first.question + first.answer_prefix)


def test_a_template_without_second_turn_is_refused() -> None:
    frame = Frame("", "", between=None)
    with pytest.raises(RequestError, match="second question"):
        list(needle_turns(Length(2000, len, frame), HAY, turns=2))


def test_room_is_left_for_later_turns() -> None:
    length = words_length(100)
    long = Sample("t", 0, "w " * 1000, "q", "", ("a",), 10, "string_match_all")
    cut = cut_middle(long, length, str.split, " ".join, reserve_tokens=30)  # type: ignore[arg-type]
    assert 67 <= length.total_tokens(cut) <= 70
