"""RULER's variable tracking: a value that is handed from variable to variable, scattered over noise.

Structure and parameters are RULER's; the sentences are our own.
Source: NVIDIA/RULER scripts/data/synthetic/variable_tracking.py.
"""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

from shadowkv.eval.haystack import NOISE, depths_of, plant
from shadowkv.eval.ruler.recipe import Materials, Recipe
from shadowkv.eval.ruler.words import letters
from shadowkv.eval.sample import CountTokens, Length, Sample

ANSWER_TOKENS = 30
STEP_LINES = 10
LETTERS = 5
EXAMPLE_LETTERS = 3
EXAMPLE_TOKENS = 500
EXAMPLE_STEP_LINES = 5

INTRODUCTION = "Variables are assigned in the following text, some from other variables. Keep track of them."


def _question(value: str) -> str:
    return f"Question: Which variables hold the value {value} in the end, directly or through other variables?"


def _answer_prefix(value: str, count: int) -> str:
    return f"Answer: By the assignments in the text above, {count} variables hold the value {value}. They are:"


@dataclass(frozen=True)
class _Puzzle:
    text: str
    value: str
    names: tuple[str, ...]
    lines: tuple[str, ...]

    def example(self) -> str:
        """With its answer."""
        asked = f"{INTRODUCTION}\n\n{self.text}\n\n{_question(self.value)}"
        return f"{asked} {_answer_prefix(self.value, len(self.names))} {' '.join(self.names)}"


@dataclass(frozen=True)
class TrackingTask:
    """The task; the answer is the first chain's variables."""

    name: str = "vt"
    chains: int = 1
    hops: int = 4

    def recipe(self, materials: Materials, length: Length) -> Recipe:
        """How samples are made: an example, solved, and the puzzle itself."""
        lines = self._example_lines(materials.seed, length.count_tokens)
        return Recipe(lambda size, index: self._sample(materials.seed, lines, size, index), STEP_LINES)

    def _example_lines(self, seed: int, count_tokens: CountTokens) -> int:
        rng = random.Random(f"{seed}/{self.name}/example")
        lines = EXAMPLE_STEP_LINES
        while lines < EXAMPLE_TOKENS:
            larger = self._puzzle(rng, lines + EXAMPLE_STEP_LINES, EXAMPLE_LETTERS).example()
            if count_tokens(larger) + ANSWER_TOKENS > EXAMPLE_TOKENS:
                break
            lines += EXAMPLE_STEP_LINES
        return lines

    def _sample(self, seed: int, example_lines: int, size: int, index: int) -> Sample:
        rng = random.Random(f"{seed}/{self.name}/{index}")
        example = self._puzzle(rng, example_lines, EXAMPLE_LETTERS).example()
        puzzle = self._puzzle(rng, size, LETTERS)
        return Sample(
            task=self.name,
            index=index,
            context=f"{example}\n\n\n{INTRODUCTION}\n\n{puzzle.text}",
            question=_question(puzzle.value),
            answer_prefix=_answer_prefix(puzzle.value, len(puzzle.names)),
            references=puzzle.names,
            max_new_tokens=ANSWER_TOKENS,
            metric="string_match_all",
            depths=depths_of(puzzle.text, puzzle.lines),
        )

    def _puzzle(self, rng: random.Random, lines: int, width: int) -> _Puzzle:
        length = self.hops + 1
        names = letters(rng, self.chains * length, width, string.ascii_uppercase)
        values = rng.sample(range(10_000, 99_999), self.chains)
        chains = [_chain(names[i * length : (i + 1) * length], str(value)) for i, value in enumerate(values)]
        placed: list[tuple[int, str]] = []
        for chain in chains:
            places = sorted(rng.sample(range(max(lines, length)), length))
            placed += zip(places, chain, strict=True)
        text = plant([NOISE] * lines, [line for _, line in placed], [min(place, lines) for place, _ in placed])
        return _Puzzle("\n".join(text), str(values[0]), tuple(names[:length]), tuple(chains[0]))


def _chain(names: Sequence[str], value: str) -> list[str]:
    assigned = zip(names[1:], names, strict=False)
    return [f"VAR {names[0]} = {value}", *(f"VAR {name} = VAR {source} " for name, source in assigned)]
