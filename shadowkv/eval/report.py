"""Rows of a run as tables: tasks down, methods across, with intervals against full attention."""

from collections.abc import Sequence
from dataclasses import dataclass

from shadowkv.eval.harness import Row
from shadowkv.eval.scorers.interval import Interval, mean_interval, paired_interval

BASELINE = "full"


@dataclass(frozen=True)
class Cell:
    """One method on one task: percent, and the paired difference to full attention where there is one."""

    samples: int
    score: Interval
    difference: Interval | None

    def text(self) -> str:
        """``98.0 (95.1 to 100)``, with ``-2.1 [-4.0, -0.5]`` where it differs from full attention for sure."""
        shown = f"{100 * self.score.mean:.1f} ({100 * self.score.low:.0f} to {100 * self.score.high:.0f})"
        gap = self.difference
        if gap is None or gap.low <= 0 <= gap.high:
            return shown
        return f"{shown}, {100 * gap.mean:+.1f} [{100 * gap.low:+.0f}, {100 * gap.high:+.0f}]"


def tables(rows: Sequence[Row]) -> dict[int, tuple[list[str], list[list[str]]]]:
    """For every length, the columns and the rows of its table; turns of dialogues are rows of their own."""
    made: dict[int, tuple[list[str], list[list[str]]]] = {}
    for length in sorted({row["length"] for row in rows}):
        here = [row for row in rows if row["length"] == length]
        methods = list(dict.fromkeys(row["method"] for row in here))
        lines = []
        for task in dict.fromkeys(_name(row) for row in here):
            cells = [cell(here, task, method) for method in methods]
            lines.append([task, *("" if one is None else one.text() for one in cells)])
        made[length] = (["task", *methods], lines)
    return made


def _name(row: Row) -> str:
    return row["task"] if row["turn"] is None else f"{row['task']}, turn {row['turn']}"


def cell(rows: Sequence[Row], task: str, method: str) -> Cell | None:
    """One cell, from rows of one length."""
    own = {row["index"]: row["score"] for row in rows if _name(row) == task and row["method"] == method}
    if not own:
        return None
    base = {row["index"]: row["score"] for row in rows if _name(row) == task and row["method"] == BASELINE}
    both = sorted(own.keys() & base.keys())
    difference = None
    if both and method != BASELINE:
        difference = paired_interval([own[i] for i in both], [base[i] for i in both])
    return Cell(len(own), mean_interval([own[i] for i in sorted(own)]), difference)
