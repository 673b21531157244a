"""The ``shadowkv`` command: one subcommand per file in this folder. Imports no torch until one needs it."""

import os

import typer

from shadowkv.cli.batch import batch
from shadowkv.cli.bench import bench
from shadowkv.cli.check import check
from shadowkv.cli.compare import compare
from shadowkv.cli.demo import demo
from shadowkv.cli.diagnose import diagnose
from shadowkv.cli.eval import evaluate
from shadowkv.cli.generate import generate
from shadowkv.cli.plan import plan

app = typer.Typer(
    name="shadowkv",
    help="Long-context generation with low-rank keys on the device and values in host memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long flags on a terminal of 80 columns
)
for name, command in {
    "generate": generate,
    "batch": batch,
    "plan": plan,
    "compare": compare,
    "diagnose": diagnose,
    "eval": evaluate,
    "demo": demo,
    "check": check,
}.items():
    app.command(name)(command)
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of the console script."""
    # OpenMP's threads wait for each other by spinning. Where other programs use the cores too, they spin for
    # whoever is not running: 1 token/s instead of 14 with two threads on two busy cores (SmolLM2-135M, 2K).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # transformers remarks on configs that are read here as they are meant.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    app()
