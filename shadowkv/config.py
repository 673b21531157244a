"""What a user chooses: frozen dataclasses, checked when they are made. Knows no tensor and no model."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shadowkv.baseline_config import (
    ChunkedConfig,
    InfiniGenConfig,
    LokiConfig,
    MethodSettings,
    OracleConfig,
    QuestConfig,
    RandomConfig,
    SelectiveConfig,
    SnapKVConfig,
    StreamingConfig,
    at_least,
    one_of,
)
from shadowkv.errors import ConfigError

__all__ = [
    "CacheConfig",
    "FullConfig",
    "InfiniGenConfig",
    "LandmarksConfig",
    "LokiConfig",
    "OracleConfig",
    "QuestConfig",
    "RandomConfig",
    "SamplingParams",
    "SelectionConfig",
    "SelectiveConfig",
    "ShadowKVConfig",
    "SnapKVConfig",
    "StreamingConfig",
]


@dataclass(frozen=True)
class FullConfig(MethodSettings):
    """Exact attention over every token; keys and values stay on the device."""


@dataclass(frozen=True)
class LandmarksConfig:
    """The paper's index: the mean post-RoPE key of every chunk (arXiv 2410.21465, section 4)."""


@dataclass(frozen=True)
class ShadowKVConfig(MethodSettings):
    """Low-rank keys on the device, values on the host, sparse exact attention (arXiv 2410.21465).

    Token settings are rounded up to whole chunks. Defaults are the paper's for a 128K context.
    """

    rank: int | tuple[int, ...] | None = None
    """Directions kept of a layer's joint pre-RoPE keys, one number or one per layer. None takes the
    paper's share (160 of 1024 dimensions), but at least 64. Clipped to the dimensions there are."""
    chunk_tokens: int = 8
    """Neighbouring tokens that are selected, fetched and rebuilt together."""
    budget_tokens: int = 2048
    """Tokens selected per KV head and step."""
    outlier_chunks: int = 48
    """Chunks per KV head that their mean describes worst; exact on the device, always attended. The
    first ``sink_chunks`` are among them by rule."""
    sink_chunks: int = 1
    """Chunks at the start of the sequence that always count as outliers."""
    local_chunks: int = 4
    """Chunks at the end of the sequence that stay exact on the device."""
    recent_chunks: int = 16
    """Capacity of the recent window (local chunks, the incomplete chunk and newly generated tokens)."""
    resident_tokens: int | None = None
    """Size of the resident set per KV head. None makes it the budget: the last step's selection. A
    larger one is replaced least recently used first."""
    attend: Literal["selected", "resident"] = "selected"
    """What a step attends to besides outliers and window: its selection, or everything resident."""
    fetch_cap_chunks: int | None = None
    """At most so many chunks per KV head are fetched by one step, best first; None fetches all misses."""
    late_fetch_chunks: int = 0
    """At most so many further missing chunks per KV head are fetched after attention, for the next step: off
    the critical path, a step late. Needs attend='resident' and a ``fetch_cap_chunks``, which may then be 0."""
    reuse: bool = True
    """Keep resident chunks from step to step. False fetches the whole selection each time."""
    centre_keys: bool = True
    """Subtract the prompt's mean key before the decomposition: costs K*D numbers, and a constant
    direction (a bias of the key projection) takes no rank."""
    exact_while_fits: bool = True
    """Attend exactly, without compression, while the whole sequence fits in the exact region."""
    dense_tokens: int | None = None
    """Sequences of at most so many tokens (prompt and answer) stay on the device and exact as a whole. None
    chooses, on a GPU, the length up to which that is faster; elsewhere what fits in the exact region."""
    value_store: Literal["host", "device"] = "host"
    """Where the values of the context live."""
    query_block_tokens: int = 32
    """At most so many appended tokens (a second question, a second turn) share one selection."""
    index: LandmarksConfig = LandmarksConfig()
    """What chunks are ranked by."""

    def __post_init__(self) -> None:
        ranks = (self.rank,) if isinstance(self.rank, int) else self.rank
        if not isinstance(ranks, tuple | None):
            raise ConfigError(f"rank is {self.rank!r}; give one integer or a tuple with one integer per layer")
        for rank in ranks or ():
            at_least("rank", rank, 1)
        if ranks == ():
            raise ConfigError("rank is an empty tuple; give one integer or one per layer")
        for name in ("chunk_tokens", "budget_tokens", "query_block_tokens"):
            at_least(name, getattr(self, name), 1)
        for name in ("local_chunks", "sink_chunks"):
            at_least(name, getattr(self, name), 0)
        at_least("outlier_chunks", self.outlier_chunks, self.sink_chunks)
        at_least("recent_chunks", self.recent_chunks, self.local_chunks + 2)
        if self.resident_tokens is not None:
            at_least("resident_tokens", self.resident_tokens, self.budget_tokens)
        if self.fetch_cap_chunks is not None:
            at_least("fetch_cap_chunks", self.fetch_cap_chunks, 0 if self.late_fetch_chunks else 1)
        at_least("late_fetch_chunks", self.late_fetch_chunks, 0)
        if self.late_fetch_chunks and (self.attend != "resident" or self.fetch_cap_chunks is None):
            raise ConfigError(
                f"late_fetch_chunks is {self.late_fetch_chunks}; it needs attend='resident' and fetch_cap_chunks, "
                "for without a cap nothing is left to be fetched late"
            )
        if not self.reuse and (self.fetch_cap_chunks is not None or self.attend == "resident"):
            raise ConfigError(
                "reuse=False fetches every selected chunk in every step; it excludes fetch_cap_chunks "
                "and attend='resident'"
            )
        if self.dense_tokens is not None:
            at_least("dense_tokens", self.dense_tokens, 0)
            if self.dense_tokens and not self.exact_while_fits:
                raise ConfigError(
                    f"dense_tokens is {self.dense_tokens} and exact_while_fits is False; one keeps short sequences "
                    "exact, the other compresses them"
                )
        one_of("attend", self.attend, ("selected", "resident"))
        one_of("value_store", self.value_store, ("host", "device"))
        if not isinstance(self.index, LandmarksConfig):
            raise ConfigError(f"index is {self.index!r}; allowed: LandmarksConfig()")

    @property
    def budget_chunks(self) -> int:
        return -(-self.budget_tokens // self.chunk_tokens)

    @property
    def resident_chunks(self) -> int:
        return -(-(self.resident_tokens or self.budget_tokens) // self.chunk_tokens)


@dataclass(frozen=True)
class SelectionConfig(ChunkedConfig):
    """ShadowKV's selection without its compression: an index ranks chunks whose keys and values are exact."""

    outlier_chunks: int = 48
    """Chunks per KV head that their mean describes worst, always attended; the sinks are among them."""
    index: LandmarksConfig = LandmarksConfig()
    """What chunks are ranked by."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("outlier_chunks", self.outlier_chunks, self.sink_units)
        if not isinstance(self.index, LandmarksConfig):
            raise ConfigError(f"index is {self.index!r}; allowed: LandmarksConfig()")


CacheConfig = (
    FullConfig
    | ShadowKVConfig
    | SelectionConfig
    | QuestConfig
    | LokiConfig
    | InfiniGenConfig
    | OracleConfig
    | RandomConfig
    | SnapKVConfig
    | StreamingConfig
)


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    With ``temperature=0`` decoding is greedy. A request with a ``seed`` gives the same tokens whatever
    else is in the batch; the i-th of ``n`` samples uses ``seed + i``.
    """

    max_tokens: int = 256
    """The most tokens that are generated."""
    temperature: float = 0.0
    """Flattens the distribution that tokens are drawn from; 0 always takes the most likely one."""
    top_p: float = 1.0
    """Draw from the most likely tokens that have this much probability together."""
    top_k: int = 0
    """Draw from so many most likely tokens; 0 keeps every one."""
    min_p: float = 0.0
    """Draw from tokens at least this times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the answer."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer holds."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for every time that the answer holds it."""
    seed: int | None = None
    """Makes the draws repeatable."""
    n: int = 1
    """Samples, each an answer of its own; the prompt is computed once."""
    logprobs: int | None = None
    """Log-probabilities of the chosen token and of this many most likely ones; None gives none."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, besides the model's own end tokens."""
    include_stop_str_in_output: bool = False
    """Leave the stop text at the end of the answer."""
    ignore_eos: bool = False
    """Go on when the model ends its answer."""
    min_tokens: int = 0
    """End tokens are not chosen before this many tokens."""

    def __post_init__(self) -> None:
        stop: object = self.stop
        if isinstance(stop, str):
            object.__setattr__(self, "stop", (stop,))
        for name, kind, allowed in (("stop", str, "non-empty strings"), ("stop_token_ids", int, "token ids")):
            given: object = getattr(self, name)
            values = tuple(given) if isinstance(given, Iterable) else (None,)
            if not all(type(value) is kind and value != "" for value in values):
                raise ConfigError(f"{name} is {given!r}; give {allowed}")
            object.__setattr__(self, name, values)
        at_least("max_tokens", self.max_tokens, 1)
        at_least("n", self.n, 1)
        at_least("top_k", self.top_k, 0)
        at_least("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}")
        if self.logprobs is not None:
            at_least("logprobs", self.logprobs, 0)
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise ConfigError(f"seed is {self.seed!r}; give an integer or None")
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.0, 100.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}; allowed: {low} to {high}")
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise ConfigError(f"{name} is 0; it must be greater than 0")
