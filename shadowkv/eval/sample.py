"""One question of a benchmark, and how long its prompt is.

Context and question stand apart, so that a context with several questions is computed once. Knows no model.
"""

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from shadowkv.errors import RequestError

if TYPE_CHECKING:
    from shadowkv.engine.tokenizer import Tokenizer

CountTokens = Callable[[str], int]

SEAM_CHARACTERS = 256

Layout = Literal["chat", "plain", "complete"]
"""How a prompt is made of a sample: ``chat``, one user message of the model's chat template; ``plain``, the text
without a template, with the tokens that the model wants before a text; ``complete``, the text exactly as it is,
since it holds somebody's template already."""


@dataclass(frozen=True)
class Sample:
    """A question on a context.

    The prompt is ``context + separator + question`` in its layout, and ``answer_prefix`` after the assistant's
    header, as the first words of the answer.

    Args:
        task: name of the task with its haystack in brackets, as the result is named.
        index: number of the sample within its task and length.
        references: right answers; what they mean depends on the metric.
        metric: a name in :data:`shadowkv.eval.scorers.METRICS`.
        turn: place in a dialogue over one context; None for a question that stands alone.
        depths: where the evidence stands, as shares of the context from 0 to 1.
        classes: all possible answers, where the metric needs to know them.
        facts: what else a table may want to group by.
    """

    task: str
    index: int
    context: str
    question: str
    answer_prefix: str
    references: tuple[str, ...]
    max_new_tokens: int
    metric: str
    turn: int | None = None
    depths: tuple[float, ...] = ()
    classes: tuple[str, ...] = ()
    facts: Mapping[str, str | int | float] = field(default_factory=dict)
    layout: Layout = "chat"
    separator: str = "\n\n"

    @property
    def user_text(self) -> str:
        """The prompt without template and answer prefix."""
        return self.context + self.separator + self.question

    def answered_by(self, text: str) -> str:
        """What is scored: all the text that the model generated. A reader may cut it to the first line."""
        return text.lstrip("\n").split("\n")[0] if self.facts.get("first_line") else text


@dataclass(frozen=True)
class Frame:
    """What stands around a user's message: a chat template's text, or nothing but the first tokens."""

    head: str = ""
    tail: str = ""
    head_tokens: int = 0
    """Tokens before the text that it does not spell out."""
    between: str | None = "\n\n"
    """What stands between an answer and the next question; None where the template does not say."""

    @classmethod
    def of_chat(cls, tokenizer: "Tokenizer") -> "Frame":
        """Of a model's chat template.

        Raises:
            RequestError: there is none, or it changes the message's text.
        """
        mark = secrets.token_hex(16)
        head, found, tail = tokenizer.render_chat([{"role": "user", "content": mark}]).partition(mark)
        if not found or mark in tail:
            raise RequestError("the chat template does not keep the message's text in one piece; use --no-chat")
        return cls(head, tail, between=_between(tokenizer, mark))

    @classmethod
    def of_text(cls, tokenizer: "Tokenizer") -> "Frame":
        """Of a prompt without a template."""
        plain, full = tokenizer.encode("a", special=False), tokenizer.encode("a")
        return cls(head_tokens=len(full) - len(plain))

    def parts(self, sample: Sample) -> tuple[str, str]:
        """The prompt in two: what all questions on a context share, and what follows it.

        The first is to be encoded with the tokens that the model wants before a text exactly where
        ``head_tokens`` is not 0, the second without.
        """
        return self.head + sample.context + sample.separator, sample.question + self.tail + sample.answer_prefix

    def next_turn(self, sample: Sample) -> str:
        """What follows an answer in a dialogue, up to the beginning of the next answer.

        A template's text for the end of an answer comes first; where the model has generated its end token
        already, it is there twice unless one of them is left out.

        Raises:
            RequestError: the chat template takes no second question.
        """
        if self.between is None:
            raise RequestError("the chat template does not take a second question after an answer; use --no-chat")
        return self.between + sample.question + self.tail + sample.answer_prefix


def _between(tokenizer: "Tokenizer", mark: str) -> str | None:
    turns = [{"role": role, "content": f"{mark}{role}{i}"} for i, role in enumerate(("user", "assistant", "user"))]
    try:
        _, answered, rest = tokenizer.render_chat(turns).partition(f"{mark}assistant1")
    except RequestError:
        return None
    between, asked, _ = rest.partition(f"{mark}user2")
    return between if answered and asked else None


@dataclass(frozen=True)
class Length:
    """A limit on prompt and answer together, and how tokens are counted.

    Context and question may be encoded apart, so that the context is computed once, or together.
    """

    limit_tokens: int
    count_tokens: CountTokens
    chat: Frame = Frame()
    plain: Frame = Frame()

    @classmethod
    def of(cls, tokenizer: "Tokenizer", limit_tokens: int, *, chat: bool) -> "Length":
        """For a model's tokenizer.

        Args:
            chat: samples are put into the model's chat template, where they do not forbid it.

        Raises:
            RequestError: the chat template is missing or changes the message's text.
        """
        plain = Frame.of_text(tokenizer)
        framed = Frame.of_chat(tokenizer) if chat else plain
        return cls(limit_tokens, lambda text: len(tokenizer.encode(text, special=False)), framed, plain)

    def frame(self, sample: Sample) -> Frame:
        """What stands around this sample's text."""
        return {"chat": self.chat, "plain": self.plain, "complete": Frame()}[sample.layout]

    def prompt_tokens(self, sample: Sample) -> int:
        """Template, context, question and answer prefix, encoded in two parts or in one, whichever is more."""
        frame = self.frame(sample)
        head, rest = frame.parts(sample)
        # What one encoding of both costs more can only come from the place where they meet.
        end = head[-SEAM_CHARACTERS:]
        counted = self.count_tokens(rest)
        seam = self.count_tokens(end + rest) - self.count_tokens(end) - counted
        return frame.head_tokens + self.count_tokens(head) + counted + max(seam, 0)

    def total_tokens(self, sample: Sample) -> int:
        """Prompt and the longest answer."""
        return self.prompt_tokens(sample) + sample.max_new_tokens

    def later_tokens(self, turns: Sequence[Sample]) -> int:
        """What the turns after the first one add to a dialogue, with the longest answers.

        Raises:
            RequestError: the chat template takes no second question.
        """
        frame = self.frame(turns[0])
        return sum(self.count_tokens(frame.next_turn(one)) + one.max_new_tokens for one in turns[1:])

    def fits(self, sample: Sample) -> bool:
        """Prompt and answer stay within the limit."""
        return self.total_tokens(sample) <= self.limit_tokens


def by_context(samples: Iterable[Sample]) -> Iterator[tuple[Sample, ...]]:
    """Groups of samples that follow each other and share one context, so that it is computed once."""
    for _, group in itertools.groupby(samples, key=lambda one: (one.task, one.context, one.separator, one.layout)):
        yield tuple(group)


def cut_middle(
    sample: Sample,
    length: Length,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    *,
    reserve_tokens: int = 0,
) -> Sample:
    """The sample with the middle of its context left out, where it is too long: half of the tokens that have
    room come from its beginning, half from its end.

    Args:
        reserve_tokens: room left for what follows, such as the later turns of a dialogue.

    Raises:
        RequestError: the question alone is too long.

    Source: THUDM/LongBench pred.py and InfiniteBench cut prompts this way; there the whole prompt is cut, here
    only the context, so that neither template nor question is damaged.
    """
    room = length.limit_tokens - reserve_tokens
    over = length.total_tokens(sample) - room
    if over <= 0:
        return sample
    ids = list(encode(sample.context))
    keep = len(ids) - over
    while keep > 0:
        context = decode(ids[: keep // 2]) + decode(ids[len(ids) - (keep - keep // 2) :])
        cut = replace(sample, context=context, facts={**sample.facts, "cut_tokens": len(ids) - keep})
        over = length.total_tokens(cut) - room
        if over <= 0:
            return cut
        keep -= over
    raise RequestError(
        f"{sample.task}, sample {sample.index}: the question with its template and answer does not fit into "
        f"{room} tokens; give a larger length"
    )
