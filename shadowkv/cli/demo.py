"""``shadowkv demo``: the same questions about the same long text, under full attention and ShadowKV."""

import json as jsonlib
from typing import TYPE_CHECKING, Annotated

import typer

from shadowkv.cli.failures import FAILED
from shadowkv.cli.loading import MODEL_HELP, LoadSettings, open_llm
from shadowkv.cli.options import settings_as_flags
from shadowkv.cli.parse import format_bytes, parse_tokens
from shadowkv.cli.terminal import Terminal, show
from shadowkv.config import FullConfig, ShadowKVConfig
from shadowkv.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from shadowkv.eval.demo import MethodResult

DEMO_RANK = 64
BUDGET_SHARE = 8
SPARE_TOKENS = 1024
"""For the chat template, the end of the last paragraph, the facts, a question and its answer."""


@settings_as_flags
def demo(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = "smollm2-32k",
    *,
    tokens: Annotated[str, typer.Option(metavar="TOKENS", help="Length of the text, at least.")] = "8192",
    json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no notes.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: the first GPU if there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto.")] = "auto",
) -> None:
    """Ask for facts in a long text, under full attention and ShadowKV.

    They are hidden in the Python language reference. Ends with an error if ShadowKV misses an answer that
    full attention finds.
    """
    length = parse_tokens(tokens)
    if length < 1:
        raise ConfigError(f"--tokens is {length}; it must be at least 1")
    cache = ShadowKVConfig(rank=DEMO_RANK, budget_tokens=-(-length // BUDGET_SHARE))
    # Room for the text, kept once, and for one question at a time on a copy of it.
    load = LoadSettings(device=device, dtype=dtype, max_batch=2, max_context_tokens=length + SPARE_TOKENS)
    terminal = Terminal(quiet=quiet)
    llm = open_llm(model, FullConfig(), load, terminal)

    from shadowkv.eval.demo import agreement, lost, prepare, run_method

    split = prepare(llm.tokenizer, length)
    terminal.note(f"text: {len(split.head_ids):,} tokens of the Python language reference")
    with terminal.progress():
        full = run_method(llm, "full attention", split, terminal.report)
        shadow = run_method(llm.with_cache(cache), "ShadowKV", split, terminal.report)
    share, missed = agreement(full, shadow), lost(full, shadow)
    if json:
        whole = {"model": model, "settings": cache.describe(), "agreement": share, "missed": missed}
        results = [result.to_dict() for result in (full, shadow)]
        typer.echo(jsonlib.dumps({**whole, "results": results}, ensure_ascii=False, indent=1))
    else:
        show(_answers(full, shadow))
        show(_figures(full, shadow, share))
    if missed:
        typer.echo(f"error: ShadowKV missed what full attention found: {'; '.join(missed)}", err=True)
        raise typer.Exit(FAILED)


def _answers(full: "MethodResult", shadow: "MethodResult") -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table("question", full.method, shadow.method, show_lines=True)
    for left, right in zip(full.answers, shadow.answers, strict=True):
        cells = (f"{'right' if one.right else 'wrong'}: {one.text.strip()}" for one in (left, right))
        table.add_row(*(Text(cell) for cell in (left.question, *cells)))
    return table


def _figures(full: "MethodResult", shadow: "MethodResult", share: float) -> "Table":
    from rich.table import Table

    table = Table("", full.method, shadow.method)
    both = (full, shadow)
    table.add_row("right answers", *(f"{sum(a.right for a in one.answers)} of {len(one.answers)}" for one in both))
    table.add_row("prefill", *(f"{one.prefill_tokens_per_second:,.0f} tokens/s" for one in both))
    table.add_row("decode", *(f"{one.decode_tokens_per_second or 0:.1f} tokens/s" for one in both))
    table.add_row("cache on the device", *(format_bytes(one.device_bytes) for one in both))
    table.add_row("cache on the host", *(format_bytes(one.host_bytes) for one in both))
    table.add_row("hit rate", *("" if one.hit_rate is None else f"{one.hit_rate:.1%}" for one in both))
    table.add_row("answer tokens as full attention", "", f"{share:.1%}")
    return table
