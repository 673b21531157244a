"""RULER's two question tasks: a SQuAD or HotpotQA question whose paragraphs stand among many others.

Structure and parameters are RULER's; the sentences are our own, the documents the user's.
Source: NVIDIA/RULER scripts/data/synthetic/qa.py.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shadowkv.errors import ConfigError, RequestError
from shadowkv.eval.haystack import depths_of
from shadowkv.eval.ruler.recipe import Materials, Recipe
from shadowkv.eval.sample import Length, Sample

ANSWER_TOKENS = 32
STEP_DOCUMENTS = 10

INSTRUCTION = "Answer the question from the documents. Give the answer alone, without any other words."
INTRODUCTION = f"{INSTRUCTION}\n\nThe documents follow.\n\n"


@dataclass(frozen=True)
class Question:
    """A question with the numbers of its own documents, and of others that are near to it."""

    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Documents:
    """Every document of a file, and its questions."""

    texts: list[str]
    questions: list[Question]


@dataclass(eq=False)
class _Shelf:
    """Documents without repetition."""

    numbers: dict[str, int] = field(default_factory=dict)

    def put(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


@dataclass(frozen=True)
class QuestionTask:
    """One of the two. Size: number of documents."""

    name: str
    source: Literal["squad", "hotpot"]

    def recipe(self, materials: Materials, length: Length) -> Recipe:
        """How samples are made.

        Raises:
            ConfigError: no file was given.
            RequestError: the file cannot be read.
        """
        path = materials.squad if self.source == "squad" else materials.hotpot
        if path is None:
            raise ConfigError(f"{self.name} asks about a user's documents; give a {self.source} file")
        documents = read_squad(path) if self.source == "squad" else read_hotpot(path)
        name = f"{self.name}[{path.stem}]"
        return Recipe(lambda size, index: self._sample(materials.seed, documents, name, size, index), STEP_DOCUMENTS)

    def _sample(self, seed: int, documents: Documents, name: str, size: int, index: int) -> Sample:
        if index >= len(documents.questions):
            raise RequestError(
                f"{name}: sample {index} was asked for and the file has {len(documents.questions)} questions; "
                "take fewer samples or a larger file"
            )
        question = documents.questions[index]
        chosen = _choose(random.Random(f"{seed}/{self.name}/{index}"), documents, question, size)
        # Afresh from the seed: the question's own documents stand at the same place in every sample of one
        # size. So it is in RULER.
        random.Random(seed).shuffle(chosen)
        texts = [documents.texts[number] for number in chosen]
        joined = "\n\n".join(f"Document {place}:\n{text}" for place, text in enumerate(texts, start=1))
        own = [documents.texts[number] for number in question.own]
        return Sample(
            task=name,
            index=index,
            context=INTRODUCTION + joined,
            question=f"{INSTRUCTION}\n\nQuestion: {question.text}",
            answer_prefix="Answer:",
            references=question.answers,
            max_new_tokens=ANSWER_TOKENS,
            metric="string_match_part",
            depths=depths_of(joined, own),
        )


def _choose(rng: random.Random, documents: Documents, question: Question, size: int) -> list[int]:
    """The question's documents and as many others: near ones first, all of them again where they run out."""
    everything = range(len(documents.texts))
    more = size - len(question.own)
    if size >= len(everything):
        return [number % len(everything) for number in range(size)]
    if more <= len(question.near):
        return [*question.own, *rng.sample(question.near, max(more, 0))]
    taken = {*question.own, *question.near}
    others = [number for number in everything if number not in taken]
    return [*question.own, *question.near, *rng.sample(others, more - len(question.near))]


def read_squad(path: Path) -> Documents:
    """Paragraphs and questions of a file in SQuAD's layout, version 1.1 or 2.0.

    Questions without an answer are left out.

    Raises:
        RequestError: the file is not in that layout.
    """
    shelf = _Shelf()
    questions: list[Question] = []
    try:
        for article in json.loads(_read(path))["data"]:
            numbers = [shelf.put(str(paragraph["context"])) for paragraph in article["paragraphs"]]
            for number, paragraph in zip(numbers, article["paragraphs"], strict=True):
                near = tuple(dict.fromkeys(other for other in numbers if other != number))
                for asked in paragraph["qas"]:
                    answers = tuple(dict.fromkeys(str(one["text"]) for one in asked["answers"] if one["text"]))
                    if answers and not asked.get("is_impossible"):
                        questions.append(Question(str(asked["question"]), answers, (number,), near))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{path} is not in SQuAD's layout: {type(error).__name__}: {error}") from error
    return _checked(path, shelf, questions)


def read_hotpot(path: Path) -> Documents:
    """Paragraphs and questions of a file in HotpotQA's layout; one that is cut off gives its whole records.

    Raises:
        RequestError: the file is not in that layout.
    """
    shelf = _Shelf()
    questions: list[Question] = []
    for place, record in enumerate(_records(_read(path))):
        try:
            own = tuple(shelf.put(f"{title}\n{''.join(lines)}") for title, lines in record["context"])
            questions.append(Question(str(record["question"]), (str(record["answer"]),), tuple(dict.fromkeys(own))))
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(f"{path}, record {place}: not in HotpotQA's layout: {error!r}") from error
    return _checked(path, shelf, questions)


def _records(text: str) -> Iterator[Any]:
    """The elements of a JSON list, until it ends or breaks off."""
    decoder = json.JSONDecoder()
    place = text.find("[") + 1
    while place:
        while place < len(text) and text[place] in " \t\r\n,":
            place += 1
        try:
            record, place = decoder.raw_decode(text, place)
        except ValueError:
            return
        yield record


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error


def _checked(path: Path, shelf: _Shelf, questions: list[Question]) -> Documents:
    if not questions:
        raise RequestError(f"{path} holds no question with an answer")
    return Documents(list(shelf.numbers), questions)
