"""How a command ends when something goes wrong: one line on stderr and an exit code, never a traceback."""

import contextlib
import os
import sys
from collections.abc import Iterator

import typer

from shadowkv.errors import ConfigError, RequestError, ShadowKVError, UnsupportedModelError

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130
BROKEN_PIPE = 141


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turn what a user can cause into ``error: ...`` and an exit code.

    2 for what was given (settings, requests, models that are not supported), 1 for what happened
    (memory, damaged files, unreadable files), 130 for Ctrl-C, 141 where the reader of stdout has gone.
    """
    try:
        yield
    except ShadowKVError as error:
        _say(f"error: {' '.join(str(error).split())}")
        bad_input = isinstance(error, ConfigError | RequestError | UnsupportedModelError)
        raise typer.Exit(BAD_INPUT if bad_input else FAILED) from None
    except KeyboardInterrupt:
        _say("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # Python flushes stdout once more at exit; give it somewhere to flush to.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _say(f"error: {where}{error.strerror or error}")
        raise typer.Exit(FAILED) from None


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        typer.echo(line, err=True)
