"""What a diagnosis looks at, and for which memory it recommends. Knows no tensor."""

from dataclasses import dataclass, field

from shadowkv.errors import ConfigError

FEWEST_PROMPT_TOKENS = 512
"""Shorter prompts have too few chunks for shares of them to mean anything."""
BUDGET_SHARES = (0.005, 0.01, 0.0156, 0.03125, 0.0625, 0.125, 0.25, 0.5)
"""Budgets, as shares of the prompt, that attention mass is measured at. The paper's is 1.56 % (arXiv 2410.21465)."""
RESIDENT_MULTIPLES = (1, 2, 4)
"""Resident sets that hit rates are given for, in budgets."""
USUAL_KEEP = 0.25
PAPER_OUTLIERS = 48
CHUNKS_PER_OUTLIER = 100


@dataclass(frozen=True)
class DiagnoseSettings:
    """What is measured. Shares are between 0 and 1."""

    prompt_tokens: int = 7936
    """Length of the prompt."""
    steps: int = 64
    """Tokens of the text that are decoded after it, one a step."""
    query_tokens: int = 64
    """Last positions of the prompt whose attention is looked at."""
    chunk_tokens: int = 8
    """Tokens of a chunk in the figures; the recommendation tries other sizes as well."""
    outlier_chunks: int | None = None
    """Outlier chunks per KV head in the figures; by default the paper's 48, or one of 100 chunks if that is less."""
    rank: int | None = None
    """Directions of the subspaces that are compared; by default ShadowKV's own for the model."""
    budget_share: float = field(default=1 / 32, metadata={"option": "--budget"})
    """Share of the prompt that a step selects in the figures, as 3.1%."""
    keep_share: float | None = field(default=None, metadata={"option": "--keep"})
    """Device memory to recommend settings for, as a share of full attention's, such as 15%; by default 25%."""
    device_bytes_per_token: int | None = field(default=None, metadata={"option": "--device-bytes-per-token"})
    """The same in bytes for each token of prompt and answer."""

    def __post_init__(self) -> None:
        least = {
            "--prompt-tokens": (self.prompt_tokens, FEWEST_PROMPT_TOKENS),
            "--steps": (self.steps, 2),
            "--query-tokens": (self.query_tokens, 1),
            "--chunk-tokens": (self.chunk_tokens, 1),
            "--outlier-chunks": (self.outlier_chunks, 1),
            "--rank": (self.rank, 1),
            "--device-bytes-per-token": (self.device_bytes_per_token, 1),
        }
        for option, (value, lowest) in least.items():
            if value is not None and value < lowest:
                raise ConfigError(f"{option} is {value}; it must be at least {lowest}")
        for option, tokens, parts in (
            ("--query-tokens", self.query_tokens, 8),
            ("--chunk-tokens", self.chunk_tokens, 16),
        ):
            if tokens > self.prompt_tokens // parts:
                raise ConfigError(f"{option} is {tokens}; it must be at most --prompt-tokens / {parts}")
        if self.outliers > self.prompt_tokens // self.chunk_tokens // 8:
            raise ConfigError(
                f"--outlier-chunks is {self.outliers}; it must be at most an eighth of the prompt's "
                f"{self.prompt_tokens // self.chunk_tokens} chunks"
            )
        for option, share in (("--budget", self.budget_share), ("--keep", self.keep_share)):
            if share is not None and not 0 < share <= 1:
                raise ConfigError(f"{option} is {share:g}; give a share above 0 and up to 1, such as 15%")
        if self.keep_share is not None and self.device_bytes_per_token is not None:
            raise ConfigError("--keep and --device-bytes-per-token exclude each other; give one")

    @property
    def outliers(self) -> int:
        """Outlier chunks per KV head."""
        if self.outlier_chunks is not None:
            return self.outlier_chunks
        return max(1, min(PAPER_OUTLIERS, self.prompt_tokens // self.chunk_tokens // CHUNKS_PER_OUTLIER))

    @property
    def capacity_tokens(self) -> int:
        """Prompt and answer: what memory is reserved for."""
        return self.prompt_tokens + self.steps

    @property
    def budget_tokens(self) -> int:
        """Tokens that a step selects, in whole chunks."""
        return budget_chunks(self.budget_share, self.prompt_tokens, self.chunk_tokens) * self.chunk_tokens


def budget_chunks(share: float, tokens: int, chunk_tokens: int) -> int:
    """A share of so many tokens in chunks, rounded up."""
    return max(1, -(-round(share * tokens) // chunk_tokens))
