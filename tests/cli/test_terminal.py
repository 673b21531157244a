"""Progress where nobody watches (a line when something lasts, and nothing else), and tables as they are."""

import pytest

from shadowkv.cli import terminal
from shadowkv.cli.terminal import Terminal, show_table


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(terminal, "time", made)
    return made


def test_stages(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Terminal(quiet=False)
    shown.report("unseen", 1, 2)
    with shown.progress():
        for repeat in range(2):
            for done, seconds in ((0, 0), (1, 5), (2, 6), (3, 4)):
                clock.now += seconds
                shown.report("prefill", done, 3)
            clock.now += 100 * (1 - repeat)
        shown.report("quick", 0, 2)
        shown.report("quick", 2, 2)
        shown.report("one piece", 0, 1)
    assert capsys.readouterr().err == "prefill: 2 of 3\nprefill: 3 of 3 in 15.0 s\n" * 2


def test_large_numbers_can_be_read(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Terminal(quiet=False)
    with shown.progress():
        for done in (0, 538_060_032):
            shown.report("loading weights", done, 538_060_032)
            clock.now += 2
    assert capsys.readouterr().err == "loading weights: 538,060,032 of 538,060,032 in 2.0 s\n"


def test_counter(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Terminal(quiet=False).counter("requests", 10) as count:
        count(4, "0 tokens/s")
        clock.now = 20.0
        count(6, "7 tokens/s")
        clock.now = 25.0
        count(7, "7 tokens/s")
        count(10, "8 tokens/s")
    assert capsys.readouterr().err == (
        "requests: 6 of 10, 7 tokens/s, 40.0 s left\nrequests: 10 of 10, 8 tokens/s, 0.0 s left\n"
    )


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    silent = Terminal(quiet=True)
    with silent.progress(), silent.counter("requests", 2) as count:
        silent.note("note")
        silent.report("prefill", 1, 2)
        count(1, "")
    assert capsys.readouterr().err == ""
    silent.warn("told all the same")
    assert capsys.readouterr().err == "warning: told all the same\n"


def test_a_table_keeps_what_stands_in_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    show_table("title [a]", ["task", "full [b]"], [["vt[book]", "50.0 [1, 2]"]])
    shown = capsys.readouterr().out
    for text in ("title [a]", "full [b]", "vt[book]", "50.0 [1, 2]"):
        assert text in shown
