"""One method at one context length: fills a batch of sequences, decodes, and accounts for the time."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shadowkv.bench.ceilings import Ceilings
from shadowkv.bench.parts import PartTimes, read_trace, split_by_part
from shadowkv.bench.statistics import Spread
from shadowkv.bench.synthetic import SYNTHETIC_PREFILL, synthetic_prompt
from shadowkv.bench.timing import timer
from shadowkv.bench.trace_index import TraceIndex, label
from shadowkv.bench.traffic import Step, StepTraffic, full_kv_bytes, step_traffic
from shadowkv.cache.arena import Arena
from shadowkv.cache.base import Cache, CachedSequence
from shadowkv.cache.methods import method_of
from shadowkv.cache.shadowkv import ShadowKVCache
from shadowkv.config import CacheConfig, ShadowKVConfig
from shadowkv.engine.placement import make_steps
from shadowkv.engine.plan import Plan, equivalent_bandwidth
from shadowkv.engine.runner import Runner
from shadowkv.models.decoder import Decoder

Report = Callable[[str, int, int], None]
GB = 1e9

EQUIVALENT = (
    "keys and values that full attention would read for this batch in one step, over the whole step's time "
    "(weights, selection and fetches in it)"
)
"""What the measured equivalent bandwidth is."""


@dataclass(frozen=True)
class Job:
    """What is measured, for every method and length.

    ``batch`` None is the largest that fits. ``hit_rate`` None leaves selections to the index.
    ``prompt`` None fills the cache without computing one. ``warmup`` is at least 1: the first step compiles and
    captures.
    """

    steps: int
    warmup: int
    traced_steps: int
    batch: int | None = None
    hit_rate: float | None = None
    prompt: tuple[int, ...] | None = None
    trace: Path | None = None

    @property
    def output_tokens(self) -> int:
        """Steps of every kind."""
        return self.steps + self.warmup + self.traced_steps


@dataclass(frozen=True)
class Decoded:
    """Figures of one method at one length. Prefill and index building are per sequence, in seconds; bytes and
    milliseconds are per step of the whole batch."""

    method: str
    settings: str
    by: str
    """How steps were computed."""
    context_tokens: int
    batch: int
    largest_batch: int
    limit: str
    tokens_per_second: float
    step: Spread
    prefill_s: float | None
    index_s: float
    hit_rate: float | None
    fetched_bytes: float
    device_bytes: int
    host_bytes: int
    traffic: StepTraffic | None
    hbm_ms: float | None
    bus_ms: float | None
    parts: PartTimes | None
    equivalent_gb_s: float | None
    equivalent_formula_gb_s: float | None
    synthetic: tuple[str, ...]
    speedup: float | None = None
    """Tokens per second over full attention's at the same length, each at its own batch."""

    @property
    def floor_share(self) -> float | None:
        """The step over the longer of its times at the memory's and the bus's ceilings."""
        if self.hbm_ms is None or self.bus_ms is None:
            return None
        return self.step.median_ms / max(self.hbm_ms, self.bus_ms)

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self) | {"step_over_floor": self.floor_share}


@dataclass(frozen=True)
class Declined:
    """A method that does not fit at a length."""

    method: str
    context_tokens: int
    reason: str

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


Row = Decoded | Declined


def with_speedups(rows: Sequence[Row]) -> list[Row]:
    """Every row with its ratio to full attention at its length, where that ran."""
    full = {row.context_tokens: row for row in rows if isinstance(row, Decoded) and row.method == "full"}
    made: list[Row] = []
    for row in rows:
        if isinstance(row, Decoded) and row.context_tokens in full:
            row = replace(row, speedup=row.tokens_per_second / full[row.context_tokens].tokens_per_second)
        made.append(row)
    return made


class TimedSink:
    """Gives a prompt's layers to a cache and sums the time that it takes over them: that is index building."""

    def __init__(self, cache: Cache[Any, Any], device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._host_seconds = 0.0

    @property
    def prompt_queries(self) -> int:
        return self._cache.prompt_queries

    def begin_prompt(self, seq: Any, tokens: int) -> None:
        self._cache.begin_prompt(seq, tokens)

    def take_layer(
        self, layer: int, seq: Any, k_pre_SKD: Tensor, k_KSD: Tensor, v_KSD: Tensor, q_NWD: Tensor | None = None
    ) -> None:
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            pair = timer(), timer()
            self._events.append(pair)
            pair[0].record()
        started = time.perf_counter()
        self._cache.take_layer(layer, seq, k_pre_SKD, k_KSD, v_KSD, q_NWD)
        if on_gpu:
            self._events[-1][1].record()
        else:
            self._host_seconds += time.perf_counter() - started

    def seconds(self) -> float:
        """In all so far (waits for the device)."""
        wait(self._device)
        return self._host_seconds + sum(float(start.elapsed_time(end)) for start, end in self._events) / 1e3


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class _Counts:
    """Sums over the batch's sequences."""

    hits: int
    misses: int
    fetched_chunks: int
    fetched_bytes: int

    @classmethod
    def of(cls, cache: Cache[Any, Any], seqs: Sequence[CachedSequence]) -> "_Counts":
        stats = [cache.stats(seq) for seq in seqs]
        return cls(
            sum(one.hits for one in stats),
            sum(one.misses for one in stats),
            sum(one.fetched_chunks for one in stats),
            sum(one.fetched_bytes for one in stats),
        )

    def since(self, before: "_Counts") -> "_Counts":
        return _Counts(
            self.hits - before.hits,
            self.misses - before.misses,
            self.fetched_chunks - before.fetched_chunks,
            self.fetched_bytes - before.fetched_bytes,
        )


class Batch:
    """A batch of sequences of one length that is decoded greedily, each step's tokens fed to the next."""

    def __init__(self, runner: Runner, seqs: Sequence[CachedSequence], first_tokens: Sequence[int]) -> None:
        self._runner = runner
        self._seqs = seqs
        self._tokens = list(first_tokens)

    def step(self) -> float:
        """One step, from token ids on the host to token ids on the host; its milliseconds."""
        started = time.perf_counter()
        logits_BV = self._runner.decode(self._seqs, self._tokens)
        self._tokens = logits_BV.argmax(-1).tolist()  # waits for the device
        return (time.perf_counter() - started) * 1e3


def open_sequences(
    decoder: Decoder, cache: Cache[Any, Any], plan: Plan, batch: int, job: Job, report: Report
) -> tuple[list[CachedSequence], float | None, float]:
    """A batch of filled sequences, and the seconds of one's prefill and of one's index building."""
    sink, device = TimedSink(cache, decoder.device), decoder.device
    seqs: list[CachedSequence] = []
    wait(device)
    started = time.perf_counter()
    for i in range(batch):
        seq = cache.open(plan.context_tokens + plan.output_tokens)
        if job.prompt is None:
            synthetic_prompt(cache, sink, seq, decoder.spec, plan.context_tokens, seed=i)
        else:
            with torch.inference_mode():
                decoder.prefill(prompt_of(job.prompt, plan.context_tokens, i, batch), sink, seq)
        seqs.append(seq)
        report(f"{cache.name}: sequences", i + 1, batch)
    index_s = sink.seconds()
    prefill_s = (time.perf_counter() - started) / batch if job.prompt is not None else None
    return seqs, prefill_s, index_s / batch


def prompt_of(token_ids: Sequence[int], tokens: int, i: int, batch: int) -> Tensor:
    """The i-th sequence's prompt: the text from a place of its own on, and again from its start."""
    start = len(token_ids) * i // batch
    return torch.tensor([token_ids[(start + j) % len(token_ids)] for j in range(tokens)])


def decode_method(
    decoder: Decoder,
    config: CacheConfig,
    plan: Plan,
    job: Job,
    host: Arena,
    ceilings: Ceilings | None,
    labels: Sequence[str],
    report: Report,
) -> Decoded:
    """Fill, decode, measure. All memory but the host arena is given back afterwards.

    Args:
        host: at least what the plan's sequences keep there, all of it free; shared by the runs of a command,
            since locking memory takes long.
        ceilings: what the bytes are compared with; None leaves that out.
        labels: what is synthetic about the model.
    """
    spec, device = decoder.spec, decoder.device
    batch = plan.batch if job.batch is None else min(plan.batch, job.batch)
    cache = method_of(config)(
        spec.geometry(decoder.dtype),
        config,
        decoder.rope,
        Arena(batch * plan.chosen.sequence_device_bytes, device),
        host,
    )
    said = [*labels, *([SYNTHETIC_PREFILL] if job.prompt is None else [])]
    if job.hit_rate is not None and isinstance(cache, ShadowKVCache):
        cache.index = TraceIndex(cache.index, job.hit_rate, cache.config.budget_chunks)
        said.append(label(job.hit_rate))
    seqs: list[CachedSequence] = []
    try:
        seqs, prefill_s, index_s = open_sequences(decoder, cache, plan, batch, job, report)
        runner = Runner(decoder, cache, make_steps(decoder, cache, batch, seqs[0].capacity_tokens))
        running = Batch(runner, seqs, [i % spec.vocab for i in range(batch)])
        for _ in range(job.warmup):
            running.step()
        before = _Counts.of(cache, seqs)
        times = []
        for i in range(job.steps):
            times.append(running.step())
            report(f"{cache.name}: steps", i + 1, job.steps)
        counted = _Counts.of(cache, seqs).since(before)
        tokens = seqs[0].tokens - job.steps // 2
        parts = traced(running, job, device, f"{cache.name}.{plan.context_tokens}")
    finally:
        for seq in seqs:
            cache.release(seq)
    by = "kernels" if runner.steps is not None else f"PyTorch, sequence by sequence, on {device.type}"
    step = Spread.of(times)
    at = Step(batch, tokens, decoder.dtype.itemsize, counted.fetched_chunks / job.steps)
    traffic = step_traffic(spec, config, at)
    selected = counted.hits + counted.misses
    hit_rate = counted.hits / selected if selected else None
    formula = None
    if isinstance(config, ShadowKVConfig) and ceilings is not None and hit_rate is not None:
        formula = equivalent_bandwidth(config, tokens, ceilings.hbm_gb_s, ceilings.bus_gb_s, hit_rate)
    return Decoded(
        method=cache.name,
        settings=config.describe(),
        by=by,
        context_tokens=plan.context_tokens,
        batch=batch,
        largest_batch=plan.chosen.largest_batch,
        limit=plan.chosen.limit,
        tokens_per_second=batch * len(times) / sum(times) * 1e3,
        step=step,
        prefill_s=prefill_s,
        index_s=index_s,
        hit_rate=hit_rate,
        fetched_bytes=counted.fetched_bytes / job.steps,
        device_bytes=batch * plan.chosen.sequence_device_bytes + plan.chosen.step_bytes + plan.weight_bytes,
        host_bytes=batch * plan.chosen.sequence_host_bytes,
        traffic=traffic,
        hbm_ms=None if traffic is None or ceilings is None else ceilings.device_ms(traffic.device_bytes),
        bus_ms=None if traffic is None or ceilings is None else ceilings.bus_ms(traffic.bus_bytes),
        parts=parts,
        equivalent_gb_s=full_kv_bytes(spec, at) / step.median_ms * 1e3 / GB,
        equivalent_formula_gb_s=formula,
        synthetic=tuple(said),
    )


def traced(running: Batch, job: Job, device: torch.device, name: str) -> PartTimes | None:
    """Some more steps under the profiler; None where there is no GPU whose kernels it could see."""
    on_gpu = device.type == "cuda"
    if not job.traced_steps or not (on_gpu or job.trace is not None):
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
    if job.trace is not None or not on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CPU)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(job.traced_steps):
            running.step()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        if job.trace is not None:
            path = job.trace.with_name(f"{job.trace.stem}.{name}.json")
        profiler.export_chrome_trace(str(path))
        return split_by_part(read_trace(path), job.traced_steps)
