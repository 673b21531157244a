"""The demo: facts hidden in a long manual, asked of full attention and of ShadowKV, side by side.

The manual is the Python language reference as the standard library carries it for ``help()``, so that every
machine has it. Knows nothing of how a result is shown.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from shadowkv.config import SamplingParams
from shadowkv.conversation import SplitPrompt, split_prompt
from shadowkv.engine.request import Completion, FinishReason
from shadowkv.errors import RequestError, ShadowKVError

if TYPE_CHECKING:
    from shadowkv.engine.tokenizer import Tokenizer
    from shadowkv.llm import LLM

Report = Callable[[str, int, int], None]

INTRODUCTION = "Some facts are hidden in the manual below. Remember them: you will be asked about them afterwards."
ANSWER_TOKENS = 48
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Fact:
    """One sentence planted in the manual, and the question that only it answers."""

    depth_percent: int
    sentence: str
    question: str
    answer_prefix: str
    expected: str


FACTS = (
    Fact(
        10,
        "One of the special magic numbers for lighthouse is: 4821937.",
        "What is the special magic number for lighthouse?",
        "The special magic number for lighthouse is",
        "4821937",
    ),
    Fact(
        35,
        "One of the special magic numbers for velvet-harbour is: 7350168.",
        "Which special magic number does the text give for velvet-harbour?",
        "The special magic number for velvet-harbour is",
        "7350168",
    ),
    Fact(
        48,
        "The night train to Brindlemoor leaves from platform 73.",
        "From which platform does the night train to Brindlemoor leave?",
        "The night train to Brindlemoor leaves from platform",
        "73",
    ),
    Fact(
        60,
        "One of the special magic words for observatory is: crimson-otter.",
        "Which special magic word does the text give for observatory?",
        "The special magic word for observatory is",
        "crimson-otter",
    ),
    Fact(
        85,
        "One of the special magic uuids for archive is: 7b1e04c2-5a9d-4f63-8c1e-2d90ab47f6e5.",
        "Which special magic uuid does the text give for archive?",
        "The special magic uuid for archive is",
        "7b1e04c2-5a9d-4f63-8c1e-2d90ab47f6e5",
    ),
)


@dataclass(frozen=True)
class Answer:
    """What a method said to one question."""

    question: str
    expected: str
    text: str
    right: bool
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class MethodResult:
    """One method's answers and what they took. Bytes are those of the whole sequence with its answer."""

    method: str
    answers: tuple[Answer, ...]
    context_tokens: int
    prefill_seconds: float
    decode_steps: int
    decode_seconds: float
    device_bytes: int
    host_bytes: int
    hit_rate: float | None

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.context_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        return self.decode_steps / self.decode_seconds if self.decode_seconds > 0 else None

    def to_dict(self) -> dict[str, object]:
        """Everything, for JSON."""
        return {
            **asdict(self),
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        }


def manual(tokenizer: "Tokenizer", tokens: int) -> str:
    """At least ``tokens`` tokens of the manual, with every fact planted at its depth.

    Raises:
        RequestError: the manual is shorter than that.
    """
    from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]

    paragraphs: list[str] = []
    ends: list[int] = []
    total = 0
    for name in sorted(topics):
        for paragraph in topics[name].strip().split("\n\n"):
            if total >= tokens:
                break
            paragraphs.append(paragraph)
            total += len(tokenizer.encode(paragraph + "\n\n", special=False))
            ends.append(total)
    if total < tokens:
        raise RequestError(f"{tokens} tokens were asked for and the manual has {total}")
    for fact in sorted(FACTS, key=lambda fact: fact.depth_percent, reverse=True):
        at = sum(end <= total * fact.depth_percent / 100 for end in ends)
        paragraphs.insert(at, fact.sentence)
    return INTRODUCTION + "\n\n" + "\n\n".join(paragraphs)


def prepare(tokenizer: "Tokenizer", tokens: int) -> SplitPrompt:
    """The manual as the beginning of a user message, ready for questions."""
    return split_prompt(tokenizer, manual(tokenizer, tokens), chat=True)


def run_method(llm: "LLM", method: str, split: SplitPrompt, report: Report) -> MethodResult:
    """Compute the manual once and ask every question of it, greedily.

    Raises:
        ShadowKVError: a question ended in an error.
    """
    # The first call of a process pays for buffers and thread pools; neither method should.
    llm.generate([split.head_ids[:WARM_UP_TOKENS]], SamplingParams(max_tokens=2, ignore_eos=True))
    started = time.monotonic()
    answers: list[Answer] = []
    completions: list[Completion] = []
    steps, decode_seconds = 0, 0.0
    with llm.context(split.head_ids) as context:
        prefill_seconds = time.monotonic() - started
        for done, fact in enumerate(FACTS):
            report(f"{method}: questions", done, len(FACTS))
            ids = split.question_ids(llm.tokenizer, fact.question, fact.answer_prefix)
            (output,) = context.generate([ids], SamplingParams(max_tokens=ANSWER_TOKENS))
            (completion,) = output.completions
            if completion.finish_reason is FinishReason.ERROR:
                raise ShadowKVError(f"{method}, {fact.question!r}: {completion.error}")
            right = fact.expected in completion.text
            answers.append(Answer(fact.question, fact.expected, completion.text, right, completion.token_ids))
            completions.append(completion)
            steps += max(output.timing.generated_tokens - output.timing.samples, 0)
            decode_seconds += output.timing.decode_s
        report(f"{method}: questions", len(FACTS), len(FACTS))
    stats = [completion.stats for completion in completions if completion.stats is not None]
    looked_up = sum(one.hits + one.misses for one in stats)
    return MethodResult(
        method=method,
        answers=tuple(answers),
        context_tokens=len(split.head_ids),
        prefill_seconds=prefill_seconds,
        decode_steps=steps,
        decode_seconds=decode_seconds,
        device_bytes=max((one.device_bytes for one in stats), default=0),
        host_bytes=max((one.host_bytes for one in stats), default=0),
        hit_rate=sum(one.hits for one in stats) / looked_up if looked_up else None,
    )


def agreement(reference: MethodResult, other: MethodResult) -> float:
    """Share of answer tokens that are the same token at the same place."""
    same = total = 0
    for left, right in zip(reference.answers, other.answers, strict=True):
        same += sum(a == b for a, b in zip(left.token_ids, right.token_ids, strict=False))
        total += max(len(left.token_ids), len(right.token_ids))
    return same / total if total else 1.0


def lost(reference: MethodResult, other: MethodResult) -> list[str]:
    """Questions that the reference answers rightly and the other does not."""
    pairs = zip(reference.answers, other.answers, strict=True)
    return [left.question for left, right in pairs if left.right and not right.right]
