"""``shadowkv bench``: kernels beside the machine's ceilings, and decoding under methods at lengths."""

import json as jsonlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shadowkv.cli.failures import FAILED
from shadowkv.cli.loading import read_text
from shadowkv.cli.options import methods as known_methods
from shadowkv.cli.options import settings_as_flags
from shadowkv.cli.parse import parse_integer, parse_number, parse_tokens
from shadowkv.cli.terminal import Terminal, markdown_table, show_table
from shadowkv.config import CacheConfig
from shadowkv.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from shadowkv.bench.decode import Job
    from shadowkv.models.decoder import Decoder
    from shadowkv.models.locate import ModelFiles
    from shadowkv.models.spec import ModelSpec

Tables = Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]]

bench = typer.Typer(
    help="Measure kernels, and decoding as a whole.", no_args_is_help=True, rich_markup_mode=None, add_completion=False
)


@dataclass(frozen=True)
class DecodeSettings:
    """What is decoded, and in which memory."""

    geometry: str | None = None
    """Sizes of a known model, with random weights: llama-3.1-8b, llama-3-8b-1m, glm-4-9b, yi-9b, qwen3-8b,
    qwen2.5-7b, mistral-7b, smollm2-135m or tiny."""
    context: str = "60k"
    """Lengths of the context, with commas."""
    batch: str = "max"
    """Sequences, but no more than fit; or max: as many as fit, each method for itself."""
    gpu_memory_bytes: int | None = None
    """Memory of the device that is planned with; by default what is free."""
    host_memory_bytes: int | None = None
    """Memory of the host that is planned with; by default what is free."""
    hit_rate: str = "measured"
    """Share of a step's selection that was selected before: measured, as it comes out, or a number that is
    brought about after the real scoring."""
    prefill: Literal["synthetic", "real"] = "synthetic"
    """real computes every prompt; synthetic fills the caches with random keys and values."""
    text: str | None = None
    """A text for real prompts, cut or repeated to length; by default random tokens."""
    steps: int = 96
    """Steps that are timed. The usual recent window empties once in so many."""
    warmup: int = 112
    """Steps before them: enough to empty the usual recent window once, which compiles what that takes."""
    traced_steps: int = 8
    """Steps after them, under the profiler, for the times by part."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto: the first GPU if there is one."""
    dtype: str = "auto"
    """float32, bfloat16, float16, or auto: the model's own on a GPU, float32 on a CPU."""

    def __post_init__(self) -> None:
        for option, count, least in (
            ("--steps", self.steps, 1),
            ("--warmup", self.warmup, 1),
            ("--traced-steps", self.traced_steps, 0),
        ):
            if count < least:
                raise ConfigError(f"{option} is {count}; it must be at least {least}")
        if self.text is not None and self.prefill != "real":
            raise ConfigError("--text is for real prompts; give --prefill real with it")

    @property
    def contexts(self) -> list[int]:
        """In tokens."""
        lengths = [parse_tokens(part) for part in self.context.split(",")]
        if min(lengths) < 1:
            raise ConfigError(f"--context is {self.context!r}; each must be at least 1")
        return lengths

    @property
    def sequences(self) -> int | None:
        """None is as many as fit."""
        if self.batch == "max":
            return None
        count = parse_integer(self.batch)
        if count < 1:
            raise ConfigError(f"--batch is {count}; give at least 1, or max")
        return count

    @property
    def share(self) -> float | None:
        """None is whatever comes out."""
        if self.hit_rate == "measured":
            return None
        share = parse_number(self.hit_rate)
        if not 0 <= share <= 1:
            raise ConfigError(f"--hit-rate is {self.hit_rate}; give a number from 0 to 1, or measured")
        return share


@bench.command("kernels")
@settings_as_flags
def kernels(
    *,
    ops: Annotated[str | None, typer.Option(help="Operations, with commas. Default: all.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cuda, cuda:1, or auto: the first GPU.")] = "auto",
    output: Annotated[str | None, typer.Option(metavar="DIR", help="Directory for the table and the JSON.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no notes.")] = False,
) -> None:
    """Time every kernel beside what the machine allows.

    Measures the machine's ceilings, checks every kernel and refuses to time one that is wrong. Times are
    medians with the 10th and 90th percentile, on inputs in no cache, without launches.
    """
    terminal = Terminal(quiet=quiet)

    from shadowkv.bench import kernels as timing
    from shadowkv.bench.ceilings import measure_ceilings
    from shadowkv.bench.checks import choose_ops, interpreted
    from shadowkv.bench.library import OP, time_library
    from shadowkv.bench.timing import Stopwatch, require_gpu
    from shadowkv.engine.placement import find_device, parse_dtype
    from shadowkv.eval.provenance import Provenance
    from shadowkv.ops.contract.all import OPS

    where, kind = find_device(device), parse_dtype(dtype)
    if kind == "auto":
        raise ConfigError("--dtype is 'auto'; allowed: bfloat16, float16, float32")
    chosen = choose_ops(OPS, ops)
    require_gpu(where)
    if interpreted():
        raise ConfigError("TRITON_INTERPRET=1 is set, and interpreted kernels have no times; unset it")
    made = Provenance.here(where)
    watch = Stopwatch(where)
    ceilings = measure_ceilings(watch)
    terminal.note(ceilings.line())
    with terminal.progress():
        result = timing.time_ops(chosen, kind, watch, ceilings, terminal.report)
        if any(row.op == OP for row in result.rows):
            result.rows += time_library(kind, watch, ceilings)
    title = f"kernels; {ceilings.line()}; {made.line()}"
    document: dict[str, object] = {
        "schema": 1,
        "kind": "kernels",
        "measured": made.to_dict(),
        "ceilings": ceilings.to_dict(),
        "rows": [row.to_dict() for row in result.rows],
        "refused": [checked.to_dict() for checked in result.refused],
        "broken": result.broken,
    }
    tables = [(title, timing.COLUMNS, [timing.cells(row) for row in result.rows])]
    _deliver("kernels", tables, [], document, output, json=json)
    for checked in result.refused:
        typer.echo(f"error: {checked.op} is not timed, since it fails its check: {checked.failures[0]}", err=True)
    for broken in result.broken:
        typer.echo(f"error: {broken}", err=True)
    if result.refused or result.broken:
        raise typer.Exit(FAILED)


@bench.command("decode")
@settings_as_flags
def decode(
    *,
    model: Annotated[
        str | None, typer.Option(help="Directory in Hugging Face layout, GGUF file, or a name. Or give --geometry.")
    ] = None,
    compared: Annotated[str, typer.Option("--methods", help="Methods, with commas.")] = "full,shadowkv",
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Chrome traces; method and length are added to the name.")
    ] = None,
    output: Annotated[str | None, typer.Option(metavar="DIR", help="Directory for the tables and the JSON.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no notes.")] = False,
    cache: CacheConfig,
    settings: DecodeSettings,
) -> None:
    """Decode batches under several methods and say where the time goes.

    Prefill, index building and decoding are timed apart, and what is synthetic is said beside the tables. A
    step is timed from token ids to token ids.
    """
    if (model is None) == (settings.geometry is None):
        raise ConfigError("give either --model or --geometry")
    contexts, configs = settings.contexts, _methods(compared, cache)
    terminal = Terminal(quiet=quiet)

    from shadowkv.bench import report, suite
    from shadowkv.bench.geometries import geometry_spec
    from shadowkv.bench.synthetic import RANDOM_PROMPTS, RANDOM_WEIGHTS
    from shadowkv.engine.memory import find_memory
    from shadowkv.engine.placement import find_device, measured_bandwidth, parse_dtype
    from shadowkv.eval.provenance import Provenance
    from shadowkv.models.load import load_spec, resolve_dtype
    from shadowkv.models.locate import locate

    where = find_device(settings.device)
    files = locate(model) if model is not None else None
    spec = load_spec(files) if files is not None else geometry_spec(settings.geometry or "")
    kind = resolve_dtype(spec, where, parse_dtype(settings.dtype))
    job = _job(settings, spec, files, trace)
    memory = find_memory(where, settings.gpu_memory_bytes, settings.host_memory_bytes)
    runs = suite.plan_runs(spec, configs, contexts, job, kind, memory, bandwidth=measured_bandwidth(where))
    made = Provenance.here(where)
    labels = [RANDOM_WEIGHTS] if files is None else []
    if job.prompt is not None and settings.text is None:
        labels.append(RANDOM_PROMPTS)
    ceilings = None
    if where.type == "cuda":
        from shadowkv.bench.ceilings import measure_ceilings
        from shadowkv.bench.timing import Stopwatch

        ceilings = measure_ceilings(Stopwatch(where))
        terminal.note(ceilings.line())
        suite.forget(where)
    with terminal.progress():
        decoder = _decoder(spec, files, where, kind, terminal)
        rows = suite.decode_all(decoder, runs, job, ceilings, labels, terminal.report)
    name = model or settings.geometry or ""
    dtype = str(kind).removeprefix("torch.")
    about = {"model": name, "dtype": dtype, "steps": job.steps, "warmup": job.warmup}
    title = f"{name} in {dtype}{', random weights' if files is None else ''}; {made.line()}"
    tables = [(f"{title}: {caption}", columns, cells) for caption, columns, cells in report.decode_tables(rows)]
    document = report.decode_document(rows, about, ceilings, made.to_dict())
    lines = [*([ceilings.line()] if ceilings is not None else []), *report.legend(rows)]
    _deliver("decode", tables, lines, document, output, json=json)


def _methods(compared: str, cache: CacheConfig) -> dict[str, CacheConfig]:
    """The settings given are those of ``--method``; the other methods have their defaults."""
    known = known_methods()
    chosen: dict[str, CacheConfig] = {}
    for name in compared.split(","):
        if name not in known:
            raise ConfigError(f"--methods names {name!r}; allowed: {', '.join(known)}")
        chosen[name] = cache if known[name] is type(cache) else known[name]()
    return chosen


def _job(settings: DecodeSettings, spec: "ModelSpec", files: "ModelFiles | None", trace: str | None) -> "Job":
    from shadowkv.bench.decode import Job

    return Job(
        steps=settings.steps,
        warmup=settings.warmup,
        traced_steps=settings.traced_steps,
        batch=settings.sequences,
        hit_rate=settings.share,
        prompt=_prompt(settings, spec, files) if settings.prefill == "real" else None,
        trace=None if trace is None else Path(trace),
    )


def _prompt(settings: DecodeSettings, spec: "ModelSpec", files: "ModelFiles | None") -> tuple[int, ...]:
    """Token ids that prompts are cut from."""
    if settings.text is None:
        import random

        drawn = random.Random(0)
        return tuple(drawn.randrange(spec.vocab) for _ in range(max(settings.contexts)))
    if files is None:
        raise ConfigError("--text needs the tokenizer of a --model; --geometry has none")
    from shadowkv.engine.tokenizer import Tokenizer

    return tuple(Tokenizer.load(files.path).encode(read_text(settings.text)))


def _decoder(
    spec: "ModelSpec", files: "ModelFiles | None", where: "torch.device", kind: "torch.dtype", terminal: Terminal
) -> "Decoder":
    from shadowkv.bench.synthetic import random_decoder
    from shadowkv.models.load import load_decoder

    def report(done: int, total: int) -> None:
        terminal.report("weights", done, total)

    if files is None:
        return random_decoder(spec, device=where, dtype=kind, progress=report)
    return load_decoder(files, device=where, dtype=kind, progress=report)


def _deliver(
    name: str, tables: Tables, lines: list[str], document: dict[str, object], output: str | None, *, json: bool
) -> None:
    """To the terminal, and to files beside each other."""
    text = jsonlib.dumps(document, indent=1)
    if output is not None:
        directory = Path(output)
        directory.mkdir(parents=True, exist_ok=True)
        parts = [f"{title}\n\n{markdown_table(columns, rows)}\n" for title, columns, rows in tables]
        (directory / f"{name}.md").write_text("\n".join([*parts, *lines, ""]), encoding="utf-8")
        (directory / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    if json:
        typer.echo(text)
        return
    for title, columns, rows in tables:
        show_table(title, columns, rows)
    for line in lines:
        typer.echo(line)
