"""The flags of every command, frozen: they change on purpose only.

To accept a change, run this file as a program and read the difference: ``python -m tests.cli.test_flags``.
"""

from pathlib import Path

from typer.main import get_command

from shadowkv.cli.app import app

SNAPSHOT = Path(__file__).with_name("flags.txt")


def flags() -> str:
    """One block a command: its arguments, then its flags with what they take."""
    blocks = []
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
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


if __name__ == "__main__":
    SNAPSHOT.write_text(flags(), encoding="utf-8")
