"""A prompt cut in two, chat template and all, so that one prefilled context serves many questions."""

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowkv.errors import RequestError

if TYPE_CHECKING:
    from shadowkv.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class SplitPrompt:
    """A prompt whose head (all up to the question) is computed once, and whose tail follows each question."""

    head_ids: list[int]
    tail: str
    """The template's text between the question and the answer; empty without a template."""

    def question_ids(self, tokenizer: "Tokenizer", question: str, answer_prefix: str = "") -> list[int]:
        """What is appended to the head: the question, the template's tail and the answer's first words."""
        return tokenizer.encode(question + self.tail + answer_prefix, special=False)


def split_prompt(tokenizer: "Tokenizer", context: str, *, chat: bool) -> SplitPrompt:
    """Cut "context, blank line, question" after the blank line.

    Args:
        chat: make it one user message of the model's chat template.

    Raises:
        RequestError: the template changes the message's text, so that the place to cut is not found.
    """
    if not chat:
        return SplitPrompt(tokenizer.encode(context + "\n\n", special=True), "")
    mark = secrets.token_hex(16)
    rendered = tokenizer.render_chat([{"role": "user", "content": f"{context}\n\n{mark}"}])
    head, found, tail = rendered.partition(mark)
    if not found or mark in tail:
        raise RequestError("the chat template does not keep the message's text in one piece; use --no-chat")
    return SplitPrompt(tokenizer.encode(head, special=False), tail)
