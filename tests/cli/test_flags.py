"""The flags of every command, frozen: they change on purpose only.

To accept a change, run this file as a program and read the difference: ``python -m tests.cli.test_flags``.
"""

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from shadowkv.cli.app import app
from tests.cli.conftest import Run

SNAPSHOT = Path(__file__).with_name("flags.txt")


def commands(group: Any, *path: str) -> dict[str, Any]:
    """Every command by its words, those of groups too."""
    found = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= commands(command, *path, name)
        else:
            found[" ".join((*path, name))] = command
    return found


COMMANDS = commands(get_command(app))


def flags() -> str:
    """One block a command: its arguments, then its flags with what they take."""
    blocks = []
    for name, command in COMMANDS.items():
        lines = [name]
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                lines.append(f"  {parameter.name.upper()}{'' if parameter.required else ' (optional)'}")
                continue
            words = [*parameter.opts, *parameter.secondary_opts, parameter.metavar or ""]
            lines.append("  " + " ".join(word for word in words if word))
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def test_flags_are_those_of_the_snapshot() -> None:
    assert flags() == SNAPSHOT.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_on_a_narrow_terminal_cuts_no_flag(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(*name.split(), "--help").stdout
    assert "…" not in shown
    for parameter in COMMANDS[name].params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            assert option in shown


def test_the_list_of_commands_is_not_cut(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for group in ((), ("bench",)):
        assert "..." not in run(*group, "--help").stdout.partition("Commands:")[2]


def test_wrong_usage_is_one_line_of_plain_text(run: Run) -> None:
    last = run("batch", "model", "requests").stderr.splitlines()[-1]
    assert last == "Error: Missing option '--output' / '-o'."


if __name__ == "__main__":
    SNAPSHOT.write_text(flags(), encoding="utf-8")
