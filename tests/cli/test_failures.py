"""How commands end: one line on stderr, an exit code, no traceback."""

import subprocess
import sys

import pytest
import typer

from shadowkv.cli.failures import reported
from shadowkv.errors import CapacityError, CheckpointError, ConfigError, RequestError, UnsupportedModelError


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("rank is\n 0"), 2, "error: rank is 0\n"),
        (RequestError("too long"), 2, "error: too long\n"),
        (UnsupportedModelError("mamba"), 2, "error: mamba\n"),
        (CapacityError("needs 2, has 1"), 1, "error: needs 2, has 1\n"),
        (CheckpointError("lm_head missing"), 1, "error: lm_head missing\n"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), 1, "error: a.txt: No such file or directory\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors(error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as raised, reported():
        raise error
    assert raised.value.exit_code == code
    assert capsys.readouterr() == ("", line)


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), reported():
        raise ZeroDivisionError


@pytest.mark.parametrize("way", ["typer.echo", "show"])
def test_reader_of_stdout_gone(way: str) -> None:
    program = (
        "import typer, sys\n"
        "from shadowkv.cli.failures import reported\n"
        "from shadowkv.cli.terminal import show\n"
        "try:\n"
        "    with reported():\n"
        f"        for _ in range(100000): {way}('x' * 100)\n"
        "except typer.Exit as end:\n"
        "    sys.exit(end.exit_code)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait() == 141
