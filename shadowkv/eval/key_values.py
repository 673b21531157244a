"""Key-value retrieval: a JSON object of random UUIDs, and the value of one key.

Source of the task: Liu et al., "Lost in the Middle", and InfiniteBench's Retrieve.KV. The sentences are our own.
"""

import json
import random
from collections.abc import Iterator, Sequence

from shadowkv.errors import ConfigError
from shadowkv.eval.fitting import fill
from shadowkv.eval.ruler.words import distinct, identifier
from shadowkv.eval.sample import Length, Sample

TASK = "key_values"
ANSWER_TOKENS = 64
STEP_PAIRS = 1

INTRODUCTION = "The following JSON object gives a value for each key. The question after it asks for one of them."


def key_value_sample(
    task: str, index: int, pairs: Sequence[tuple[str, str]], place: int, max_new_tokens: int = ANSWER_TOKENS
) -> Sample:
    """The question for one pair of many."""
    key, value = pairs[place]
    lines = ",\n ".join(f"{json.dumps(name)}: {json.dumps(content)}" for name, content in pairs)
    return Sample(
        task=task,
        index=index,
        context=f"{INTRODUCTION}\n\n{{{lines}}}",
        question=f'Which value does the JSON object above give for the key "{key}"?',
        answer_prefix=f'The value for the key "{key}" is "',
        references=(value,),
        max_new_tokens=max_new_tokens,
        metric="string_match_all",
        depths=((place + 0.5) / len(pairs),),
        facts={"pairs": len(pairs)},
    )


def key_values(
    length: Length, *, samples: int = 1, questions: int = 1, depths: Sequence[float] | None = None, seed: int = 42
) -> Iterator[Sample]:
    """Contexts of a length, with so many questions each, which follow each other.

    Args:
        samples: number of contexts.
        depths: where the pairs stand that are asked for, one share for each question; random by default.

    Raises:
        ConfigError: no questions, or depths that are not as many or not between 0 and 1.
        RequestError: the length is too small.
    """
    if questions < 1:
        raise ConfigError(f"a context has at least one question; {questions} were asked for")
    if depths is not None and (len(depths) != questions or not all(0 <= depth <= 1 for depth in depths)):
        raise ConfigError(f"{questions} questions need as many depths from 0 to 1; {list(depths)} were given")

    def asked(size: int, index: int) -> list[Sample]:
        rng = random.Random(f"{seed}/{TASK}/{index}")
        shares = depths or [rng.random() for _ in range(questions)]
        names = distinct(identifier, rng, 2 * size)
        pairs = list(zip(names[:size], names[size:], strict=True))
        return [key_value_sample(TASK, index, pairs, round(share * (size - 1))) for share in shares]

    def longest(size: int, index: int) -> Sample:
        return max(asked(size, index), key=lambda one: length.count_tokens(one.question + one.answer_prefix))

    for one in fill(longest, length, STEP_PAIRS, samples):
        yield from asked(int(one.facts["pairs"]), one.index)
