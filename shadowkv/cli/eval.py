"""``shadowkv eval``: benchmarks under several methods, resumable, with intervals against full attention."""

import json as jsonlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from shadowkv.cli.loading import MODEL_HELP, LoadSettings, open_llm
from shadowkv.cli.options import methods as known_methods
from shadowkv.cli.options import settings_as_flags
from shadowkv.cli.parse import parse_number, parse_tokens
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


@settings_as_flags
def evaluate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    *,
    output: Annotated[str, typer.Option(help="Directory for answers and tables; a run there goes on.")],
    tasks: Annotated[str, typer.Option(help="Tasks or groups of them, with commas.")] = "niah_single_1",
    lengths: Annotated[str, typer.Option(help="Lengths of prompt and answer together, with commas.")] = "4k",
    compared: Annotated[
        str | None, typer.Option("--methods", help="Methods, with commas. Default: full and the one of --method.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Budgets as shares of the length, as 1.56%,3.1%. Default: --budget-tokens.")
    ] = None,
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
    shares = [_share(text) for text in budget.split(",")] if budget else [None]
    configs = _methods(compared, cache)
    terminal = Terminal(quiet=quiet)

    from shadowkv.eval.harness import Answers, Harness, Method, with_budget
    from shadowkv.eval.provenance import Provenance
    from shadowkv.eval.report import tables
    from shadowkv.eval.ruler.recipe import Materials
    from shadowkv.eval.sample import Length
    from shadowkv.eval.suite import find_haystack, find_tasks

    found = find_tasks(tasks.split(","))
    squad, hotpot = (None if path is None else Path(path) for path in (settings.squad, settings.hotpot))
    materials = Materials(find_haystack(settings.haystack), squad, hotpot, seed=settings.sample_seed)
    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    answers = Answers(directory / "answers.jsonl")
    # The context, the copy that an answer is made on, and the one before it while a dialogue goes on.
    room = replace(load, max_batch=3, max_context_tokens=load.max_context_tokens or max(wanted))
    llm = open_llm(model, FullConfig(), room, terminal)
    made = Provenance.here(llm.decoder.device)
    dtype = str(llm.decoder.dtype).removeprefix("torch.")
    about = {"model": model, "dtype": dtype, "seed": settings.sample_seed, "measured": made.to_dict()}
    harness = Harness(llm, answers, about, reference_rules=reference_metrics)
    with terminal.progress():
        for length in wanted:
            fitted = Length.of(llm.tokenizer, length, chat=chat)
            variants: dict[str, Method] = {}
            for name, config in configs.items():
                for share in shares:
                    method = Method(name, config) if share is None else with_budget(name, config, share, length)
                    variants[method.label] = method
            samples = [one for task in found for one in task.make(fitted, materials, settings.samples)]
            for method in variants.values():
                harness.run(samples, fitted.frame, length, method, terminal.report)
    _print(answers.rows, tables(answers.rows), directory, title=f"{model} in {dtype}; {made.line()}", json=json)


def _methods(compared: str | None, cache: CacheConfig) -> dict[str, CacheConfig]:
    """Full attention first, since the others are compared with it."""
    known = known_methods()
    own = next(name for name, kind in known.items() if kind is type(cache))
    chosen: dict[str, CacheConfig] = {"full": FullConfig()}
    for name in compared.split(",") if compared else [own]:
        if name not in known:
            raise ConfigError(f"--methods names {name!r}; allowed: {', '.join(known)}")
        chosen[name] = cache if name == own else known[name]()
    return chosen


def _share(text: str) -> float:
    number = parse_number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < number <= 1:
        raise ConfigError(f"--budget is {text!r}; give shares of the length such as 1.56% or 0.0156")
    return number


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
