"""The settings of the methods that ShadowKV is compared with, and what all settings share.

Frozen dataclasses, checked when they are made. Re-exported by ``config``.
"""

from dataclasses import dataclass, fields
from typing import Literal

from shadowkv.errors import ConfigError


def at_least(name: str, value: int, low: int) -> None:
    """Refuse a setting that is no integer of at least ``low``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {low}")


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a setting that is none of the allowed words."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")


@dataclass(frozen=True)
class MethodSettings:
    """What the settings of every cache method can do."""

    def describe(self) -> str:
        """One line: every setting that differs from its default."""
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__.removesuffix('Config').lower()}({', '.join(changed)})"


@dataclass(frozen=True)
class SelectiveConfig(MethodSettings):
    """What methods share that keep every key and value exactly and attend to a selection of them.

    Token settings are rounded up to whole units, which are what is selected. The sinks, the tokens just
    before the present ones and the incomplete unit are attended besides the budget, as ShadowKV's exact
    chunks are.
    """

    budget_tokens: int = 2048
    """Tokens selected per KV head and step."""
    sink_tokens: int = 8
    """Tokens at the start of the sequence that are always attended."""
    recent_tokens: int = 32
    """Tokens just before the present ones that are always attended."""
    dense_layers: int = 0
    """So many layers, from the first on, attend to every token."""
    value_store: Literal["host", "device"] = "device"
    """Where the values of the context live."""
    query_block_tokens: int = 32
    """At most so many appended tokens (a second question, a second turn) share one selection."""

    def __post_init__(self) -> None:
        for name in ("budget_tokens", "query_block_tokens"):
            at_least(name, getattr(self, name), 1)
        for name in ("sink_tokens", "recent_tokens", "dense_layers"):
            at_least(name, getattr(self, name), 0)
        one_of("value_store", self.value_store, ("host", "device"))

    @property
    def unit_tokens(self) -> int:
        """Neighbouring tokens that are selected together."""
        return 1

    @property
    def budget_units(self) -> int:
        return -(-self.budget_tokens // self.unit_tokens)

    @property
    def sink_units(self) -> int:
        return -(-self.sink_tokens // self.unit_tokens)


@dataclass(frozen=True)
class ChunkedConfig(SelectiveConfig):
    """A selection by ShadowKV's chunks."""

    chunk_tokens: int = 8
    """Neighbouring tokens that are selected together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("chunk_tokens", self.chunk_tokens, 1)

    @property
    def unit_tokens(self) -> int:
        return self.chunk_tokens


@dataclass(frozen=True)
class OracleConfig(ChunkedConfig):
    """The ceiling of a budget: chunks are ranked by the attention that they really get."""


@dataclass(frozen=True)
class RandomConfig(ChunkedConfig):
    """The floor of a budget: chunks are drawn at random, anew in every step and layer."""

    selection_seed: int = 0
    """The draws follow from it, the layer and the length of the sequence, whatever else is in the batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("selection_seed", self.selection_seed, 0)


@dataclass(frozen=True)
class QuestConfig(SelectiveConfig):
    """Pages ranked by an upper bound from their smallest and largest keys (arXiv 2406.10774).

    As there, the first two layers are dense.
    """

    dense_layers: int = 2
    """So many layers, from the first on, attend to every token."""
    page_tokens: int = 16
    """Neighbouring tokens that are selected together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("page_tokens", self.page_tokens, 1)

    @property
    def unit_tokens(self) -> int:
        return self.page_tokens


@dataclass(frozen=True)
class LokiConfig(SelectiveConfig):
    """Tokens ranked by the first principal directions of the post-RoPE keys (arXiv 2406.02542)."""

    score_dims: int | None = None
    """Principal directions per KV head that tokens are ranked by. None takes the paper's quarter of the
    head width. Clipped to it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score_dims is not None:
            at_least("score_dims", self.score_dims, 1)


@dataclass(frozen=True)
class InfiniGenConfig(SelectiveConfig):
    """Tokens ranked a layer ahead, by a part of the query and key coordinates (arXiv 2406.19707).

    The first layer has none before it and is dense.
    """

    dense_layers: int = 1
    """So many layers, from the first on, attend to every token; at least the first."""
    partial_ratio: float = 0.3
    """Share of the head width that tokens are ranked by."""
    skew_queries: int = 64
    """So many last queries of the prompt say into which coordinates queries and keys are turned."""
    alpha: float | None = None
    """The budget is a bound: of tokens, as many as score, on average over KV heads, within this of the head's best.
    None takes the whole budget."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("dense_layers", self.dense_layers, 1)
        at_least("skew_queries", self.skew_queries, 1)
        if not 0 < self.partial_ratio <= 1:
            raise ConfigError(f"partial_ratio is {self.partial_ratio!r}; allowed: above 0, up to 1")
        if self.alpha is not None and not 0 < self.alpha < float("inf"):
            raise ConfigError(f"alpha is {self.alpha!r}; allowed: a number above 0, or None for the whole budget")


@dataclass(frozen=True)
class StreamingConfig(MethodSettings):
    """StreamingLLM: the first tokens and the latest ones, all else is dropped (arXiv 2309.17453)."""

    budget_tokens: int = 2048
    """Tokens attended: the sinks and the latest ones."""
    sink_tokens: int = 4
    """Tokens at the start of the sequence that are always attended."""
    query_block_tokens: int = 32
    """At most so many appended tokens are computed at a time; the window keeps room for them."""

    def __post_init__(self) -> None:
        at_least("sink_tokens", self.sink_tokens, 0)
        at_least("budget_tokens", self.budget_tokens, self.sink_tokens + 1)
        at_least("query_block_tokens", self.query_block_tokens, 1)


@dataclass(frozen=True)
class SnapKVConfig(MethodSettings):
    """The prompt's tokens that its last queries attend to most; all others are dropped (arXiv 2404.14469)."""

    budget_tokens: int = 2048
    """Tokens of the prompt kept per KV head, the observation window among them."""
    window_tokens: int = 32
    """The observation window: so many last queries of the prompt choose, and their tokens are kept."""
    pool_tokens: int = 7
    """Width of the maximum that is taken over neighbouring tokens' weights; odd, 1 takes none."""
    generated_tokens: int = 2048
    """Room for tokens after the prompt, which are all kept: answers and later turns."""

    def __post_init__(self) -> None:
        at_least("window_tokens", self.window_tokens, 1)
        at_least("budget_tokens", self.budget_tokens, self.window_tokens)
        at_least("pool_tokens", self.pool_tokens, 1)
        at_least("generated_tokens", self.generated_tokens, 1)
        if self.pool_tokens % 2 == 0:
            raise ConfigError(f"pool_tokens is {self.pool_tokens}; it must be odd")
