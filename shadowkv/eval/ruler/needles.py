"""RULER's eight needle tasks: values of keys, hidden in noise, among other needles, or in essays.

Structure and parameters are RULER's, and the needle's sentence; the other sentences are our own.
Source: NVIDIA/RULER scripts/synthetic.yaml and scripts/data/synthetic/niah.py.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shadowkv.eval.haystack import NOISE, depths_of, plant
from shadowkv.eval.ruler.recipe import SHORT_TOKENS, Materials, Recipe
from shadowkv.eval.ruler.words import MAKERS, Kind, distinct
from shadowkv.eval.sample import Length, Sample

DEPTHS = tuple(round(100 * i / 39) for i in range(40))
"""Places in percent, of which each needle in a text gets its own."""
ANSWER_TOKENS = 128
STEP_WORDS = 500
STEP_LINES = 25
STEP_LINES_SHORT = 5


def needle(kind: Kind, key: str, value: str) -> str:
    """The sentence that hides a value."""
    return f"One of the special magic {kind} for {key} is: {value}."


@dataclass(frozen=True)
class NeedleTask:
    """One of the tasks.

    Args:
        hay: what the needles are hidden in; ``needle`` is a haystack of other needles.
        queries: how many keys the question asks for; there are at least as many keys.
    """

    name: str
    hay: Literal["noise", "needle", "essay"]
    key_kind: Kind = "words"
    value_kind: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def recipe(self, materials: Materials, length: Length) -> Recipe:
        """How samples are made.

        Raises:
            ConfigError: the task needs a text and there is none.
        """
        step = STEP_LINES_SHORT if length.limit_tokens < SHORT_TOKENS else STEP_LINES
        name = self.name
        if self.hay == "essay":
            step = STEP_WORDS
            name = f"{name}[{materials.text(name).name}]"
        return Recipe(lambda size, index: self._sample(materials, name, size, index), step)

    def _sample(self, materials: Materials, name: str, size: int, index: int) -> Sample:
        rng = random.Random(f"{materials.seed}/{self.name}/{index}")
        count = max(self.keys, self.queries)
        keys = distinct(MAKERS[self.key_kind], rng, count)
        flat = distinct(MAKERS[self.value_kind], rng, count * self.values)
        values = [flat[i * self.values : (i + 1) * self.values] for i in range(count)]
        asked = rng.sample(range(count), self.queries)
        needles = [needle(self.value_kind, key, value) for key, own in zip(keys, values, strict=True) for value in own]
        # The same permutation in every sample: so it is in RULER.
        random.Random(materials.seed).shuffle(needles)
        text = self._hide(materials, rng, needles, keys, size)
        wanted = [needle(self.value_kind, keys[i], value) for i in asked for value in values[i]]
        wording = Wording.of(self.value_kind, [keys[i] for i in asked], many=self.values * self.queries > 1)
        return Sample(
            task=name,
            index=index,
            context=f"{wording.introduction}\n{text}",
            question=wording.question,
            answer_prefix=wording.answer_prefix,
            references=tuple(value for i in asked for value in values[i]),
            max_new_tokens=ANSWER_TOKENS,
            metric="string_match_all",
            depths=depths_of(text, wanted),
        )

    def _hide(
        self, materials: Materials, rng: random.Random, needles: Sequence[str], keys: Sequence[str], size: int
    ) -> str:
        if self.hay == "essay":
            parts = materials.text(self.name).sentences(size)
            depths = sorted(rng.sample(DEPTHS, len(needles)))
            return " ".join(plant(parts, needles, [int(len(parts) * depth / 100) for depth in depths]))
        lines = [NOISE] * size
        if self.hay == "needle":
            lines = [self._distractor(rng, keys) for _ in range(size)]
        return "\n".join(plant(lines, needles, sorted(rng.sample(range(size), len(needles)))))

    def _distractor(self, rng: random.Random, keys: Sequence[str]) -> str:
        key = MAKERS[self.key_kind](rng)
        while key in keys:
            key = MAKERS[self.key_kind](rng)
        return needle(self.value_kind, key, MAKERS[self.value_kind](rng))


@dataclass(frozen=True)
class Wording:
    """Our sentences around a haystack with needles."""

    introduction: str
    question: str
    answer_prefix: str

    @classmethod
    def of(cls, kind: Kind, keys: Sequence[str], *, many: bool) -> "Wording":
        """For a question about these keys.

        Args:
            many: the answer has several values.
        """
        named = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
        if many:
            return cls(
                f"Some special magic {kind} are hidden in the following text. Memorize them: "
                f"the question after the text is about the {kind}.",
                f"What are all the special magic {kind} for {named} in the text above?",
                f"The special magic {kind} for {named} are",
            )
        one = kind.removesuffix("s")
        return cls(
            f"A special magic {one} is hidden in the following text. Memorize it: "
            f"the question after the text is about the {one}.",
            f"What is the special magic {one} for {named} in the text above?",
            f"The special magic {one} for {named} is",
        )


NEEDLE_TASKS = (
    NeedleTask("niah_single_1", "noise"),
    NeedleTask("niah_single_2", "essay"),
    NeedleTask("niah_single_3", "essay", value_kind="uuids"),
    NeedleTask("niah_multikey_1", "essay", keys=4),
    NeedleTask("niah_multikey_2", "needle"),
    NeedleTask("niah_multikey_3", "needle", key_kind="uuids", value_kind="uuids"),
    NeedleTask("niah_multivalue", "essay", values=4),
    NeedleTask("niah_multiquery", "essay", queries=4),
)
