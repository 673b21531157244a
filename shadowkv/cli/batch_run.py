"""The loop of a batch: keep the engine fed, write what it finishes. Knows no file format and no flag."""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shadowkv.cli.batch_files import Envelope, Results, read_envelopes
from shadowkv.cli.parse import format_seconds
from shadowkv.cli.terminal import Count
from shadowkv.engine.request import FinishReason, RequestOutput
from shadowkv.errors import ShadowKVError
from shadowkv.protocol import BodyError, Json, completion_object, error_object

if TYPE_CHECKING:
    from shadowkv.llm import LLM


@dataclass
class _Job:
    """One line in flight: one request for each of its prompts."""

    envelope: Envelope
    order: list[str] = field(default_factory=list)
    outputs: dict[str, RequestOutput] = field(default_factory=dict)


class BatchRun:
    """Answers the lines of one file.

    Args:
        look_ahead: requests given to the engine at a time, at most; it decides how many of them fit.
    """

    def __init__(
        self, llm: "LLM", model: str, results: Results, *, look_ahead: int, default_max_tokens: int | None
    ) -> None:
        self._llm = llm
        self._model = model
        self._results = results
        self._look_ahead = look_ahead
        self._default_max_tokens = default_max_tokens
        self._jobs: dict[str, _Job] = {}
        self._started = time.monotonic()
        self.done = self.failed = self.skipped = 0
        self.prompt_tokens = self.generated_tokens = 0

    def work(self, requests: Path, count: Count) -> None:
        """Do every line that the results do not hold yet."""
        self._started = time.monotonic()
        envelopes = read_envelopes(requests, self._default_max_tokens)
        more = True
        while more or self._jobs:
            while more and len(self._jobs) < self._look_ahead:
                envelope = next(envelopes, None)
                more = envelope is not None
                if envelope is None:
                    break
                if envelope.key in self._results.known:
                    self.skipped += 1
                else:
                    self._take(envelope)
            for output in self._llm.step() if self._jobs else []:
                self._collect(output)
            count(self.skipped + self.done + self.failed, self._rate())

    def summary(self) -> list[str]:
        """What was done, for people."""
        seconds = time.monotonic() - self._started
        return [
            f"{self.done} lines answered, {self.failed} failed, {self.skipped} were there already",
            f"{self.prompt_tokens} prompt tokens and {self.generated_tokens} generated tokens "
            f"in {format_seconds(seconds)} ({self.generated_tokens / max(seconds, 1e-9):.1f} generated tokens/s)",
        ]

    def _rate(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        return f"{self._llm.computed_tokens / seconds:,.0f} tokens/s with prompts"

    def _take(self, envelope: Envelope) -> None:
        """Give a line's prompts to the engine; a line that it refuses is an error line at once."""
        if envelope.work is None:
            assert envelope.fault is not None
            self._fail(envelope, str(envelope.fault), 400, envelope.fault)
            return
        job = _Job(envelope)
        try:
            for request_id in self._submit(envelope):
                job.order.append(request_id)
                self._jobs[request_id] = job
        except ShadowKVError as error:
            for request_id in job.order:
                self._llm.cancel(request_id)
                del self._jobs[request_id]
            self._fail(envelope, str(error), 400)

    def _submit(self, envelope: Envelope) -> Iterator[str]:
        work = envelope.work
        assert work is not None
        if work.api == "chat":
            prompts: tuple[str | tuple[int, ...], ...] = (tuple(self._llm.tokenizer.encode_chat(work.messages)),)
        else:
            prompts = work.prompts
        for prompt in prompts:
            yield self._llm.submit(prompt if isinstance(prompt, str) else list(prompt), work.params)

    def _collect(self, output: RequestOutput) -> None:
        job = self._jobs.pop(output.request_id, None)
        if job is None:
            return
        job.outputs[output.request_id] = output
        if len(job.outputs) == len(job.order):
            self._finish(job.envelope, [job.outputs[request_id] for request_id in job.order])

    def _finish(self, envelope: Envelope, outputs: list[RequestOutput]) -> None:
        assert envelope.work is not None
        completions = [completion for output in outputs for completion in output.completions]
        self.prompt_tokens += sum(len(output.prompt_token_ids) for output in outputs)
        self.generated_tokens += sum(len(completion.token_ids) for completion in completions)
        for completion in completions:
            if completion.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
                self._fail(envelope, completion.error or f"the request was {completion.finish_reason.value}", 500)
                return
        kind = "chatcmpl" if envelope.work.api == "chat" else "cmpl"
        body = completion_object(
            envelope.work,
            outputs,
            model=self._model,
            object_id=f"{kind}-{uuid.uuid4().hex}",
            created=int(time.time()),
        )
        self.done += 1
        self._write(envelope, 200, body, None)

    def _fail(self, envelope: Envelope, message: str, status: int, fault: BodyError | None = None) -> None:
        code = fault.code if fault else "invalid_request" if status < 500 else "server_error"
        self.failed += 1
        body = error_object(message, status=status, param=fault.param if fault else None, code=code)
        self._write(envelope, status, body, {"code": code, "message": message})

    def _write(self, envelope: Envelope, status: int, body: Json, error: Json | None) -> None:
        row: Json = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": envelope.custom_id,
            "response": {"status_code": status, "request_id": uuid.uuid4().hex, "body": body},
            "error": error,
        }
        if envelope.key.startswith("line:"):
            row["line"] = envelope.number
        self._results.write(row)
