"""Rows of a run as tables: methods down, tasks across, with intervals against full attention."""

from collections.abc import Sequence
from dataclasses import dataclass

from shadowkv.eval.harness import Row
from shadowkv.eval.scorers.interval import Interval, mean_interval, paired_interval

BASELINE = "full"
MEAN = "mean of the tasks"


@dataclass(frozen=True)
class Cell:
    """One method on one task: percent, and the paired difference to full attention where there is one."""

    samples: int
    score: Interval
    difference: Interval | None

    @property
    def differs(self) -> bool:
        """Whether the interval of the difference leaves out 0."""
        gap = self.difference
        return gap is not None and not gap.low <= 0 <= gap.high

    def text(self) -> str:
        """``98.0 (95 to 100)``; with ``-2.1 [-4, -1]`` where it differs from full attention for sure."""
        shown = f"{100 * self.score.mean:.1f} ({100 * self.score.low:.0f} to {100 * self.score.high:.0f})"
        if self.difference is None or not self.differs:
            return shown
        return f"{shown}, {_gap(self.difference)}"

    def short(self) -> str:
        """``98``; with the interval of the difference, ``61 [-45, -31]``, where it differs for sure."""
        shown = f"{100 * self.score.mean:.0f}"
        if self.difference is None or not self.differs:
            return shown
        return f"{shown} [{100 * self.difference.low:+.0f}, {100 * self.difference.high:+.0f}]"


def _gap(gap: Interval) -> str:
    return f"{100 * gap.mean:+.1f} [{100 * gap.low:+.0f}, {100 * gap.high:+.0f}]"


def tables(rows: Sequence[Row]) -> dict[int, tuple[list[str], list[list[str]]]]:
    """For every length, the columns and the rows of its table; turns of dialogues are columns of their own."""
    made: dict[int, tuple[list[str], list[list[str]]]] = {}
    for length in sorted({row["length"] for row in rows}):
        here = [row for row in rows if row["length"] == length]
        tasks = list(dict.fromkeys(column_name(row) for row in here))
        lines = []
        for method in dict.fromkeys(row["method"] for row in here):
            cells = [cell(here, task, method) for task in tasks]
            if len(tasks) > 1:
                whole = mean_cell(here, tasks, method)
                lines.append([method, "" if whole is None else whole.text(), *_shown(cells, short=True)])
            else:
                lines.append([method, *_shown(cells, short=False)])
        made[length] = (["method", *([MEAN] if len(tasks) > 1 else []), *tasks], lines)
    return made


def _shown(cells: Sequence[Cell | None], *, short: bool) -> list[str]:
    return ["" if one is None else one.short() if short else one.text() for one in cells]


def column_name(row: Row) -> str:
    """The task, and the turn where it is a dialogue."""
    return str(row["task"]) if row["turn"] is None else f"{row['task']}, turn {row['turn'] + 1}"


def cell(rows: Sequence[Row], task: str, method: str) -> Cell | None:
    """One cell, from rows of one length."""
    own, base = _scores(rows, task, method), _scores(rows, task, BASELINE)
    if not own:
        return None
    both = sorted(own.keys() & base.keys())
    difference = None
    if both and method != BASELINE:
        difference = paired_interval([own[i] for i in both], [base[i] for i in both])
    return Cell(len(own), mean_interval([own[i] for i in sorted(own)]), difference)


def mean_cell(rows: Sequence[Row], tasks: Sequence[str], method: str) -> Cell | None:
    """All tasks together, which weigh the same: over samples that every task has, the mean of the tasks' scores of the
    i-th sample is one observation. None where the method has not answered every task."""
    own = [_scores(rows, task, method) for task in tasks]
    base = [_scores(rows, task, BASELINE) for task in tasks]
    answered = _in_all(own)
    if not answered:
        return None
    both = sorted(set(answered) & set(_in_all(base)))
    difference = None
    if both and method != BASELINE:
        difference = paired_interval(_means(own, both), _means(base, both))
    return Cell(len(answered), mean_interval(_means(own, answered)), difference)


def _scores(rows: Sequence[Row], task: str, method: str) -> dict[int, float]:
    return {row["index"]: row["score"] for row in rows if column_name(row) == task and row["method"] == method}


def _in_all(scores: Sequence[dict[int, float]]) -> list[int]:
    return sorted(set.intersection(*(set(one) for one in scores)))


def _means(scores: Sequence[dict[int, float]], indices: Sequence[int]) -> list[float]:
    return [sum(one[i] for one in scores) / len(scores) for i in indices]
