"""Needles in a haystack: one needle at every depth of every length, and several asked for turn by turn.

The grid follows gkamradt/LLMTest_NeedleInAHaystack and MInference (lengths by depths, the needle at the end of
the sentence before its depth). Multi-turn needles have no public code; the definition here: one context with
``turns`` independent needles, evenly spread, prefilled once; one turn of the dialogue asks for one of them, in
random order; the model's own answers stay in the dialogue; accuracy is reported by turn. The needle's sentence
is RULER's, the others are our own.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shadowkv.errors import ConfigError
from shadowkv.eval.fitting import fill, fitted, largest_size
from shadowkv.eval.haystack import Haystack, depths_of, plant
from shadowkv.eval.ruler.needles import Wording, needle
from shadowkv.eval.ruler.words import distinct, number, word
from shadowkv.eval.sample import Length, Sample

GRID_TASK = "needle_grid"
TURNS_TASK = "needle_turns"
DEPTHS = tuple(i / 9 for i in range(10))
"""Ten depths from the beginning to the end."""

ANSWER_TOKENS = 32
STEP_WORDS = 25


def needle_grid(
    length: Length,
    haystack: Haystack,
    *,
    depths: Sequence[float] = DEPTHS,
    samples: int = 1,
    seed: int = 42,
) -> Iterator[Sample]:
    """One row of the grid: samples of every depth at a length, with the wanted depth among their facts.

    Raises:
        ConfigError: a depth is not between 0 and 1.
        RequestError: the length is too small.
    """
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ConfigError(f"a depth is a share from 0 to 1; {depth} was given")

    def build(size: int, index: int) -> Sample:
        depth = depths[index % len(depths)]
        rng = random.Random(f"{seed}/{GRID_TASK}/{index}")
        key, value = word(rng), number(rng)
        hidden = needle("numbers", key, value)
        text = at_depths(haystack.sentences(size), [hidden], [depth])
        wording = Wording.of("numbers", [key], many=False)
        return Sample(
            task=f"{GRID_TASK}[{haystack.name}]",
            index=index,
            context=f"{wording.introduction}\n{text}",
            question=wording.question,
            answer_prefix=wording.answer_prefix,
            references=(value,),
            max_new_tokens=ANSWER_TOKENS,
            metric="string_match_all",
            depths=depths_of(text, [hidden]),
            facts={"depth": depth},
        )

    return fill(build, length, STEP_WORDS, samples * len(depths))


def needle_turns(
    length: Length, haystack: Haystack, *, turns: int = 5, samples: int = 1, seed: int = 42
) -> Iterator[Sample]:
    """Dialogues over one context each; the turns of one follow each other and share its context.

    The length holds the context, all questions and all answers.

    Raises:
        ConfigError: no turns.
        RequestError: the length is too small, or the chat template takes no second question.
    """
    if turns < 1:
        raise ConfigError(f"a dialogue has at least one turn; {turns} were asked for")

    def dialogue(size: int, index: int) -> list[Sample]:
        rng = random.Random(f"{seed}/{TURNS_TASK}/{index}")
        keys, values = distinct(word, rng, turns), distinct(number, rng, turns)
        hidden = [needle("numbers", key, value) for key, value in zip(keys, values, strict=True)]
        spread = [(i + 0.5) / turns for i in range(turns)]
        text = at_depths(haystack.sentences(size), hidden, spread)
        depths = depths_of(text, hidden)
        introduction = Wording.of("numbers", keys, many=True).introduction
        asked = []
        for turn, place in enumerate(rng.sample(range(turns), turns)):
            wording = Wording.of("numbers", [keys[place]], many=False)
            asked.append(
                Sample(
                    task=f"{TURNS_TASK}[{haystack.name}]",
                    index=index,
                    context=f"{introduction}\n{text}",
                    question=wording.question,
                    answer_prefix=wording.answer_prefix,
                    references=(values[place],),
                    max_new_tokens=ANSWER_TOKENS,
                    metric="string_match_all",
                    turn=turn,
                    depths=(depths[place],),
                    facts={"turns": turns},
                )
            )
        return asked

    def whole(size: int, index: int) -> Sample:
        """The first turn with room for all others, to be measured."""
        asked = dialogue(size, index)
        return replace(asked[0], max_new_tokens=ANSWER_TOKENS + length.later_tokens(asked), facts={"size": size})

    size = largest_size(whole, length, STEP_WORDS)
    for index in range(samples):
        kept = int(fitted(whole, length, size, STEP_WORDS, index).facts["size"])
        yield from dialogue(kept, index)


def at_depths(sentences: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> str:
    """A text with needles at shares of its characters, each moved back to the sentence break before it."""
    total = sum(len(sentence) + 1 for sentence in sentences)
    ends = [0]
    for sentence in sentences:
        ends.append(ends[-1] + len(sentence) + 1)
    places = []
    for depth in depths:
        place = len(sentences)
        while place > 0 and ends[place] > depth * total:
            place -= 1
        places.append(place)
    return " ".join(plant(sentences, needles, places))
