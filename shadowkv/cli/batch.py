"""``shadowkv batch``: OpenAI's batch files in and out."""

import os
from pathlib import Path
from typing import Annotated

import typer

from shadowkv.cli.failures import INTERRUPTED
from shadowkv.cli.loading import MODEL_HELP, USUAL_BATCH, LoadSettings, open_llm
from shadowkv.cli.options import settings_as_flags
from shadowkv.cli.terminal import Terminal
from shadowkv.config import CacheConfig
from shadowkv.errors import ConfigError, RequestError


@settings_as_flags
def batch(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    requests: Annotated[Path, typer.Argument(help="File with one request a line, in OpenAI's batch format.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="File for one result a line, as they finish.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew; by default finished lines stay.")] = False,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Do lines again that ended in errors.")] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="For lines that name no limit; by default 16 for completions, 256 for chat."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no notes.")] = False,
    cache: CacheConfig,
    load: LoadSettings,
) -> None:
    """Answer every line of a file; stops and goes on where it was.

    Results come in the order in which they finish. Run the same command again after an interruption:
    lines that are in the output are not done twice.
    """
    from shadowkv.cli.batch_files import open_results, read_envelopes, survey
    from shadowkv.cli.batch_run import BatchRun

    if not requests.is_file():
        raise ConfigError(f"{requests} is not a file")
    if output.exists() and os.path.samefile(requests, output):
        raise ConfigError(f"--output is the input, {requests}; name another file")
    if overwrite and retry_errors:
        raise ConfigError("--overwrite does everything anew; leave out --retry-errors")
    if next(read_envelopes(requests, max_tokens), None) is None:
        raise RequestError(f"{requests} holds no requests")
    terminal = Terminal(quiet=quiet)
    results = open_results(output, overwrite=overwrite, retry_errors=retry_errors)
    try:
        work = survey(requests, results.known)
        if work.gone:
            some = ", ".join(work.gone[:3])
            terminal.warn(f"{len(work.gone)} finished custom_ids are not in {requests} any more, among them {some}")
        if results.known:
            rest = "" if work.left else "; nothing is left to do"
            terminal.note(f"{output}: {len(results.known)} lines are there already{rest}")
        if not work.left:
            return
        llm = open_llm(model, cache, load, terminal)
        run = BatchRun(
            llm, model, results, look_ahead=2 * (load.max_batch or USUAL_BATCH), default_max_tokens=max_tokens
        )
        with terminal.counter("requests", work.lines) as count:
            run.work(requests, count)
    except KeyboardInterrupt:
        terminal.note(f"interrupted; run the same command again to go on from {output}")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        results.close()
    for line in run.summary():
        terminal.note(line)
