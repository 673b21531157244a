"""Several methods of one loaded model that run in turns, in the same memory, on prompts that are computed once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shadowkv.cache.arena import Arena
from shadowkv.cache.layout import total_bytes
from shadowkv.cache.methods import method_of
from shadowkv.cache.recorded import RecordedPrompt, recorded_bytes
from shadowkv.config import CacheConfig
from shadowkv.engine.placement import has_kernels
from shadowkv.engine.plan import activation_bytes, make_plan
from shadowkv.errors import CapacityError
from shadowkv.llm import LLM

FEWEST_SEQUENCES = 3
"""A dialogue takes a context, the copy that an answer is made on, and room where the next one does not fit between."""


class Lineup:
    """Methods that are compared with each other.

    Every setting is taken as it is given: nothing is left to the engine to decide.

    Args:
        llm: the loaded model; what memory it was given is what all of them share.
        context_tokens: the longest prompt plus answer.
        max_rows: at most so many sequences run at the same time; fewer where memory is short (:attr:`rows`).

    Raises:
        CapacityError: not even one sequence fits; says what it takes.
        ConfigError: a method's settings do not fit the model.
    """

    def __init__(self, llm: LLM, configs: Sequence[CacheConfig], *, context_tokens: int, max_rows: int) -> None:
        self.llm = llm
        self.configs = tuple(configs)
        self.context_tokens = context_tokens
        decoder = llm.decoder
        self._geometry = decoder.spec.geometry(decoder.dtype)
        self._kernels = has_kernels(decoder.device)
        for config in configs:
            method_of(config).check(self._geometry, config)
        nothing = Arena(0, decoder.device)
        caches = [method_of(c)(self._geometry, c, decoder.rope, nothing, nothing) for c in configs]
        self._prompt_queries = max((cache.prompt_queries for cache in caches), default=0)
        self.rows = self._find_rows(max_rows)
        held, (device_bytes, host_bytes) = max(self.rows, FEWEST_SEQUENCES), self._dearest()
        on_gpu = decoder.device.type == "cuda"
        self._arenas = Arena(held * device_bytes, decoder.device), Arena(held * host_bytes, "cpu", pinned=on_gpu)
        self._members: dict[CacheConfig, LLM] = {}
        self._recorded: dict[tuple[int, ...], RecordedPrompt] = {}

    def member(self, config: CacheConfig) -> LLM:
        """The model under one of the methods. Its sequences are to be released before another's turn comes."""
        if config not in self._members:
            assert config in self.configs, "no such method in the lineup"
            decoder, memory = self.llm.decoder, self.llm.plan.memory
            plan = make_plan(
                decoder.spec,
                config,
                dtype=decoder.dtype,
                context_tokens=self.context_tokens,
                output_tokens=0,
                memory=memory,
                max_batch=self.rows,
                kernels=self._kernels,
            )
            made = self.llm.under(config, plan, self._arenas, max_batch=self.rows)
            made.engine.runner.recorded = self._recorded
            if made.engine.runner.steps is not None:
                made.engine.runner.steps.one_size = True
            self._members[config] = made
        return self._members[config]

    @contextmanager
    def prompts(self, prompts: Sequence[Sequence[int]]) -> Iterator[None]:
        """Compute these prompts now, for every member; as many as :attr:`rows` at a time have memory."""
        assert len(prompts) <= self.rows, "more prompts than there is memory for"
        try:
            for ids in prompts:
                if tuple(ids) not in self._recorded:
                    self._recorded[tuple(ids)] = self.llm.engine.runner.record(ids, self._prompt_queries)
            yield
        finally:
            self._recorded.clear()

    def _dearest(self) -> tuple[int, int]:
        """Device and host bytes of the sequence that takes most of each."""
        prices = [method_of(c).price(self._geometry, c, self.context_tokens) for c in self.configs]
        return max(price.device_bytes for price in prices), max(price.host_bytes for price in prices)

    def _need(self, rows: int) -> tuple[int, int]:
        """Device and host bytes that ``rows`` sequences take, with everything else."""
        g, decoder, held = self._geometry, self.llm.decoder, max(rows, FEWEST_SEQUENCES)
        device_bytes, host_bytes = self._dearest()
        steps = 0
        if self._kernels:
            regions = [method_of(c).step_regions(g, c, rows, self.context_tokens) for c in self.configs]
            steps = sum(total_bytes(one or []) for one in regions)
        own = self.llm.plan.weight_bytes + self.llm.plan.device_arena_bytes + self.llm.plan.chosen.step_bytes
        work = activation_bytes(decoder.spec, decoder.dtype, self.context_tokens, rows)
        records = rows * recorded_bytes(g, self.context_tokens, self._prompt_queries)
        return own + work + steps + records + held * device_bytes, held * host_bytes

    def _find_rows(self, max_rows: int) -> int:
        memory = self.llm.plan.memory
        for rows in range(max_rows, 0, -1):
            device, host = self._need(rows)
            if memory.shared and device + host <= memory.device_bytes:
                return rows
            if not memory.shared and device <= memory.device_bytes and host <= memory.host_bytes:
                return rows
        device, host = self._need(1)
        there = "together" if memory.shared else f"and {memory.host_bytes:,} on the host"
        raise CapacityError(
            f"comparing {len(self.configs)} methods at {self.context_tokens:,} tokens needs {device:,} bytes on the "
            f"device and {host:,} on the host; there are {memory.device_bytes:,} {there}. Compare fewer methods at a "
            "time, or a shorter context"
        )
