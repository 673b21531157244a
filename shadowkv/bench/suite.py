"""Methods at lengths under one memory: plans all of them, then runs what fits."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shadowkv.bench.ceilings import Ceilings
from shadowkv.bench.decode import Declined, Job, Row, decode_method, with_speedups
from shadowkv.cache.arena import Arena
from shadowkv.cache.base import Geometry
from shadowkv.config import CacheConfig, ShadowKVConfig
from shadowkv.engine.choices import dense_tokens
from shadowkv.engine.memory import Memory
from shadowkv.engine.plan import Plan, make_plan
from shadowkv.errors import CapacityError
from shadowkv.models.decoder import Decoder
from shadowkv.models.spec import ModelSpec

Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Planned:
    """One run to be made: its method and its plan."""

    name: str
    config: CacheConfig
    plan: Plan

    def sequences(self, job: Job) -> int:
        """How many run: what was asked for, but no more than fit."""
        return self.plan.batch if job.batch is None else min(self.plan.batch, job.batch)


def plan_runs(
    spec: ModelSpec,
    methods: Mapping[str, CacheConfig],
    contexts: Sequence[int],
    job: Job,
    dtype: torch.dtype,
    memory: Memory,
    *,
    bandwidth: float | None,
) -> list[Planned]:
    """The plan of every method at every length, method by method within a length.

    Args:
        bandwidth: of the device's memory in bytes a second, where decoding runs by kernels. With a batch it
            decides which contexts ShadowKV keeps whole, where ``dense_tokens`` leaves that open.

    Raises:
        RequestError: a length is beyond what the model computes.
        ConfigError: settings do not fit the model.
        CapacityError: nothing fits at all.
    """
    runs = [
        Planned(
            name,
            settings,
            make_plan(
                spec,
                settings,
                dtype=dtype,
                context_tokens=context,
                output_tokens=job.output_tokens,
                memory=memory,
                max_batch=job.batch,
                kernels=bandwidth is not None,
            ),
        )
        for context in contexts
        for name, config in methods.items()
        for settings in [_decided(config, spec.geometry(dtype), context + job.output_tokens, job.batch, bandwidth)]
    ]
    if not any(run.plan.batch for run in runs):
        raise CapacityError(_too_little(runs[0].plan))
    return runs


def _decided(
    config: CacheConfig, geometry: Geometry, capacity_tokens: int, batch: int | None, bandwidth: float | None
) -> CacheConfig:
    """ShadowKV's settings, with or without the context kept whole as the engine would decide."""
    if not isinstance(config, ShadowKVConfig) or config.dense_tokens is not None or batch is None or bandwidth is None:
        return config
    whole = capacity_tokens <= dense_tokens(geometry, config, batch, bandwidth)
    return replace(config, dense_tokens=capacity_tokens) if whole else config


def _too_little(plan: Plan) -> str:
    fixed = plan.weight_bytes + plan.activation_bytes
    return (
        f"one sequence of {plan.context_tokens + plan.output_tokens:,} tokens needs {fixed:,} bytes for weights and "
        f"activations, {plan.chosen.sequence_device_bytes:,} for its cache on the device and "
        f"{plan.chosen.sequence_host_bytes:,} on the host; there are {plan.memory.device_bytes:,} and "
        f"{plan.memory.host_bytes:,}"
    )


def host_bytes(runs: Sequence[Planned], job: Job) -> int:
    """What the run that keeps most on the host needs there; all runs use the same memory, one after the other."""
    return max(run.sequences(job) * run.plan.chosen.sequence_host_bytes for run in runs)


def decode_all(
    decoder: Decoder,
    runs: Sequence[Planned],
    job: Job,
    ceilings: Ceilings | None,
    labels: Sequence[str],
    report: Report,
) -> list[Row]:
    """Every run that fits, with its ratio to full attention; those that do not are named with the reason."""
    host = Arena(host_bytes(runs, job), "cpu", pinned=decoder.device.type == "cuda")
    rows: list[Row] = []
    for done, run in enumerate(runs):
        report("runs", done, len(runs))
        if not run.plan.batch:
            rows.append(Declined(run.name, run.plan.context_tokens, f"out of memory: {_too_little(run.plan)}"))
            continue
        forget(decoder.device)
        rows.append(decode_method(decoder, run.config, run.plan, job, host, ceilings, labels, report))
    report("runs", len(runs), len(runs))
    return with_speedups(rows)


def forget(device: torch.device) -> None:
    """Give back to the system what the run before has held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
