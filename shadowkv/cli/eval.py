"""``shadowkv eval``: benchmarks under several methods, resumable, with intervals against full attention."""

import json as jsonlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from shadowkv.cli.loading import MODEL_HELP, USUAL_BATCH, LoadSettings, open_llm
from shadowkv.cli.methods import BUDGET_HELP, METHODS_HELP, budget_shares, compared_methods
from shadowkv.cli.options import settings_as_flags
from shadowkv.cli.parse import parse_tokens
from shadowkv.cli.terminal import Terminal, markdown_table, show_table
from shadowkv.config import CacheConfig, FullConfig
from shadowkv.errors import ConfigError


@dataclass(frozen=True)
class EvalSettings:
    """What is measured."""

    samples: int = 96
    """Samples of each task and length."""
    sample_seed: int = 42
    """Makes the samples."""
    haystack: str = "generated"
    """The text that needles are hidden in: a file, or generated."""
    squad: str | None = None
    """A file in SQuAD's layout, for qa_1."""
    hotpot: str | None = None
    """A file in HotpotQA's layout, for qa_2."""
    workers: int = 1
    """Processes that make samples ahead, while others are answered."""

    def __post_init__(self) -> None:
        for option, count in (("--samples", self.samples), ("--workers", self.workers)):
            if count < 1:
                raise ConfigError(f"{option} is {count}; it must be at least 1")


@settings_as_flags
def evaluate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    *,
    output: Annotated[str, typer.Option(help="Directory for answers and tables; a run there goes on.")],
    tasks: Annotated[str, typer.Option(help="Tasks or groups of them, with commas.")] = "niah_single_1",
    lengths: Annotated[str, typer.Option(help="Lengths of prompt and answer together, with commas.")] = "4k",
    compared: Annotated[str | None, typer.Option("--methods", help=METHODS_HELP)] = None,
    budget: Annotated[str | None, typer.Option(help=BUDGET_HELP)] = None,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Use the model's chat template.")] = True,
    reference_metrics: Annotated[
        bool, typer.Option("--reference-metrics", help="Score RULER as the ShadowKV reference code does.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="The tables as one JSON document.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no notes.")] = False,
    cache: CacheConfig,
    settings: EvalSettings,
    load: LoadSettings,
) -> None:
    """Score a model under several methods on the same samples.

    Prompts are in our own words (a task's name says what text it uses); scores and structure follow the
    benchmarks. Differences to full attention are shown where their 95 % interval leaves out 0.
    """
    wanted = [parse_tokens(text) for text in lengths.split(",")]
    shares = budget_shares(budget) if budget else None
    configs = {"full": FullConfig()} | compared_methods(compared, cache)  # the others are compared with it
    terminal = Terminal(quiet=quiet)

    from shadowkv.engine.placement import SMALLEST_CONTEXT_TOKENS, has_kernels
    from shadowkv.eval.harness import Answers, Harness, Method, budgeted
    from shadowkv.eval.making import SampleSource, produce
    from shadowkv.eval.provenance import Provenance
    from shadowkv.eval.report import tables
    from shadowkv.eval.suite import find_haystack, find_tasks
    from shadowkv.lineup import Lineup
    from shadowkv.models.locate import locate

    methods = [Method(name, config) for name, config in configs.items()]
    found = [task.name for task in find_tasks(tasks.split(","))]
    squad, hotpot = (None if path is None else Path(path) for path in (settings.squad, settings.hotpot))
    find_haystack(settings.haystack)
    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    answers = Answers(directory / "answers.jsonl")
    source = SampleSource(
        locate(model, load.adapter).path,
        settings.haystack,
        squad,
        hotpot,
        settings.sample_seed,
        chat,
        settings.samples,
    )
    # Only its weights are used: the methods' sequences get memory together, length by length.
    small = replace(load, max_batch=1, max_context_tokens=SMALLEST_CONTEXT_TOKENS)
    llm = open_llm(model, FullConfig(), small, Terminal(quiet=True) if quiet else terminal)
    rows = load.max_batch or (USUAL_BATCH if has_kernels(llm.decoder.device) else 1)
    made = Provenance.here(llm.decoder.device)
    dtype = str(llm.decoder.dtype).removeprefix("torch.")
    about = {"model": model, "dtype": dtype, "seed": settings.sample_seed, "measured": made.to_dict()}
    samples = produce(source, [(task, length) for length in wanted for task in found], settings.workers)
    with terminal.progress():
        for length in wanted:
            variants = budgeted(methods, shares, length)
            lineup = Lineup(
                llm,
                [method.config for method in variants],
                context_tokens=load.max_context_tokens or length,
                max_rows=rows,
            )
            harness = Harness(lineup, answers, about, reference_rules=reference_metrics)
            fitted = source.length(length)
            for task in found:
                terminal.report(f"making samples of {task} at {length}", 0, settings.samples)
                harness.run(next(samples), fitted.frame, length, variants, terminal.report)
            del harness, lineup  # its memory is the next one's
    _print(answers.rows, tables(answers.rows), directory, title=f"{model} in {dtype}; {made.line()}", json=json)


def _print(
    rows: list[dict[str, object]],
    made: dict[int, tuple[list[str], list[list[str]]]],
    directory: Path,
    *,
    title: str,
    json: bool,
) -> None:
    """To the terminal, and as Markdown beside the answers."""
    text = [f"{title}\n"]
    for length, (columns, lines) in made.items():
        text.append(f"{length:,} tokens\n\n{markdown_table(columns, lines)}\n")
    (directory / "tables.md").write_text("\n".join(text), encoding="utf-8")
    if json:
        typer.echo(jsonlib.dumps({"title": title, "answers": len(rows), "tables": made}, indent=1))
        return
    for length, (columns, lines) in made.items():
        show_table(f"{length:,} tokens; {title}", columns, lines)
