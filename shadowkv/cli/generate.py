"""``shadowkv generate``: one prompt, or several questions about one long text."""

import sys
from typing import Annotated

import typer

from shadowkv.cli.failures import FAILED
from shadowkv.cli.loading import MODEL_HELP, LoadSettings, just_enough, open_llm, read_text
from shadowkv.cli.options import settings_as_flags
from shadowkv.cli.terminal import Terminal
from shadowkv.config import CacheConfig, SamplingParams
from shadowkv.errors import ConfigError, RequestError


@settings_as_flags
def generate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    *,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="File with the prompt; - is standard input.")] = None,
    context: Annotated[
        str | None, typer.Option(help="File with a long text, computed once for all questions; - is standard input.")
    ] = None,
    question: Annotated[
        list[str] | None, typer.Option("--question", help="A question about --context; repeatable.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the model's chat template; by default where it has one."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document with everything, instead of text.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no notes, no statistics.")] = False,
    cache: CacheConfig,
    sampling: SamplingParams,
    load: LoadSettings,
) -> None:
    """Answer a prompt, or every question about a context.

    The prompt comes from --prompt, --prompt-file or standard input. With --context and --question, the
    context is computed once and every question is asked of it. Text goes to stdout as it is made;
    progress and statistics go to stderr.
    """
    if sampling.logprobs is not None and not json:
        raise ConfigError("--logprobs are only in --json; add it")
    text = _input(prompt, prompt_file, context, question)
    terminal = Terminal(quiet=quiet)
    load = just_enough(load, model, [text, *(question or [])], sampling)
    llm = open_llm(model, cache, load, terminal)

    from shadowkv.cli.answers import Answers

    answers = Answers(llm, sampling, terminal, stream=not json)
    use_chat = llm.tokenizer.has_chat_template if chat is None else chat
    if use_chat and not llm.tokenizer.has_chat_template:
        raise ConfigError("--chat was given, but the model has no chat template; use --no-chat")
    if question:
        answers.about_context(text, question, chat=use_chat)
    else:
        answers.to_prompt(text, chat=use_chat)
    if json:
        typer.echo(answers.document(model, cache))
    if answers.failed:
        raise typer.Exit(FAILED)


def _input(prompt: str | None, prompt_file: str | None, context: str | None, question: list[str] | None) -> str:
    """The one text that was given. Raises ConfigError or RequestError before anything is loaded."""
    sources = {"--prompt": prompt, "--prompt-file": prompt_file, "--context": context}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other; give one")
    if question and context is None:
        raise ConfigError("--question asks about a --context; give one, or use --prompt")
    if context is not None and not question:
        raise ConfigError("--context needs at least one --question")
    if any(not text.strip() for text in question or []):
        raise RequestError("a --question is empty")
    if prompt is not None:
        if not prompt.strip():
            raise RequestError("--prompt is empty")
        return prompt
    if not given and sys.stdin.isatty():
        raise ConfigError("no prompt: give --prompt, --prompt-file, --context with --question, or standard input")
    return read_text(context or prompt_file or "-")
