"""The loop: schedule, run, commit. Owns what is running; knows neither the method nor the model's family.

Every accepted request ends in exactly one output, whose samples have exactly one finish reason each. A
request whose own work fails ends with the reason "error" and takes no other down.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from shadowkv.cache.base import CachedSequence
from shadowkv.cache.pool import Reservation
from shadowkv.engine.detokenize import TextStream
from shadowkv.engine.request import Completion, FinishReason, Request, RequestOutput, StreamChunk, TokenLogprob
from shadowkv.engine.runner import Runner
from shadowkv.engine.sampler import Sampled, Sampler, SampleState
from shadowkv.engine.scheduler import Admission, Scheduler
from shadowkv.engine.tokenizer import Tokenizer
from shadowkv.engine.totals import Totals
from shadowkv.errors import RequestError, ShadowKVError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class KeptContext:
    """A prefilled sequence that outlives its request. ``token_ids`` are those in the cache; ``pending``
    were chosen after them and have not been computed yet. None for ``seq`` once it is released."""

    seq: CachedSequence | None
    token_ids: tuple[int, ...]
    pending: tuple[int, ...] = ()


@dataclass(eq=False)
class _Sample:
    request: Request
    index: int
    seq: CachedSequence
    state: SampleState
    text: TextStream
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(eq=False)
class _Entry:
    """A request that has not ended, and what has ended of it."""

    request: Request
    context: KeptContext | None
    keep: bool
    cancelled: bool = False
    samples: dict[int, _Sample] = field(default_factory=dict)
    done: dict[int, Completion] = field(default_factory=dict)


class _Cancelled(Exception):
    """Breaks off the prefill of a request that was cancelled by whoever watched it."""


@dataclass
class StepResult:
    """What a step brought: pieces of text, and the requests that ended."""

    chunks: list[StreamChunk] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)


class Engine:
    """Requests in, chunks and outputs out, a step at a time. Not thread-safe.

    Args:
        max_context_tokens: the longest prompt plus answer; longer requests are refused.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        *,
        max_context_tokens: int,
        end_token_ids: Collection[int],
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.max_context_tokens = max_context_tokens
        self.end_token_ids = frozenset(end_token_ids)
        self.on_prefill: Callable[[int, int], None] | None = None
        """Told the prompt tokens done and in all while a prompt is computed."""
        self.sampler = Sampler(runner.decoder.spec.vocab, runner.decoder.device)
        self.totals = Totals()
        self._entries: dict[str, _Entry] = {}
        self._prefilling: _Entry | None = None
        self._result = StepResult()

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has something to do or to report."""
        return bool(self._entries or self._result.outputs or self._result.chunks)

    def submit(self, request: Request, context: KeptContext | None = None, *, keep: bool = False) -> None:
        """Accept a request.

        Args:
            context: what holds the first ``request.reused_tokens`` tokens of the prompt.
            keep: when the only sample ends well, let the context hold prompt and answer from then on.

        Raises:
            RequestError: too long for the model or the plan, an unknown token, or a second ``keep`` on one
                context at the same time.
            CapacityError: it would not fit even alone.
        """
        self._check(request)
        assert (context is not None) == bool(request.reused_tokens), "reused tokens come from a context"
        if keep and any(entry.keep and entry.context is context for entry in self._entries.values()):
            raise RequestError("a context goes on from one answer at a time; wait for the one before, or cancel it")
        self.scheduler.add(request)
        self._entries[request.id] = _Entry(request, context, keep)

    def step(self) -> StepResult:
        """One decoding step of everything that runs, then the prefills that were admitted."""
        step = self.scheduler.schedule()
        for refusal in step.refused:
            self._end_unstarted(self._entries[refusal.request.id], FinishReason.ERROR, str(refusal.error))
        next_in = [self._entries[admission.request.id] for admission in step.admit]
        with self._ending_on_error(next_in):  # those whose turn had not come
            self._decode([self._entries[request.id].samples[index] for request, index in step.decode])
            for admission in step.admit:
                self._admit(next_in.pop(0), admission)
        result, self._result = self._result, StepResult()
        return result

    def cancel(self, request_id: str) -> bool:
        """End a request now; its memory is free at once. The next step reports it. False: not here."""
        entry = self._entries.get(request_id)
        if entry is None or entry.cancelled:
            return False
        entry.cancelled = True
        if entry is not self._prefilling:  # else the prefill ends itself, and then gives its memory back
            self._end_all(entry, FinishReason.CANCELLED, None)
        return True

    def forget(self, request_id: str) -> None:
        """Drop what is waiting to be reported of a request."""
        self._result.outputs = [out for out in self._result.outputs if out.request_id != request_id]
        self._result.chunks = [chunk for chunk in self._result.chunks if chunk.request_id != request_id]

    def keep(self, token_ids: tuple[int, ...]) -> KeptContext:
        """Prefill a context outside of any request; :meth:`drop` gives its memory back.

        Raises:
            RequestError: empty, too long, or an unknown token.
            CapacityError: the memory is not there.
        """
        self._check_tokens(token_ids)
        if len(token_ids) > self.max_context_tokens:
            raise RequestError(
                f"the context has {len(token_ids):,} tokens; this engine was planned for {self.max_context_tokens:,}"
            )
        seq, _ = self.runner.prefill(len(token_ids), token_ids, self.on_prefill)
        return KeptContext(seq, token_ids)

    def drop(self, context: KeptContext) -> None:
        """Release a kept context; requests that still wait for it end with an error."""
        if context.seq is not None:
            self.runner.cache.release(context.seq)
            context.seq = None

    # Admission.

    def _admit(self, entry: _Entry, admission: Admission) -> None:
        request = entry.request
        request.admitted = time.monotonic()
        with self._ending_on_error([entry]):
            seq, logits_V = self._prefill(entry, admission.reservations[0])
            self._add_sample(entry, 0, seq)
            for index, reservation in enumerate(admission.reservations[1:], start=1):
                self._add_sample(entry, index, self.runner.cache.fork(seq, reservation))
            request.prefilled = time.monotonic()
            self._choose(list(entry.samples.values()), logits_V.expand(request.params.n, -1))

    def _prefill(self, entry: _Entry, reservation: Reservation) -> tuple[CachedSequence, Tensor]:
        tokens, context = entry.request.prompt_token_ids, entry.context
        if context is not None and context.seq is None:
            raise RequestError("the context was released before the request could run")
        self._prefilling = entry
        try:
            if context is None or not self._holds_prefix(context, entry.request):
                entry.request.reused_tokens = 0
                return self.runner.prefill(reservation, tokens, self._report_prefill)
            seq = self.runner.cache.fork(context.seq, reservation)
            try:
                return seq, self.runner.append(seq, tokens[entry.request.reused_tokens :], self._report_prefill)
            except BaseException:
                self.runner.cache.release(seq)
                raise
        finally:
            self._prefilling = None

    def _holds_prefix(self, context: KeptContext, request: Request) -> bool:
        """Whether the context still is what the request was asked about, in keys that it can use."""
        reused, tokens = request.reused_tokens, request.prompt_token_ids
        if context.token_ids != tokens[:reused] or self.runner.must_recompute(reused, len(tokens)):
            return False
        return self.runner.cache.can_fork(context.seq, request.capacity_tokens)

    def _report_prefill(self, done: int, total: int) -> None:
        if self.on_prefill is not None:
            self.on_prefill(done, total)
        if self._prefilling is not None and self._prefilling.cancelled:
            raise _Cancelled

    def _add_sample(self, entry: _Entry, index: int, seq: CachedSequence) -> None:
        request = entry.request
        state = self.sampler.open(request.params, request.prompt_token_ids, self._ends(request), index)
        entry.samples[index] = _Sample(request, index, seq, state, TextStream(self.tokenizer, request.params))

    # Decoding.

    def _decode(self, samples: list[_Sample]) -> None:
        stale = [s for s in samples if self.runner.must_recompute(s.seq.tokens, s.seq.tokens + 1)]
        for sample in stale:
            self._recompute(sample)
        fresh = [sample for sample in samples if sample not in stale]
        if not fresh:
            return
        with self._ending_on_error([self._entries[s.request.id] for s in fresh]):
            logits_BV = self.runner.decode([s.seq for s in fresh], [s.token_ids[-1] for s in fresh])
            self._choose(fresh, logits_BV)

    def _recompute(self, sample: _Sample) -> None:
        """Prefill a sample's tokens again, in the memory it has: its RoPE frequencies have changed."""
        if sample.seq.released:  # another sample of the request has failed at this
            return
        reservation = sample.seq.reservation
        self.runner.cache.release(sample.seq)
        with self._ending_on_error([self._entries[sample.request.id]]):
            try:
                tokens = [*sample.request.prompt_token_ids, *sample.token_ids]
                sample.seq, logits_V = self.runner.prefill(reservation, tokens)
            except BaseException:
                sample.seq = self.runner.cache.open(reservation)  # an empty one, so that the end finds something
                raise
            self._choose([sample], logits_V[None])

    def _choose(self, samples: list[_Sample], logits_BV: Tensor) -> None:
        chosen = self.sampler.sample(logits_BV, [sample.state for sample in samples])
        for sample, outcome in zip(samples, chosen, strict=True):
            self._commit(sample, outcome)

    def _commit(self, sample: _Sample, outcome: Sampled | ShadowKVError) -> None:
        """Write down a sample's new token, and end the sample where it has to end."""
        if isinstance(outcome, ShadowKVError):
            self._end(sample, FinishReason.ERROR, error=str(outcome))
            return
        params, token = sample.request.params, outcome.token_id
        sample.token_ids.append(token)
        sample.request.generated_tokens += 1
        if outcome.logprob is not None:
            text = self.tokenizer.token_text
            top = tuple((other, text(other), logprob) for other, logprob in outcome.top)
            sample.logprobs.append(TokenLogprob(token, text(token), outcome.logprob, top))
        if token in self._ends(sample.request):
            self._end(sample, FinishReason.STOP, stop_reason=token)
            return
        piece, stop = sample.text.push(token)
        sample.pieces.append(piece)
        if stop is not None:
            self._end(sample, FinishReason.STOP, stop_reason=stop, last_piece=piece)
        elif len(sample.token_ids) >= params.max_tokens:
            self._end(sample, FinishReason.LENGTH, last_piece=piece)
        else:
            self._result.chunks.append(StreamChunk(sample.request.id, sample.index, piece, (token,)))

    def _ends(self, request: Request) -> frozenset[int]:
        ends = frozenset(request.params.stop_token_ids)
        return ends if request.params.ignore_eos else ends | self.end_token_ids

    # Endings.

    def _end(
        self,
        sample: _Sample,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: str | None = None,
        last_piece: str = "",
    ) -> None:
        """The one way out for a sample that has started."""
        entry = self._entries[sample.request.id]
        rest = sample.text.finish()
        sample.pieces.append(rest)
        if reason is FinishReason.LENGTH and sample.text.stop_reason is not None:
            reason, stop_reason = FinishReason.STOP, sample.text.stop_reason  # completed by the last bytes
        completion = Completion(
            index=sample.index,
            text="".join(sample.pieces),
            token_ids=tuple(sample.token_ids),
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
            logprobs=tuple(sample.logprobs) if sample.request.params.logprobs is not None else None,
            stats=self.runner.cache.stats(sample.seq),
        )
        new_ids = tuple(sample.token_ids[-1:]) if reason in (FinishReason.STOP, FinishReason.LENGTH) else ()
        self._result.chunks.append(StreamChunk(sample.request.id, sample.index, last_piece + rest, new_ids, completion))
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and entry.keep and entry.context and entry.context.seq:
            self._keep_answer(entry.context, sample)
        else:
            self.runner.cache.release(sample.seq)
        self.scheduler.release(sample.request.id, sample.index)
        del entry.samples[sample.index]
        self._record(entry, completion)

    def _keep_answer(self, context: KeptContext, sample: _Sample) -> None:
        """The context takes over the sample's sequence, memory included."""
        self.scheduler.detach(sample.request.id, sample.index)
        sample.seq.owns_memory = True
        self.drop(context)
        tokens = (*sample.request.prompt_token_ids, *sample.token_ids)
        held = sample.seq.tokens
        context.seq, context.token_ids, context.pending = sample.seq, tokens[:held], tokens[held:]

    def _record(self, entry: _Entry, completion: Completion) -> None:
        entry.done[completion.index] = completion
        if len(entry.done) < entry.request.params.n:
            return
        del self._entries[entry.request.id]
        completions = tuple(entry.done[i] for i in sorted(entry.done))
        ids, timing = entry.request.prompt_token_ids, entry.request.timing(time.monotonic())
        self.totals.add(output := RequestOutput(entry.request.id, ids, completions, timing))
        self._result.outputs.append(output)

    @contextmanager
    def _ending_on_error(self, entries: Sequence[_Entry]) -> Iterator[None]:
        """What is broken off inside, by whatever it is, leaves these requests in no state to go on from."""
        try:
            yield
        except BaseException as error:
            for entry in entries:
                if entry.request.id in self._entries:
                    self._fail(entry, error)
            if not isinstance(error, Exception):
                raise

    def _fail(self, entry: _Entry, error: BaseException) -> None:
        """Work on this request raised: all its samples end with an error."""
        if isinstance(error, _Cancelled):
            self._end_all(entry, FinishReason.CANCELLED, None)
        elif isinstance(error, ShadowKVError):
            self._end_all(entry, FinishReason.ERROR, str(error))
        else:
            logger.error("request %s failed", entry.request.id, exc_info=error)
            self._end_all(entry, FinishReason.ERROR, f"{type(error).__name__}: {error}")

    def _end_all(self, entry: _Entry, reason: FinishReason, message: str | None) -> None:
        started = bool(entry.samples)
        for sample in list(entry.samples.values()):
            self._end(sample, reason, error=message)
        if not started or len(entry.done) < entry.request.params.n:
            self.scheduler.cancel(entry.request.id)
            self._end_unstarted(entry, reason, message)

    def _end_unstarted(self, entry: _Entry, reason: FinishReason, message: str | None) -> None:
        """Samples that never got a sequence: waiting, refused, or failed while they were set up."""
        for index in range(entry.request.params.n):
            if index not in entry.done:
                completion = Completion(index, "", (), reason, error=message)
                self._result.chunks.append(StreamChunk(entry.request.id, index, "", (), completion))
                self._record(entry, completion)

    # Checks.

    def _check(self, request: Request) -> None:
        self._check_tokens(request.prompt_token_ids[request.reused_tokens :])
        if request.capacity_tokens > self.max_context_tokens:
            spec = self.runner.decoder.spec
            raise RequestError(
                f"the prompt has {request.prompt_tokens:,} tokens and max_tokens is {request.params.max_tokens:,}, "
                f"{request.capacity_tokens:,} together; at most {self.max_context_tokens:,} are served (the model "
                f"takes {spec.context_tokens:,}: {spec.context_limit}). Shorten the prompt or lower max_tokens"
            )

    def _check_tokens(self, token_ids: tuple[int, ...]) -> None:
        vocab = self.runner.decoder.spec.vocab
        if not token_ids:
            raise RequestError("the prompt has no tokens; give at least one")
        for token in token_ids:
            if type(token) is not int or not 0 <= token < vocab:
                raise RequestError(f"the prompt holds the token id {token!r}; the model has ids 0 to {vocab - 1}")
