"""``shadowkv diagnose``: what the paper measured, for one's own model and text, and settings for a byte budget."""

import json as jsonlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from shadowkv.cli.loading import MODEL_HELP, read_text
from shadowkv.cli.options import settings_as_flags, words_of
from shadowkv.cli.parse import format_bytes
from shadowkv.cli.terminal import Terminal, show_table
from shadowkv.diagnose.settings import DiagnoseSettings


@settings_as_flags
def diagnose(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    *,
    text: Annotated[str, typer.Option(help="A text longer than the prompt; - is standard input.")],
    output: Annotated[str, typer.Option(help="Directory for diagnose.json and the figures.")],
    other: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="A text to compare subspaces with; repeatable. Default: parts of the text."),
    ] = None,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw figures. Default: yes.")] = True,
    adapter: Annotated[str | None, typer.Option(help="Directory of a LoRA adapter in peft's format.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto: the first GPU if there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: the model's own.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="The JSON document instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no notes.")] = False,
    settings: DiagnoseSettings,
) -> None:
    """Measure what ShadowKV builds on, and recommend settings.

    For a model and a text: how low-rank the keys are, how stable their subspace is, how well means describe chunks,
    what a budget covers and what is reused. Then settings for a byte budget, with what they cost on this text.
    """
    whole_text, other_texts = read_text(text), {name: read_text(name) for name in other or ()}
    terminal = Terminal(quiet=quiet)

    from shadowkv.engine.placement import find_device, parse_dtype
    from shadowkv.engine.tokenizer import Tokenizer
    from shadowkv.eval.plotting import MISSING, can_draw
    from shadowkv.eval.provenance import Provenance
    from shadowkv.models.load import load_decoder, load_spec, resolve_dtype
    from shadowkv.models.locate import locate

    where, precision, files = find_device(device), parse_dtype(dtype), locate(model, adapter)
    made, spec = Provenance.here(where), load_spec(files)

    from shadowkv.diagnose.figures import write_figures
    from shadowkv.diagnose.report import document
    from shadowkv.diagnose.run import check, choose_others
    from shadowkv.diagnose.run import diagnose as run

    check(spec, resolve_dtype(spec, where, precision), settings)
    tokenizer = Tokenizer.load(files.path)
    ids = tokenizer.encode(whole_text)
    others = choose_others(ids, {name: tokenizer.encode(one) for name, one in other_texts.items()}, settings)
    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    if not others:
        terminal.note("no other text is given and this one ends with the prompt: subspaces are compared with its half")
    if figures and not can_draw():
        terminal.warn(f"{MISSING}; the rest goes on")
    with terminal.progress():
        decoder = load_decoder(
            files,
            device=where,
            dtype=precision,
            progress=lambda done, total: terminal.report("loading weights", done, total),
        )
        found = run(decoder, ids, others, settings, terminal.report)
    about = {
        "model": model,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "text": text,
        "measured": made.to_dict(),
    }
    whole: Mapping[str, Any] = document(found, about)
    flags = words_of(found.recommendation.chosen.candidate.config)
    whole["recommendation"]["flags"] = flags
    written = jsonlib.dumps(whole, ensure_ascii=False, allow_nan=False, indent=1)
    (directory / "diagnose.json").write_text(written + "\n", encoding="utf-8")
    if json:
        typer.echo(written)
    else:
        _print(whole, flags, f"{model} in {about['dtype']}, {settings.prompt_tokens:,} tokens; {made.line()}")
    if figures:
        for path in write_figures(whole, directory):
            terminal.note(f"wrote {path}")


def _print(whole: Mapping[str, Any], flags: list[str], title: str) -> None:
    from shadowkv.diagnose.summary import CANDIDATE_COLUMNS, LAYER_COLUMNS, candidate_rows, layer_rows

    part = whole["recommendation"]
    show_table(title, LAYER_COLUMNS, layer_rows(whole))
    for name, rows in (
        ("candidates: settings that none beats in both losses", part["candidates"]),
        ("the best of them in the same memory, on tokens that it was not chosen by", part["variants"]),
    ):
        show_table(name, CANDIDATE_COLUMNS, candidate_rows(rows))
    typer.echo(
        f"recommended: {format_bytes(part['device_bytes'])} on the device for {part['tokens']:,} tokens, "
        f"{part['share_of_full_attention']:.1%} of full attention's {format_bytes(part['full_attention_bytes'])}\n"
        f"{part['python']}\n{' '.join(flags)}"
    )
