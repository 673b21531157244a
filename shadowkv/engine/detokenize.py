"""Token ids to text while they come: whole characters only, and no part of a stop string. Knows no model.

What has been sent cannot be taken back, so text waits here until no later token can change it. The pieces
together are always ``decode`` of all ids, at a cost per token that does not grow with the answer.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from shadowkv.config import SamplingParams

HOLD_TOKENS = 16
"""A decoder of unknown kind may change its mind about so many tokens; then they are sent as they are."""


class Pieces(Protocol):
    """What a tokenizer has to tell for incremental decoding."""

    @property
    def byte_level(self) -> bool:
        """Every token is a run of bytes and text is all bytes joined: see :meth:`token_bytes`."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_byte_fallback(self, token_id: int) -> bool:
        """Whether the token is one byte of a character that the vocabulary lacks."""

    def is_skipped(self, token_id: int) -> bool:
        """Whether the token has no text (a special one, or an id that the vocabulary lacks)."""

    def decode(self, token_ids: Sequence[int]) -> str: ...


class Detokenizer(Protocol):
    """One answer's text. ``push`` returns what a token adds for certain, ``flush`` all that was held."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class ByteDetokenizer:
    """For byte-level vocabularies: an incremental UTF-8 decoder, exact and linear."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if self._pieces.is_skipped(token_id):
            return ""
        return self._utf8.decode(self._pieces.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For vocabularies of whole characters, such as sentencepiece ones.

    A token's text depends on what stands before it (the first one loses its space), so the last piece is
    decoded again with each new one. A run of fallback bytes waits for its end: one bad byte turns the
    whole run into replacement characters.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if self._pieces.is_skipped(token_id):
            return ""
        self._pending.append(token_id)
        if self._pieces.is_byte_fallback(token_id):
            return ""
        text = self._pieces.decode(self._context + self._pending)
        settled = text.startswith(self._context_text) and not text.endswith("\ufffd")
        if not settled and len(self._pending) < HOLD_TOKENS:
            return ""
        return self._send(text)

    def flush(self) -> str:
        return self._send(self._pieces.decode(self._context + self._pending)) if self._pending else ""

    def _send(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        self._context, self._pending = self._pending, []
        self._context_text = self._pieces.decode(self._context)
        return piece


def detokenizer(pieces: Pieces) -> Detokenizer:
    """The incremental decoder for this kind of vocabulary."""
    return ByteDetokenizer(pieces) if pieces.byte_level else WindowDetokenizer(pieces)


def _fallbacks(stop: str) -> list[int]:
    """After ``matched`` characters and a mismatch, how many are still matched (Knuth, Morris and Pratt)."""
    table = [0, 0]
    for character in stop[1:]:
        matched = table[-1]
        while matched and stop[matched] != character:
            matched = table[matched]
        table.append(matched + (stop[matched] == character))
    return table


class StopMatcher:
    """Finds the stop string that is complete first; of two that end together, the longer one.

    The answer depends on the text alone, not on how it is cut into pieces.

    Args:
        include_stop: the text sent ends with the stop string instead of before it.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self.stop_reason: str | None = None
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._tables = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; returns what can be sent. After a stop nothing more is sent."""
        if self.stop_reason is not None:
            return ""
        if not self._stops:
            return text
        for i, character in enumerate(text):
            stop = self._advance(character)
            if stop is not None:
                self.stop_reason = stop
                whole = self._held + text[: i + 1]
                self._held = ""
                return whole if self._include_stop else whole[: -len(stop)]
        whole = self._held + text
        sent = len(whole) - max(self._matched)
        self._held = whole[sent:]
        return whole[:sent]

    def flush(self) -> str:
        """No more text comes: the beginning of a stop string that was held is text after all."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        complete = None
        for k, stop in enumerate(self._stops):
            matched = self._matched[k]
            while matched and stop[matched] != character:
                matched = self._tables[k][matched]
            self._matched[k] = matched = matched + (stop[matched] == character)
            if matched == len(stop) and complete is None:
                complete = stop
        return complete


class TextStream:
    """The text of one running sample: tokens in, text out, until a stop string is complete."""

    def __init__(self, pieces: Pieces, params: SamplingParams) -> None:
        self._detokenizer = detokenizer(pieces)
        self._matcher = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)

    @property
    def stop_reason(self) -> str | None:
        return self._matcher.stop_reason

    def push(self, token_id: int) -> tuple[str, str | None]:
        """The text that can be sent now, and the stop string once it is complete."""
        return self._matcher.push(self._detokenizer.push(token_id)), self.stop_reason

    def finish(self) -> str:
        """The rest. It may complete a stop string yet: see ``stop_reason``."""
        return self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()
