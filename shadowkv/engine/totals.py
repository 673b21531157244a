"""What an engine has done since it was made, added up as requests end. Knows no tensor."""

from collections import Counter
from dataclasses import asdict, dataclass, field

from shadowkv.engine.request import Json, RequestOutput


@dataclass
class Totals:
    """Sums over all requests that have ended; ``finished`` counts samples by their finish reason.

    ``hits``, ``misses`` and ``fetched_bytes`` are those of :class:`shadowkv.cache.base.CacheStats`.
    """

    requests: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    prefill_s: float = 0.0
    hits: int = 0
    misses: int = 0
    fetched_chunks: int = 0
    fetched_bytes: int = 0

    @property
    def selected_chunks(self) -> int:
        return self.hits + self.misses

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.selected_chunks if self.selected_chunks else None

    def add(self, output: RequestOutput) -> None:
        """Count a request that has ended."""
        self.requests += 1
        self.prompt_tokens += output.timing.prompt_tokens
        self.reused_tokens += output.timing.reused_tokens
        self.generated_tokens += output.timing.generated_tokens
        self.prefill_s += output.timing.prefill_s
        for completion in output.completions:
            self.finished[completion.finish_reason.value] += 1
            if completion.stats is not None:
                self.hits += completion.stats.hits
                self.misses += completion.stats.misses
                self.fetched_chunks += completion.stats.fetched_chunks
                self.fetched_bytes += completion.stats.fetched_bytes

    def to_dict(self) -> dict[str, Json]:
        """For JSON."""
        return {**asdict(self), "selected_chunks": self.selected_chunks, "hit_rate": self.hit_rate}
