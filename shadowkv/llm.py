"""The front door: a model, a cache method and memory become something that answers prompts."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from shadowkv.cache.arena import Arena
from shadowkv.cache.methods import method_of
from shadowkv.config import CacheConfig, SamplingParams, ShadowKVConfig
from shadowkv.context import Context, Progress, Prompt, Stream, as_list
from shadowkv.engine.engine import Engine, KeptContext
from shadowkv.engine.memory import Memory, find_memory
from shadowkv.engine.placement import (
    choose_plan,
    find_device,
    make_arenas,
    make_steps,
    measured_bandwidth,
    parse_dtype,
    use_device,
)
from shadowkv.engine.plan import Plan
from shadowkv.engine.request import Request, RequestOutput, StreamChunk
from shadowkv.engine.runner import Runner
from shadowkv.engine.scheduler import Scheduler
from shadowkv.engine.tokenizer import Tokenizer
from shadowkv.engine.totals import Totals
from shadowkv.errors import ConfigError, RequestError
from shadowkv.models.decoder import Decoder
from shadowkv.models.load import load_decoder, load_spec, resolve_dtype
from shadowkv.models.locate import locate
from shadowkv.models.spec import ModelSpec

Message = Mapping[str, object]


class LLM:
    """A model that is ready to answer.

    Args:
        model: directory in Hugging Face layout, GGUF file, or a known name (see ``models.locate``).
        cache: the method and its settings; its type chooses the method.
        adapter: directory of a LoRA adapter in peft's format.
        device: "auto" is the first GPU if there is one, else the CPU.
        dtype: "auto" is the checkpoint's own on a GPU and float32 on a CPU.
        device_memory_bytes: for weights, activations and caches; by default most of what is free.
        host_memory_bytes: for values; by default most of what is free.
        max_context_tokens: longest prompt plus answer; by default the most that the model takes and the
            memory holds.
        max_batch: sequences that run at the same time, at most.
        progress: told how loading and prefills go.

    Raises:
        CapacityError: the plan does not fit; nothing has been allocated then.
        CheckpointError, UnsupportedModelError: the model cannot be loaded.
        ConfigError: a setting is wrong.
    """

    def __init__(
        self,
        model: str,
        *,
        cache: CacheConfig | None = None,
        adapter: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        device_memory_bytes: int | None = None,
        host_memory_bytes: int | None = None,
        max_context_tokens: int | None = None,
        max_batch: int = 64,
        progress: Progress | None = None,
    ) -> None:
        config: CacheConfig = cache if cache is not None else ShadowKVConfig()
        files = locate(model, adapter)
        spec = load_spec(files)
        where = find_device(device)
        chosen_dtype = resolve_dtype(spec, where, parse_dtype(dtype))
        memory = find_memory(where, device_memory_bytes, host_memory_bytes)
        use_device(where)
        bandwidth = measured_bandwidth(where)
        plan, config = choose_plan(
            spec, config, chosen_dtype, memory, max_context_tokens, max_batch, bandwidth=bandwidth
        )
        tokenizer = Tokenizer.load(files.path)
        on_weights = _stage(progress, "loading weights")
        decoder = load_decoder(files, device=where, dtype=chosen_dtype, progress=on_weights)
        self._max_batch = max_batch
        self._build(decoder, tokenizer, config, plan, progress)

    def _build(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        config: CacheConfig,
        plan: Plan,
        progress: Progress | None,
        arenas: tuple[Arena, Arena] | None = None,
    ) -> None:
        self.plan = plan
        self.config = config
        self.tokenizer = tokenizer
        self.decoder = decoder
        self._progress = progress
        self._ids = itertools.count()
        self._finished: dict[str, RequestOutput] = {}
        self._streams: dict[str, deque[StreamChunk]] = {}
        geometry, method = self.spec.geometry(decoder.dtype), method_of(config)
        if arenas is None:
            if progress is not None and decoder.device.type == "cuda":  # locking takes about a second per GB
                progress("locking host memory", 0, plan.batch * plan.chosen.sequence_host_bytes)
            arenas = make_arenas(plan, decoder.device)
        device, host = arenas
        cache = method(geometry, config, decoder.rope, device, host)

        def price(capacity_tokens: int) -> tuple[int, int]:
            bytes_of = method.price(geometry, config, capacity_tokens)
            return bytes_of.device_bytes, bytes_of.host_bytes

        self.engine = Engine(
            Runner(decoder, cache, make_steps(decoder, cache, self._max_batch, self.max_context_tokens)),
            tokenizer,
            Scheduler(device, host, price, max_batch=self._max_batch),
            max_context_tokens=self.max_context_tokens,
            end_token_ids=tokenizer.end_token_ids,
        )

    def with_cache(self, cache: CacheConfig) -> "LLM":
        """The same loaded model under another method, with memory of its own beside this one's.

        Raises:
            CapacityError: the memory that is free now does not suffice.
        """
        memory = find_memory(self.decoder.device, None, None)
        weights = self.plan.weight_bytes  # are there already, and are counted by the plan once more
        memory = Memory(memory.device_bytes + weights, memory.host_bytes, memory.shared)
        bandwidth, dtype = measured_bandwidth(self.decoder.device), self.decoder.dtype
        plan, cache = choose_plan(
            self.spec, cache, dtype, memory, self.max_context_tokens, self._max_batch, bandwidth=bandwidth
        )
        return self.under(cache, plan, make_arenas(plan, self.decoder.device), max_batch=self._max_batch)

    def under(self, cache: CacheConfig, plan: Plan, arenas: tuple[Arena, Arena], *, max_batch: int) -> "LLM":
        """The same loaded model under another method, in this memory; others may use it at other times."""
        other = LLM.__new__(LLM)
        other._max_batch = max_batch
        other._build(self.decoder, self.tokenizer, cache, plan, self._progress, arenas)
        return other

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec

    @property
    def max_context_tokens(self) -> int:
        """The longest prompt plus answer that is served."""
        return self.plan.context_tokens + self.plan.output_tokens

    @property
    def totals(self) -> Totals:
        """What all requests together have taken so far."""
        return self.engine.totals

    @property
    def computed_tokens(self) -> int:
        """Tokens of prompts and answers computed so far, those of running requests too."""
        return self.engine.runner.computed_tokens

    # All at once.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or several together; the outputs are in the order of the prompts.

        Raises:
            RequestError, CapacityError: a prompt cannot be served; none has been started then.
        """
        with self._reporting(progress):
            return self._run([self.tokenize(prompt) for prompt in as_list(prompts)], params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several together, through the model's chat template."""
        conversations: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        with self._reporting(progress):
            return self._run([self.tokenizer.encode_chat(c) for c in conversations], params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Answer one prompt piece by piece. A stream that is closed early cancels its request."""
        return Stream(self, self.submit(prompt, params))

    def context(self, prompt: Prompt, *, progress: Progress | None = None) -> Context:
        """Prefill a text once, to ask several questions of it.

        Raises:
            RequestError: empty, too long, or an unknown token.
            CapacityError: the memory is not there.
        """
        with self._reporting(progress):
            return Context(self, self.engine.keep(tuple(self.tokenize(prompt))))

    # A step at a time.

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> str:
        """Queue a request for :meth:`step`; its id.

        Raises:
            RequestError: empty, too long, an unknown token, or an id that is in use.
            CapacityError: it would not fit even alone.
        """
        return self._submit(self.tokenize(prompt), params or SamplingParams(), request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step; the requests that ended with it."""
        self._advance()
        outputs, self._finished = list(self._finished.values()), {}
        return outputs

    def wait(self, ids: Sequence[str]) -> list[RequestOutput]:
        """Step until these requests have ended; others that end meanwhile are kept for :meth:`step`.

        The outputs are in the order of the ids.

        Raises:
            RequestError: there is no such request, or its output was given out already.
        """
        wanted, mine = set(ids), dict[str, RequestOutput]()
        while len(mine) < len(wanted):
            self._advance()
            mine |= {name: self._finished.pop(name) for name in wanted & self._finished.keys()}
            if not self.engine.has_work and (gone := wanted - mine.keys()):
                raise RequestError(f"there is no request {min(gone)!r} to wait for")
            if self._progress is not None:
                self._progress("requests", len(mine), len(ids))
        return [mine[request_id] for request_id in ids]

    def cancel(self, request_id: str) -> bool:
        """End a request now. Whether it was there."""
        return self.engine.cancel(request_id)

    @property
    def has_work(self) -> bool:
        """Whether requests are waiting, running, or ended and not yet reported by :meth:`step`."""
        return self.engine.has_work or bool(self._finished)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """A prompt's token ids.

        Raises:
            RequestError: neither text nor token ids.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise RequestError(f"a prompt is text or a sequence of token ids; got {type(prompt).__name__}")
        return [*prompt]

    def _submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        context: KeptContext | None = None,
        keep: bool = False,
    ) -> str:
        if not isinstance(params, SamplingParams):
            raise _not_settings(params)
        name = request_id if request_id is not None else f"request-{next(self._ids)}"
        reused = len(context.token_ids) if context is not None else 0
        request = Request(name, token_ids, params, arrival=time.monotonic(), reused_tokens=reused)
        self.engine.submit(request, context, keep=keep)
        return name

    def _run(
        self, prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not isinstance(params, Sequence):
            raise _not_settings(params)
        if len(params) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts and {len(params)} sampling settings; give one for each, or one")
        ids: list[str] = []
        try:
            for prompt, own in zip(prompts, params, strict=True):
                ids.append(self._submit(prompt, own))
            return self.wait(ids)
        except BaseException:
            self._abandon(ids)
            raise

    @contextmanager
    def _reporting(self, progress: Progress | None) -> Iterator[None]:
        """Tell ``progress``, or whoever was given when the model was opened, how this call goes."""
        usual = self._progress
        self._progress = progress or usual
        self.engine.on_prefill = _stage(self._progress, "prefill")
        try:
            yield
        finally:
            self._progress = usual
            self.engine.on_prefill = None

    def _advance(self) -> None:
        """One step of the engine; whoever waits for something finds it in its place."""
        result = self.engine.step()
        for chunk in result.chunks:
            if chunk.request_id in self._streams:
                self._streams[chunk.request_id].append(chunk)
        for output in result.outputs:
            if self._streams.pop(output.request_id, None) is None:
                self._finished[output.request_id] = output

    def _abandon(self, ids: Sequence[str]) -> None:
        """Cancel requests whose caller has gone, and forget what came of them."""
        for request_id in ids:
            self.engine.cancel(request_id)
            self.engine.forget(request_id)
            self._finished.pop(request_id, None)
            self._streams.pop(request_id, None)


def _not_settings(given: object) -> ConfigError:
    return ConfigError(f"the sampling settings are of type {type(given).__name__}; give SamplingParams")


def _stage(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(name, done, total)
