"""What travels through the engine: a request on its way in, its answer on its way out. Knows no tensor."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from shadowkv.config import SamplingParams
from shadowkv.errors import RequestError

if TYPE_CHECKING:
    from shadowkv.cache.base import CacheStats

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"

JSON_IMPOSSIBLE_LOGPROB = -9999.0
"""What JSON, which has no infinity, gets for the log-probability of an impossible token."""


class FinishReason(StrEnum):
    """Why a sample ended; every accepted sample gets exactly one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


def _json_logprob(logprob: float) -> float:
    return max(logprob, JSON_IMPOSSIBLE_LOGPROB)


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithm of a chosen token's probability, and the most likely alternatives, best first."""

    token_id: int
    token: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()

    def to_dict(self) -> dict[str, Json]:
        return {
            "token_id": self.token_id,
            "token": self.token,
            "logprob": _json_logprob(self.logprob),
            "top": [
                {"token_id": token_id, "token": token, "logprob": _json_logprob(logprob)}
                for token_id, token, logprob in self.top
            ],
        }


@dataclass(frozen=True)
class Completion:
    """One finished sample. ``stop_reason`` is the stop string or the end token that ended it."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    stats: "CacheStats | None" = None

    def to_dict(self) -> dict[str, Json]:
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason.value,
            "stop_reason": self.stop_reason,
            "error": self.error,
            "logprobs": None if self.logprobs is None else [entry.to_dict() for entry in self.logprobs],
            "stats": None if self.stats is None else {**asdict(self.stats), "hit_rate": self.stats.hit_rate},
        }


@dataclass(frozen=True)
class Timing:
    """Where a request's time went; prefill and decoding are never added together.

    ``generated_tokens`` counts all ``samples``. The first token of each comes out of the prefill, so
    decoding is charged with the others only.
    """

    queued_s: float
    prefill_s: float
    decode_s: float
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    samples: int = 1

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens computed, not reused, per second; None when no time was measured."""
        return (self.prompt_tokens - self.reused_tokens) / self.prefill_s if self.prefill_s > 0 else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens of decoding steps per second over all samples; None when there was no such step."""
        decoded = self.generated_tokens - self.samples
        return decoded / self.decode_s if self.decode_s > 0 and decoded > 0 else None

    def to_dict(self) -> dict[str, Json]:
        return {
            **asdict(self),
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
        }


@dataclass(frozen=True)
class RequestOutput:
    """A whole answer: one completion per sample, in order of index."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    timing: Timing

    def to_dict(self) -> dict[str, Json]:
        return {
            "request_id": self.request_id,
            "prompt_token_ids": list(self.prompt_token_ids),
            "completions": [completion.to_dict() for completion in self.completions],
            "timing": self.timing.to_dict(),
        }


@dataclass(frozen=True)
class StreamChunk:
    """A piece of one sample's answer; the last one carries ``finished``."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finished: Completion | None = None

    def to_dict(self) -> dict[str, Json]:
        return {
            "request_id": self.request_id,
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finished": None if self.finished is None else self.finished.to_dict(),
        }


class Request:
    """A question on its way through the engine, with ``params.n`` samples to be answered.

    Args:
        arrival: when it was accepted, on the engine's monotonic clock, in seconds.
        reused_tokens: leading tokens of the prompt that a kept context already holds.

    Raises:
        RequestError: the prompt is empty, or a kept context leaves nothing to compute.
    """

    def __init__(
        self,
        id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        arrival: float = 0.0,
        reused_tokens: int = 0,
    ) -> None:
        self.id = id
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.params = params
        self.arrival = arrival
        self.reused_tokens = reused_tokens
        self.admitted: float | None = None
        self.prefilled: float | None = None
        self.generated_tokens = 0
        if not self.prompt_token_ids:
            raise RequestError("the prompt has no tokens; give at least one")
        if not 0 <= reused_tokens < len(self.prompt_token_ids):
            raise RequestError(
                f"reused_tokens is {reused_tokens} for a prompt of {len(self.prompt_token_ids)} tokens; "
                "at least the last prompt token has to be computed"
            )

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one sample may come to hold: those of the prompt and all it may generate."""
        return self.prompt_tokens + self.params.max_tokens

    def timing(self, now: float) -> Timing:
        """Durations so far. The engine sets ``admitted`` and ``prefilled`` when these moments come."""
        admitted = now if self.admitted is None else self.admitted
        prefilled = now if self.prefilled is None else self.prefilled
        return Timing(
            queued_s=admitted - self.arrival,
            prefill_s=max(prefilled - admitted, 0.0),
            decode_s=now - prefilled,
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            generated_tokens=self.generated_tokens,
            samples=self.params.n,
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.id!r}, {self.prompt_tokens} prompt tokens, "
            f"max_tokens={self.params.max_tokens}, n={self.params.n})"
        )
