"""What a command says besides its results: notes and progress, on stderr, nothing when quiet."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn
from rich.table import Column, Table
from rich.text import Text

from shadowkv.cli.parse import format_seconds

Report = Callable[[str, int, int], None]
"""Progress of a stage: its name, done, total."""
Count = Callable[[int, str], None]
"""Progress of a known amount of work: how much is done, and a remark."""

_LINE_EVERY_SECONDS = 10.0
_WORTH_A_LINE_SECONDS = 1.0


class Terminal:
    """The stderr side of a command: bars where a person watches, a few plain lines where a file does."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
        self._shown: Report | None = None

    def note(self, text: str) -> None:
        """One line for the person who waits."""
        if not self.quiet:
            self._console.print(text)

    def warn(self, text: str) -> None:
        """One line that is said even when quiet."""
        self._console.print(f"warning: {text}")

    def report(self, stage: str, done: int, total: int) -> None:
        """What a model is given as its ``progress``: seen only inside :meth:`progress`.

        A stage of one piece says nothing while it lasts, and is left out.
        """
        if self._shown is not None and total > 1:
            self._shown(stage, done, total)

    @contextlib.contextmanager
    def progress(self) -> Iterator[None]:
        """Show what is reported meanwhile."""
        if self.quiet:
            yield
            return
        try:
            if self._console.is_terminal:
                with self._bars(TextColumn("{task.description}")) as bars:
                    self._shown = _Bars(bars).report
                    yield
            else:
                self._shown = _Lines(self.note).report
                yield
        finally:
            self._shown = None

    @contextlib.contextmanager
    def counter(self, name: str, total: int) -> Iterator[Count]:
        """Show how far one long piece of work is, with the time that it will still take."""
        if self.quiet:
            yield _unseen
        elif self._console.is_terminal:
            with self._bars(TextColumn("{task.description}"), TextColumn("{task.fields[remark]}")) as bars:
                task = bars.add_task(name, total=total, remark="")
                yield lambda done, remark: bars.update(task, completed=done, remark=remark)
        else:
            yield _Countdown(self.note, name, total).count

    def _bars(self, *columns: TextColumn) -> Progress:
        times = (TimeElapsedColumn(), TimeLeftColumn())
        return Progress(*columns, BarColumn(), MofNCompleteColumn(), *times, console=self._console, transient=True)


def show(renderable: RenderableType) -> None:
    """A table or text that is a command's result, on stdout; as wide as it needs when not a terminal."""
    console = _Stdout(highlight=False)
    if not console.is_terminal:
        console = _Stdout(highlight=False, width=160)
    console.print(renderable)


class _Stdout(Console):
    """Leaves a reader that has gone to whoever reports failures, where rich would exit itself."""

    def on_broken_pipe(self) -> None:
        # rich calls this while it handles the BrokenPipeError.
        raise


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table that is a command's result, on stdout."""
    # As Text, since rich takes brackets in a string for markup: vt[book] would lose what its text is.
    table = Table(*(Column(Text(name)) for name in columns), title=Text(title), title_justify="left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    show(table)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _unseen(done: int, remark: str) -> None:
    """Progress that nobody watches."""


class _Bars:
    """One bar for each stage."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def report(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)


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
            if now - started >= _WORTH_A_LINE_SECONDS:
                self._note(f"{stage}: {total:,} of {total:,} in {format_seconds(now - started)}")
            del self._started[stage]
            self._said.pop(stage, None)
        elif now - self._said.get(stage, started) >= _LINE_EVERY_SECONDS:
            self._said[stage] = now
            self._note(f"{stage}: {done:,} of {total:,}")


class _Countdown:
    """A line now and then, with the time left."""

    def __init__(self, note: Callable[[str], None], name: str, total: int) -> None:
        self._note = note
        self._name = name
        self._total = total
        self._first: int | None = None
        self._started = self._said = time.monotonic()

    def count(self, done: int, remark: str) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = done
        if now - self._said < _LINE_EVERY_SECONDS and done < self._total:
            return
        self._said = now
        fresh = done - self._first
        left = format_seconds((now - self._started) / fresh * (self._total - done)) if fresh else "unknown time"
        self._note(f"{self._name}: {done:,} of {self._total:,}, {remark}, {left} left")
