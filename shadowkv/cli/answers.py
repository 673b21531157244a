"""Asks the model and shows what comes back: text as it is made, statistics after it, or one JSON document."""

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from shadowkv.cli.parse import format_bytes, format_seconds
from shadowkv.cli.terminal import Terminal
from shadowkv.config import CacheConfig, SamplingParams
from shadowkv.conversation import split_prompt
from shadowkv.engine.request import Completion, FinishReason, RequestOutput, StreamChunk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowkv.llm import LLM


class Answers:
    """The answers of one run. ``failed`` is true when one ended in an error."""

    def __init__(self, llm: "LLM", sampling: SamplingParams, terminal: Terminal, *, stream: bool) -> None:
        self._llm = llm
        self._sampling = sampling
        self._terminal = terminal
        self._stream = stream
        self._rows: list[dict[str, object]] = []
        self._context: dict[str, object] | None = None
        self.failed = False

    def to_prompt(self, prompt: str, *, chat: bool) -> None:
        """One prompt."""
        tokenizer = self._llm.tokenizer
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
        if self._streams():
            self._show_stream(self._llm.stream(ids, self._sampling))
            return
        with self._terminal.progress():
            (output,) = self._llm.generate([ids], self._sampling)
        self._keep(output, {"prompt": prompt})

    def about_context(self, text: str, questions: list[str], *, chat: bool) -> None:
        """Every question, each of the same context."""
        tokenizer = self._llm.tokenizer
        split = split_prompt(tokenizer, text, chat=chat)
        started = time.monotonic()
        with self._terminal.progress():
            context = self._llm.context(split.head_ids)
        with context:
            seconds = time.monotonic() - started
            self._context = {"tokens": context.tokens, "seconds": seconds}
            rate = context.tokens / max(seconds, 1e-9)
            self._terminal.note(
                f"context: {context.tokens:,} tokens in {format_seconds(seconds)} ({rate:,.0f} tokens/s)"
            )
            for question in questions:
                ids = split.question_ids(tokenizer, question)
                if len(questions) > 1:
                    self._terminal.note(f"> {question}")
                if self._streams():
                    self._show_stream(context.stream(ids, self._sampling))
                else:
                    (output,) = context.generate([ids], self._sampling)
                    self._keep(output, {"question": question})

    def document(self, model: str, cache: CacheConfig) -> str:
        """Everything that is known about the run, as one JSON document."""
        settings = {key: value for key, value in asdict(cache).items() if key != "index"}
        whole = {
            "model": model,
            "method": {"name": type(cache).__name__.removesuffix("Config").lower(), **settings},
            "sampling": asdict(self._sampling),
            "plan": self._llm.plan.to_dict(),
            "context": self._context,
            "outputs": self._rows,
        }
        return json.dumps(whole, ensure_ascii=False, allow_nan=False, indent=1)

    def _streams(self) -> bool:
        return self._stream and self._sampling.n == 1

    def _show_stream(self, chunks: "Iterator[StreamChunk]") -> None:
        """Print pieces as they come. Tokens per second are counted from the first piece on."""
        started = time.monotonic()
        first = finished = None
        for chunk in chunks:
            first = first or time.monotonic()
            typer.echo(chunk.text, nl=False)
            finished = chunk.finished or finished
        assert finished is not None, "a stream ends with a finished completion"
        typer.echo()
        now = time.monotonic()
        self._check(finished)
        wait = f"first token after {format_seconds((first or now) - started)}"
        steps = len(finished.token_ids) - 1
        rate = f"{steps / (now - first):.1f} tokens/s" if first and steps > 0 and now > first else ""
        self._statistics(finished, [wait, rate])

    def _keep(self, output: RequestOutput, asked: dict[str, object]) -> None:
        """A whole answer: for the document, or printed at once."""
        self._rows.append(asked | dict(output.to_dict()))
        timing = output.timing
        rates = [
            f"prefill {timing.prefill_tokens_per_s:,.0f} tokens/s" if timing.prefill_tokens_per_s else "",
            f"decode {timing.decode_tokens_per_s:.1f} tokens/s" if timing.decode_tokens_per_s else "",
        ]
        for completion in output.completions:
            if self._stream and completion.index:
                typer.echo("---")
            if self._stream:
                typer.echo(completion.text)
            self._check(completion)
            self._statistics(completion, rates)

    def _check(self, completion: Completion) -> None:
        if completion.finish_reason is FinishReason.ERROR:
            self.failed = True
            typer.echo(f"error: {completion.error}", err=True)

    def _statistics(self, completion: Completion, rates: list[str]) -> None:
        parts = [f"{len(completion.token_ids)} tokens", f"ended by {completion.finish_reason.value}", *rates]
        if stats := completion.stats:
            parts.append(f"{stats.attention} attention")
            if stats.hit_rate is not None:
                parts.append(f"hit rate {stats.hit_rate:.2f}")
            parts.append(f"cache {format_bytes(stats.device_bytes)} device, {format_bytes(stats.host_bytes)} host")
        self._terminal.note("[" + ", ".join(part for part in parts if part) + "]")
