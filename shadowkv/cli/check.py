"""``shadowkv check``: every kernel against float64, on the user's own device."""

import json as jsonlib
from typing import Annotated

import typer

from shadowkv.cli.failures import FAILED
from shadowkv.cli.options import settings_as_flags
from shadowkv.cli.terminal import Terminal, show_table


@settings_as_flags
def check(
    *,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto: the first GPU if there is one.")] = "auto",
    ops: Annotated[str | None, typer.Option(help="Operations, with commas. Default: all.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no notes.")] = False,
) -> None:
    """Check every kernel against plain PyTorch on this machine.

    Each element of an output may miss float64 by what the kernel's own arithmetic can lose at most, in whatever order
    it sums. Ends with an error if a kernel does not keep to that. What plain PyTorch loses here is shown beside it. On
    a CPU kernels are interpreted, which TRITON_INTERPRET=1 asks for.
    """
    terminal = Terminal(quiet=quiet)

    from shadowkv.bench import checks
    from shadowkv.engine.placement import find_device
    from shadowkv.eval.provenance import Provenance
    from shadowkv.ops.contract.all import OPS

    where = find_device(device)
    checks.require_kernels(where)
    chosen = checks.choose_ops(OPS, ops)
    made = Provenance.here(where)
    with terminal.progress():
        results = checks.check_ops(chosen, where, terminal.report)
    how = "interpreted" if checks.interpreted() else "compiled"
    failed = [result for result in results if not result.right]
    if json:
        rows = [result.to_dict() for result in results]
        typer.echo(jsonlib.dumps({"kernels": how, "measured": made.to_dict(), "rows": rows}, indent=1))
    else:
        show_table(f"kernels, {how}; {made.line()}", checks.COLUMNS, [checks.cells(result) for result in results])
    for result in failed:
        for failure in result.failures:
            typer.echo(f"error: {result.op} in {result.dtype}: {failure}", err=True)
    if failed:
        raise typer.Exit(FAILED)
