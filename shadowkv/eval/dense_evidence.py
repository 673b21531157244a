"""Evidence everywhere: an answer needs n sentences spread evenly over the context, n from 1 to thousands.

A sparse budget that suffices for one needle must fail at some n; this finds it. Three questions on the same
kind of text: ``values`` asks for every value of one key, ``majority`` for the word that most of the sentences
name, ``count`` for their number. The answers of the last two stay short however large n is. The needle's
sentence is RULER's, everything else our own.
"""

import math
import random
from collections.abc import Iterator
from typing import Literal, get_args

from shadowkv.errors import ConfigError, RequestError
from shadowkv.eval.fitting import fill
from shadowkv.eval.haystack import Haystack, depths_of, plant
from shadowkv.eval.ruler.needles import Wording, needle
from shadowkv.eval.ruler.words import NOUNS, distinct, number, word
from shadowkv.eval.sample import Length, Sample

Ask = Literal["values", "majority", "count"]

TASK = "dense"
CANDIDATES = 4
MOST_NEEDLES = 10_000
SHORT_ANSWER_TOKENS = 16
STEP_WORDS = 25


def dense_evidence(
    length: Length, haystack: Haystack, needles: int, *, ask: Ask = "values", samples: int = 1, seed: int = 42
) -> Iterator[Sample]:
    """Samples with this many needles.

    With ``majority`` the winner stands a tenth of the sentences, and at least two, before each other word.

    Raises:
        ConfigError: the number of needles or the question is not allowed.
        RequestError: the needles with the question and the answer do not fit into the length.
    """
    if ask not in get_args(Ask):
        raise ConfigError(f"ask is {ask!r}; it is one of {', '.join(get_args(Ask))}")
    if not 1 <= needles <= MOST_NEEDLES:
        raise ConfigError(f"there are 1 to {MOST_NEEDLES} needles; {needles} were asked for")
    answer_tokens = SHORT_ANSWER_TOKENS
    if ask == "values":
        listed = ", ".join(distinct(number, random.Random(seed), needles))
        answer_tokens += math.ceil(1.1 * length.count_tokens(listed))

    def build(size: int, index: int) -> Sample:
        rng = random.Random(f"{seed}/{TASK}/{ask}/{needles}/{index}")
        key = word(rng)
        values = _ballots(rng, needles) if ask == "majority" else distinct(number, rng, needles)
        kind: Literal["words", "numbers"] = "words" if ask == "majority" else "numbers"
        hidden = [needle(kind, key, value) for value in values]
        parts = haystack.sentences(size)
        places = [round((i + 0.5) / needles * len(parts)) for i in range(needles)]
        text = " ".join(plant(parts, hidden, places))
        question, prefix, references, metric = _asked(ask, kind, key, values)
        return Sample(
            task=f"{TASK}_{ask}_{needles}[{haystack.name}]",
            index=index,
            context=f"{Wording.of(kind, [key], many=True).introduction}\n{text}",
            question=question,
            answer_prefix=prefix,
            references=references,
            max_new_tokens=answer_tokens,
            metric=metric,
            depths=depths_of(text, hidden),
            classes=tuple(dict.fromkeys(values)) if ask == "majority" else (),
            facts={"needles": needles},
        )

    try:
        yield from fill(build, length, STEP_WORDS, samples)
    except RequestError as error:
        raise RequestError(f"{needles} needles: {error}") from error


def _asked(
    ask: Ask, kind: Literal["words", "numbers"], key: str, values: list[str]
) -> tuple[str, str, tuple[str, ...], str]:
    if ask == "values":
        wording = Wording.of(kind, [key], many=True)
        return wording.question, wording.answer_prefix, tuple(values), "string_match_all"
    if ask == "count":
        question = f"How many special magic numbers does the text above give for {key}?"
        return question, f"The number of special magic numbers for {key} is", (str(len(values)),), "exact_number"
    winner = max(dict.fromkeys(values), key=values.count)
    question = f"Which special magic word does the text above give most often for {key}?"
    return question, f"The special magic word given most often for {key} is", (winner,), "first_class"


def _ballots(rng: random.Random, needles: int) -> list[str]:
    """One word for each needle, in random order, with a clear winner."""
    words = rng.sample(NOUNS, CANDIDATES)
    lead = max(2, needles // 10)
    others = max(needles - lead, 0) // CANDIDATES
    ballots = [name for name in words[1:] for _ in range(others)]
    ballots += [words[0]] * (needles - len(ballots))
    rng.shuffle(ballots)
    return ballots
