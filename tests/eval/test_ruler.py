"""RULER's thirteen tasks: solvable, as long as asked and not longer, the same for the same seed."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shadowkv.conversation import split_prompt
from shadowkv.engine.tokenizer import Tokenizer
from shadowkv.errors import ConfigError, RequestError
from shadowkv.eval.fitting import fill, fitted, largest_size
from shadowkv.eval.haystack import Haystack
from shadowkv.eval.ruler import TASKS, Materials, generate
from shadowkv.eval.sample import Length, Sample
from tests.eval.tasks import made_or_refused, materials, solved, words_length

SYNTHETIC = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return materials(tmp_path_factory.mktemp("ruler"))


@pytest.mark.parametrize("limit", [2048, 4096])
@pytest.mark.parametrize("task", TASKS)
def test_the_oracle_scores_all_and_an_empty_answer_nothing(task: str, limit: int, made: Materials) -> None:
    samples = list(generate(task, words_length(limit), made, 6))
    assert len(samples) == 6
    assert all(solved(sample) for sample in samples)
    evidence = [reference for sample in samples for reference in sample.references if reference not in sample.context]
    assert evidence == []


PARAMETERS = {
    "niah_single_1": (1, 128),
    "niah_single_2": (1, 128),
    "niah_single_3": (1, 128),
    "niah_multikey_1": (1, 128),
    "niah_multikey_2": (1, 128),
    "niah_multikey_3": (1, 128),
    "niah_multivalue": (4, 128),
    "niah_multiquery": (4, 128),
    "vt": (5, 30),
    "cwe": (10, 120),
    "fwe": (3, 50),
    "qa_1": (1, 32),
    "qa_2": (1, 32),
}


@pytest.mark.parametrize("task", TASKS)
def test_published_parameters(task: str, made: Materials) -> None:
    sample = next(generate(task, words_length(4096), made, 1))
    assert (len(sample.references), sample.max_new_tokens) == PARAMETERS[task]
    assert sample.metric == ("string_match_part" if task.startswith("qa") else "string_match_all")


def recount(task: str, length: Length, made: Materials) -> tuple[Sample, bool]:
    """The first sample, and whether one unit more would be too long as well."""
    recipe = TASKS[task].recipe(made, length)
    size = largest_size(recipe.build, length, recipe.step, recipe.most)
    return recipe.build(size, 0), not length.fits(recipe.build(size + 1, 0))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(task=st.sampled_from(list(TASKS)), limit=st.integers(512, 8192), seed=st.integers(0, 5))
def test_lengths_are_kept_and_used(task: str, limit: int, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    made = materials(tmp_path_factory.getbasetemp(), seed)
    length = words_length(limit)
    samples, refused = made_or_refused(lambda: generate(task, length, made, 3))
    if refused:
        assert "give a larger length" in refused
        # The smallest: 500 words of text, an example of 500 tokens, or lists with an example.
        assert limit < 4096 or (task == "cwe" and limit < 4700)
        return
    assert all(length.fits(sample) for sample in samples)
    first, next_is_too_long = recount(task, length, made)
    assert samples[0] == first
    assert next_is_too_long


@pytest.mark.smollm2
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("task", ["niah_single_2", "niah_multikey_3", "vt", "cwe", "fwe"])
def test_lengths_in_a_models_tokens(task: str, chat: bool, made: Materials, smollm2: Tokenizer) -> None:
    length = Length.of(smollm2, 2048, chat=chat)
    samples = list(generate(task, length, made, 3))
    first, next_is_too_long = recount(task, length, made)
    assert samples[0] == first
    assert next_is_too_long
    for sample in samples:
        frame = length.frame(sample)
        whole = frame.head + sample.user_text + frame.tail + sample.answer_prefix
        head = frame.head + sample.context + sample.separator
        counted = len(smollm2.encode(whole, special=not chat))
        parted = len(smollm2.encode(head, special=not chat)) + len(
            smollm2.encode(whole.removeprefix(head), special=False)
        )
        assert length.prompt_tokens(sample) == max(counted, parted)
        if chat:
            split = split_prompt(smollm2, sample.context, chat=True)
            question = split.question_ids(smollm2, sample.question, sample.answer_prefix)
            assert parted == len(split.head_ids) + len(question)


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_gives_the_same_samples(task: str, tmp_path: Path) -> None:
    length = words_length(4096)
    first, again, other = (list(generate(task, length, materials(tmp_path, seed), 3)) for seed in (1, 1, 2))
    assert first == again
    assert [sample.context for sample in first] != [sample.context for sample in other]
    assert first[:2] == list(generate(task, length, materials(tmp_path, 1), 2))
    assert len({sample.user_text for sample in first}) == 3


@pytest.mark.parametrize("task", TASKS)
def test_impossible_lengths_are_refused(task: str, made: Materials) -> None:
    with pytest.raises(RequestError, match="give a larger length"):
        list(generate(task, words_length(100), made, 1))


def test_a_later_sample_that_never_fits_ends() -> None:
    def build(size: int, index: int) -> Sample:
        return Sample("t", index, "word " * (size if index == 0 else 10_000), "q", "", ("a",), 1, "string_match_all")

    length = words_length(1000)
    with pytest.raises(RequestError, match="sample 1: 10005 tokens at the smallest size"):
        list(fill(build, length, 10, 2))
    assert length.fits(fitted(build, length, 5000, 7, 0))


def test_a_unit_without_tokens_ends() -> None:
    def build(size: int, index: int) -> Sample:
        return Sample("t", index, " " * size, "q", "", ("a",), 1, "string_match_all")

    assert largest_size(build, words_length(100), 5) > 100


@pytest.mark.parametrize("task", [task for task in TASKS if task not in SYNTHETIC])
def test_missing_material_is_named(task: str) -> None:
    with pytest.raises(ConfigError, match=task):
        list(generate(task, words_length(4096), Materials(), 1))


def test_names_say_what_the_text_is(made: Materials, tmp_path: Path) -> None:
    names = [next(generate(task, words_length(4096), made, 1)).task for task in TASKS]
    assert names[:2] == ["niah_single_1", "niah_single_2[generated]"]
    assert names[-2:] == ["qa_1[squad]", "qa_2[hotpot]"]
    given = Materials(vocabulary=[f"w{i}" for i in range(3000)], vocabulary_name="mine")
    assert next(generate("cwe", words_length(8192), given, 1)).task == "cwe[mine]"
    book = tmp_path / "book.txt"
    book.write_text("One sentence. Another one! " * 40)
    sample = next(generate("niah_single_3", words_length(4096), Materials(Haystack.of_file(book)), 1))
    assert sample.task == "niah_single_3[book]"


def test_unknown_tasks_are_refused(made: Materials) -> None:
    with pytest.raises(ConfigError, match="niah_single_1"):
        list(generate("niah", words_length(4096), made))


def test_needles_stand_at_the_reported_depths(made: Materials) -> None:
    for sample in generate("niah_multivalue", words_length(4096), made, 4):
        text = sample.context.partition("\n")[2]
        places = [text.index(f"is: {value}.") / len(text) for value in sample.references]
        assert places == pytest.approx(sample.depths, abs=0.01)
        assert len(set(sample.depths)) == 4


def test_one_key_of_several_is_asked(made: Materials) -> None:
    sample = next(generate("niah_multikey_1", words_length(4096), made, 1))
    keys = re.findall(r"magic numbers for (\S+) is", sample.context)
    assert len(set(keys)) == 4
    assert sum(key in sample.question for key in keys) == 1
    many = next(generate("niah_multiquery", words_length(4096), made, 1))
    asked = re.findall(r"magic numbers for (\S+) is: (\d+)", many.context)
    assert {value for key, value in asked if key in many.question} == set(many.references)


def test_the_chain_is_there_and_in_order(made: Materials) -> None:
    for sample in generate("vt", words_length(4096), made, 3):
        first, *rest = sample.references
        value = re.search(r"value (\d+)", sample.question)[1]  # type: ignore[index]
        assert f"VAR {first} = {value}\n" in sample.context
        for source, name in zip(sample.references, rest, strict=False):
            assert f"VAR {name} = VAR {source} \n" in sample.context
        assert list(sample.depths) == sorted(sample.depths)


@pytest.mark.parametrize(("limit", "common", "rare"), [(4096, 30, 3), (2048, 6, 1)])
def test_common_words_are_common(limit: int, common: int, rare: int, made: Materials) -> None:
    sample = next(generate("cwe", words_length(limit), made, 1))
    counts = Counter(re.findall(r"\d+\. (\S+)", sample.context.rpartition("\n")[2]))
    assert {counts.pop(word) for word in sample.references} == {common}
    assert set(counts.values()) == {rare}


def test_frequent_words_are_frequent(made: Materials) -> None:
    for sample in generate("fwe", words_length(4096), made, 3):
        ranked = Counter(sample.context.partition("\n")[2].split()).most_common(5)
        assert ranked[0][0] == "..."
        assert tuple(word for word, _ in ranked[1:4]) == sample.references
        assert ranked[3][1] > ranked[4][1]


def test_question_documents_stand_at_one_place_of_a_size(made: Materials) -> None:
    recipe = TASKS["qa_1"].recipe(made, words_length(4096))
    samples = [recipe.build(20, index) for index in range(6)]
    places = {re.search(rf"Document (\d+):\n[^\n]*{one.references[0]}", one.context)[1] for one in samples}  # type: ignore[index]
    assert len(places) == 1
    assert samples[0].context.count("Document ") == 20
    assert recipe.build(100, 0).context.count("Document ") == 100  # more than there are: they repeat


def test_too_few_questions_are_refused(made: Materials) -> None:
    with pytest.raises(RequestError, match="30 questions"):
        list(generate("qa_2", words_length(4096), made, 31))


@pytest.mark.parametrize("content", ["{}", "[]", '[{"question": 1}]', "nothing", '{"data": [{"paragraphs": 3}]}'])
@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_bad_question_files_are_refused(task: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(RequestError, match=r"bad\.json"):
        list(generate(task, words_length(4096), Materials(squad=path, hotpot=path), 1))


@pytest.mark.parametrize(("task", "questions"), [("qa_1", 1190), ("qa_2", 53)])
def test_public_question_files(task: str, questions: int, material: Callable[[str], Path]) -> None:
    given = Materials(squad=material("qa/xquad.en.json"), hotpot=material("qa/hotpot_slice.json"))
    samples = list(generate(task, words_length(4096), given, questions))
    assert all(solved(sample) and words_length(4096).fits(sample) for sample in samples)
    with pytest.raises(RequestError, match=f"{questions} questions"):
        list(generate(task, words_length(4096), given, questions + 1))
