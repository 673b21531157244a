"""Makes the samples of a run, beforehand and in other processes where there are processors for it."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from shadowkv.eval.ruler.recipe import Materials
from shadowkv.eval.sample import Length, Sample
from shadowkv.eval.suite import find_haystack, find_tasks

if TYPE_CHECKING:
    from shadowkv.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class SampleSource:
    """Everything that samples follow from.

    Args:
        tokenizer_path: a model directory or a GGUF file.
        haystack: ``generated``, or a file.
        squad, hotpot: files for qa_1 and qa_2.
        chat: samples are put into the model's chat template.
        samples: of each task and length.
    """

    tokenizer_path: Path
    haystack: str
    squad: Path | None
    hotpot: Path | None
    seed: int
    chat: bool
    samples: int

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """Loaded when it is first asked for."""
        from shadowkv.engine.tokenizer import Tokenizer

        return Tokenizer.load(self.tokenizer_path)

    @cached_property
    def materials(self) -> Materials:
        """What the user brings."""
        return Materials(find_haystack(self.haystack), self.squad, self.hotpot, seed=self.seed)

    def length(self, tokens: int) -> Length:
        """For prompts and answers of so many tokens."""
        return Length.of(self.tokenizer, tokens, chat=self.chat)

    def make(self, task: str, tokens: int) -> list[Sample]:
        """All samples of a task at a length."""
        (found,) = find_tasks([task])
        return list(found.make(self.length(tokens), self.materials, self.samples))


def produce(source: SampleSource, wanted: Sequence[tuple[str, int]], workers: int) -> Iterator[list[Sample]]:
    """The samples of every task and length, in this order.

    Args:
        workers: processes that make them ahead; with one, they are made here when their turn comes.
    """
    if workers == 1:
        yield from (source.make(task, tokens) for task, tokens in wanted)
        return
    plain = replace(source)  # with nothing loaded
    # Threads and a device that this process may have do not survive a fork.
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin, (plain,)) as pool:
        yield from pool.map(_make, *zip(*wanted, strict=True)) if wanted else ()


_source: SampleSource


def _begin(source: SampleSource) -> None:
    global _source
    _source = source


def _make(task: str, tokens: int) -> list[Sample]:
    return _source.make(task, tokens)
