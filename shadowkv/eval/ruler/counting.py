"""RULER's two tasks of counting: the ten common words of a list, and the three frequent ones of a coded text.

Structure and parameters are RULER's; the sentences and the words are our own.
Source: NVIDIA/RULER scripts/data/synthetic/common_words_extraction.py and freq_words_extraction.py.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from shadowkv.errors import RequestError
from shadowkv.eval.ruler.recipe import SHORT_TOKENS, Materials, Recipe
from shadowkv.eval.ruler.words import letters, listed
from shadowkv.eval.sample import Length, Sample


@dataclass(frozen=True)
class _Repeats:
    common: int
    rare: int
    example_words: int
    example_common: int
    example_rare: int


_LONG = _Repeats(30, 3, 40, 10, 3)
_SHORT = _Repeats(6, 1, 20, 3, 1)


@dataclass(frozen=True)
class ListedWordsTask:
    """A numbered list in which ten words stand more often than the others. Size: number of different words."""

    name: str = "cwe"
    common: int = 10
    answer_tokens: int = 120
    step_words: int = 10

    introduction = "In the following numbered list some words stand more often than the others. Memorize them."
    question = "Question: Which are the 10 words that stand most often in the list above?"
    answer_prefix = "Answer: The 10 words that stand most often in the list above are:"

    def recipe(self, materials: Materials, length: Length) -> Recipe:
        """How samples are made: an example, solved, and the list itself."""
        repeats = _SHORT if length.limit_tokens < SHORT_TOKENS else _LONG
        most = len(materials.vocabulary) if materials.vocabulary is not None else None
        return Recipe(lambda size, index: self._sample(materials, repeats, size, index), self.step_words, most)

    def _sample(self, materials: Materials, repeats: _Repeats, size: int, index: int) -> Sample:
        rng = random.Random(f"{materials.seed}/{self.name}/{index}")
        example, solved = self._list(
            materials, rng, repeats.example_words, repeats.example_common, repeats.example_rare
        )
        text, words = self._list(materials, rng, max(size, self.common), repeats.common, repeats.rare)
        solution = f"{self.answer_prefix} {_numbered(solved)}"
        given = materials.vocabulary is not None
        return Sample(
            task=f"{self.name}[{materials.vocabulary_name}]" if given else self.name,
            index=index,
            context=f"{self.introduction}\n{example}\n{self.question} {solution}\n\n{self.introduction}\n{text}",
            question=self.question,
            answer_prefix=self.answer_prefix,
            references=tuple(words),
            max_new_tokens=self.answer_tokens,
            metric="string_match_all",
        )

    def _list(
        self, materials: Materials, rng: random.Random, count: int, common: int, rare: int
    ) -> tuple[str, list[str]]:
        words = listed(rng, count, materials.vocabulary)
        frequent = words[: self.common]
        items = frequent * common + words[self.common :] * rare
        random.Random(materials.seed).shuffle(items)
        return _numbered(items), frequent


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, start=1))


@dataclass(frozen=True)
class FrequentWordsTask:
    """Coded words whose frequencies fall with the square of their rank; the first is noise, the answer the next
    three. Size: steps of words."""

    name: str = "fwe"
    width: int = 6
    answer_tokens: int = 50

    introduction = "The following text is in code. Keep count of how often each coded word stands in it."
    question = (
        "Question: Which three coded words stand most often in the text above? Leave out the dots '...' and "
        "explain nothing."
    )
    answer_prefix = "Answer: The three coded words that stand most often in the text above are:"

    def recipe(self, materials: Materials, length: Length) -> Recipe:
        """How samples are made.

        Raises:
            RequestError: the length has no room for five words with different frequencies.
        """
        room = length.limit_tokens - self.answer_tokens
        words = room // 50
        step = room // 32
        smallest = math.ceil(room // self.width / step) if step > 0 else 0
        if words < 5 or len({_times(smallest * step, rank) for rank in range(1, 6)}) < 5:
            raise RequestError(
                f"{self.name}: {length.limit_tokens} tokens have no room for coded words whose frequencies "
                "differ; give a larger length"
            )

        def build(size: int, index: int) -> Sample:
            return self._sample(materials.seed, words, step * (size + smallest - 1), index)

        return Recipe(build, 1)

    def _sample(self, seed: int, vocabulary: int, total: int, index: int) -> Sample:
        rng = random.Random(f"{seed}/{self.name}/{index}")
        words = sorted(letters(rng, vocabulary, self.width))
        random.Random(seed).shuffle(words)
        words[0] = "..."
        text = [word for rank, word in enumerate(words, start=1) for _ in range(_times(total, rank))]
        random.Random(seed).shuffle(text)
        return Sample(
            task=self.name,
            index=index,
            context=f"{self.introduction}\n{' '.join(text)}",
            question=self.question,
            answer_prefix=self.answer_prefix,
            references=tuple(words[1:4]),
            max_new_tokens=self.answer_tokens,
            metric="string_match_all",
        )


def _times(total: int, rank: int) -> int:
    """How often the word of a rank stands among ``total``: a zeta distribution with exponent 2."""
    return int(total / rank**2 / (math.pi**2 / 6))
