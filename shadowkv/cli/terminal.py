"""What a command says besides its results: notes and progress, on stderr, nothing when quiet."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn

Report = Callable[[str, int, int], None]
"""Progress of a stage: its name, done, total."""

_LINE_EVERY_SECONDS = 10.0


class Terminal:
    """The stderr side of a command: bars where a person watches, a few plain lines where a file does."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

    def note(self, text: str) -> None:
        """One line for the person who waits."""
        if not self.quiet:
            self._console.print(text)

    def warn(self, text: str) -> None:
        """One line that is said even when quiet."""
        self._console.print(f"warning: {text}")

    @contextlib.contextmanager
    def progress(self) -> Iterator[Report]:
        """Show the stages of a long call; give what is yielded as its ``progress``."""
        if self.quiet:
            yield _unseen
        elif self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            with Progress(
                *columns, TimeElapsedColumn(), TimeLeftColumn(), console=self._console, transient=True
            ) as bars:
                yield _Bars(bars).report
        else:
            yield _Lines(self.note).report


def show(renderable: RenderableType) -> None:
    """A table or text that is a command's result, on stdout; as wide as it needs when not a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(renderable)


def _unseen(stage: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


class _Bars:
    """One bar for each stage."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def report(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total, description=stage)


class _Lines:
    """A line when a stage has been going for a while and one when it ends."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._started: dict[str, float] = {}
        self._said: dict[str, float] = {}

    def report(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        started = self._started.setdefault(stage, now)
        if done >= total:
            self._note(f"{stage}: {total} of {total} in {now - started:.1f} s")
            del self._started[stage]
        elif now - self._said.get(stage, started) >= _LINE_EVERY_SECONDS:
            self._said[stage] = now
            self._note(f"{stage}: {done} of {total}")
