"""RULER with material made here: a cheap way of counting, and question files of both layouts."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from shadowkv.errors import RequestError
from shadowkv.eval.haystack import Haystack
from shadowkv.eval.ruler.recipe import Materials
from shadowkv.eval.sample import Frame, Length, Sample
from shadowkv.eval.scorers import score

FRAME = Frame("<user> ", " </user> <assistant> ", between=" </assistant> <user> ")


def words_length(limit: int) -> Length:
    """Tokens are words, in a chat template of three."""
    return Length(limit, lambda text: len(text.split()), FRAME)


def squad_file(folder: Path, articles: int = 12, paragraphs: int = 5) -> Path:
    """Articles whose every paragraph has one question, and one without an answer."""
    made = [
        {
            "paragraphs": [
                {
                    "context": f"In house {a}-{p} lives somebody whose name is Resident{a}x{p}, since a long time.",
                    "qas": [
                        {"question": f"Who lives in {a}-{p}?", "answers": [{"text": f"Resident{a}x{p}"}] * 2},
                        {"question": "Who knows?", "answers": [], "is_impossible": True},
                    ],
                }
                for p in range(paragraphs)
            ]
        }
        for a in range(articles)
    ]
    path = folder / "squad.json"
    path.write_text(json.dumps({"data": made}))
    return path


def hotpot_file(folder: Path, records: int = 30) -> Path:
    """Records of ten paragraphs; the file is cut off within one more."""
    made = [
        {
            "question": f"What is the colour of {r}?",
            "answer": f"colour{r}",
            "context": [[f"Title {r} {p}", [f"It is p{p}.", f" Its colour is colour{r}."]] for p in range(10)],
        }
        for r in range(records)
    ]
    path = folder / "hotpot.json"
    path.write_text(json.dumps(made)[:-1] + ', {"question": "What')
    return path


def materials(folder: Path, seed: int = 42) -> Materials:
    """Everything that any of the thirteen tasks needs."""
    return Materials(Haystack.generated(), squad_file(folder), hotpot_file(folder), seed=seed)


def oracle(sample: Sample) -> str:
    """An answer that knows the references."""
    if sample.metric == "json_facts":
        return f"[{', '.join(sample.references)}]"
    return f"Well: {', '.join(sample.references)}."


def made_or_refused(make: Callable[[], Iterable[Sample]]) -> tuple[list[Sample], str]:
    """The samples, or why there are none."""
    try:
        return list(make()), ""
    except RequestError as error:
        return [], str(error)


def solved(sample: Sample) -> bool:
    """The oracle has full score, and nothing has none."""
    blank = [score(sample, text, reference_rules=rules) for text in ("", " \n\t") for rules in (False, True)]
    return score(sample, oracle(sample)) == 1 and blank == [0, 0, 0, 0]
