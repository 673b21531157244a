"""``shadowkv compare``: how far a method's logits are from full attention's, and what each setting does to them."""

import json as jsonlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from shadowkv.cli.loading import MODEL_HELP, read_text
from shadowkv.cli.methods import BUDGET_HELP, METHODS_HELP, budget_shares, compared_methods
from shadowkv.cli.options import settings_as_flags, swept
from shadowkv.cli.parse import format_bytes
from shadowkv.cli.terminal import Terminal, markdown_table, show_table
from shadowkv.config import CacheConfig, FullConfig
from shadowkv.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from shadowkv.eval.agreement import Agreement, Estimate
    from shadowkv.models.spec import ModelSpec

COLUMNS = (
    "method",
    "top-1 agreement",
    "KL, nats",
    "perplexity",
    "hit rate",
    "fetched a step",
    "device",
    "host",
    "energy kept",
)


@dataclass(frozen=True)
class CompareSettings:
    """What is compared, and on what."""

    prompt_tokens: int = 7936
    """Length of the prompt."""
    steps: int = 64
    """Tokens that are fed after it, one a step."""
    adapter: str | None = None
    """Directory of a LoRA adapter in peft's format, merged into the weights while they load."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto: the first GPU if there is one."""
    dtype: str = "auto"
    """float32, bfloat16, float16, or auto: the model's own."""

    def __post_init__(self) -> None:
        for option, count in (("--prompt-tokens", self.prompt_tokens), ("--steps", self.steps)):
            if count < 1:
                raise ConfigError(f"{option} is {count}; it must be at least 1")


@settings_as_flags
def compare(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    *,
    text: Annotated[str, typer.Option(help="A text longer than the prompt; - is standard input.")],
    passage: Annotated[str, typer.Option(help="natural: the text goes on; copy: it repeats an early part.")] = "both",
    compared: Annotated[str | None, typer.Option("--methods", help=METHODS_HELP)] = None,
    budget: Annotated[str | None, typer.Option(help=BUDGET_HELP)] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="SETTING=VALUE,...", help="Also with these values of one setting; repeatable."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Markdown tables, for documents.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no notes.")] = False,
    cache: CacheConfig,
    settings: CompareSettings,
) -> None:
    """Compare a method's logits with full attention's, step by step.

    A text's next tokens are fed to both, whatever either would have said.
    """
    if passage not in ("natural", "copy", "both"):
        raise ConfigError(f"--passage is {passage!r}; allowed: natural, copy, both")
    if json and markdown:
        raise ConfigError("--json and --markdown exclude each other; give one")
    listed = compared_methods(compared, cache) if compared else {"base": cache}
    shares = budget_shares(budget) if budget else None
    sweeps: list[tuple[str, CacheConfig]] = []
    for option in sweep or []:
        sweeps += swept(cache, option)
    whole_text = read_text(text)
    terminal = Terminal(quiet=quiet)

    from shadowkv.engine.placement import find_device, parse_dtype
    from shadowkv.engine.tokenizer import Tokenizer
    from shadowkv.eval import agreement
    from shadowkv.eval.harness import Method, budgeted
    from shadowkv.eval.provenance import Provenance
    from shadowkv.models.load import load_decoder, load_spec
    from shadowkv.models.locate import locate

    where, files = find_device(settings.device), locate(model, settings.adapter)
    made = Provenance.here(where)
    ids = Tokenizer.load(files.path).encode(whole_text)
    variants = budgeted([Method(*one) for one in listed.items()], shares, settings.prompt_tokens + settings.steps)
    methods = [(one.label, one.config) for one in variants if not isinstance(one.config, FullConfig)] + sweeps
    makers = {"natural": agreement.natural_passage, "copy": agreement.copy_passage}
    chosen = [make for name, make in makers.items() if passage in (name, "both")]
    passages = [make(ids, settings.prompt_tokens, settings.steps) for make in chosen]
    _check_length(settings, load_spec(files))
    with terminal.progress():
        decoder = load_decoder(
            files,
            device=where,
            dtype=parse_dtype(settings.dtype),
            progress=lambda done, total: terminal.report("loading weights", done, total),
        )
        results = [row for one in passages for row in agreement.compare(decoder, one, methods, terminal.report)]
    dtype = str(decoder.dtype).removeprefix("torch.")
    if json:
        rows = [row.to_dict() for row in results]
        base = cache.describe() if not isinstance(cache, FullConfig) else "full"
        whole = {"model": model, "dtype": dtype, "base": base, "text": text, "measured": made.to_dict(), "rows": rows}
        typer.echo(jsonlib.dumps(whole, indent=1))
        return
    for one in passages:
        rows_of = [row for row in results if row.passage == one.name]
        title = f"{one.name}: {model} in {dtype}, {len(one.prompt_ids):,} tokens, {settings.steps} steps; {made.line()}"
        _print(title, [_cells(row) for row in rows_of], markdown=markdown)


def _check_length(settings: CompareSettings, spec: "ModelSpec") -> None:
    if settings.prompt_tokens + settings.steps > spec.context_tokens:
        raise RequestError(
            f"{settings.prompt_tokens:,} tokens of prompt and {settings.steps:,} steps; "
            f"{spec.architecture} takes {spec.context_tokens:,} ({spec.context_limit})"
        )


def _cells(row: "Agreement") -> list[str]:
    return [
        row.label,
        _interval(row.top1, ".3f"),
        _interval(row.kl, ".4f"),
        f"{row.perplexity:.2f}",
        "" if row.hit_rate is None else f"{row.hit_rate:.3f}",
        format_bytes(row.fetched_bytes_per_step),
        format_bytes(row.device_bytes),
        format_bytes(row.host_bytes),
        "" if row.mean_energy is None else f"{row.mean_energy:.3f}",
    ]


def _interval(value: "Estimate", form: str) -> str:
    return f"{value.mean:{form}} ({value.low:{form}} to {value.high:{form}})"


def _print(title: str, rows: list[list[str]], *, markdown: bool) -> None:
    if markdown:
        typer.echo(f"{title}\n\n{markdown_table(COLUMNS, rows)}\n")
    else:
        show_table(title, COLUMNS, rows)
