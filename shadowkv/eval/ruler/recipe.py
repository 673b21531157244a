"""What a RULER task is made of, and how its samples are put together at one length."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shadowkv.errors import ConfigError
from shadowkv.eval.fitting import Build
from shadowkv.eval.haystack import Haystack

SEED = 42
SAMPLES = 500
"""RULER's defaults."""

SHORT_TOKENS = 4096
"""Below it RULER takes smaller steps and lists."""


@dataclass(frozen=True)
class Materials:
    """What the user brings.

    Args:
        haystack: text of the tasks that hide needles in essays.
        squad: a file in SQuAD's layout, for qa_1.
        hotpot: a file in HotpotQA's layout, for qa_2.
        vocabulary: words for the list of cwe; our own where there are none.
        vocabulary_name: what the result's name says of them.
    """

    haystack: Haystack | None = None
    squad: Path | None = None
    hotpot: Path | None = None
    vocabulary: Sequence[str] | None = None
    vocabulary_name: str = "file"
    seed: int = SEED

    def text(self, task: str) -> Haystack:
        """The haystack.

        Raises:
            ConfigError: there is none.
        """
        if self.haystack is None:
            raise ConfigError(f"{task} hides its needles in a text; give a haystack: a file, or 'generated'")
        return self.haystack


@dataclass(frozen=True)
class Recipe:
    """One task at one length.

    Args:
        step: the smallest size, and what a sample that is too long loses at a time.
        most: sizes above it do not exist.
    """

    build: Build
    step: int
    most: int | None = None
