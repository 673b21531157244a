"""Where a model runs, in which precision, and which plan and memory it gets there."""

import logging
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

import torch

from shadowkv.cache.arena import Arena
from shadowkv.cache.base import Cache
from shadowkv.cache.shadowkv_layout import ExactRegion
from shadowkv.config import CacheConfig, ShadowKVConfig
from shadowkv.engine.choices import dense_tokens, device_bandwidth, with_larger_resident_sets
from shadowkv.engine.graphs import StepRunner
from shadowkv.engine.memory import Memory
from shadowkv.engine.plan import Plan, make_plan, require_fit
from shadowkv.errors import CapacityError, ConfigError
from shadowkv.models.decoder import Decoder
from shadowkv.models.spec import ModelSpec

logger = logging.getLogger(__name__)

SMALLEST_CONTEXT_TOKENS = 256
"""The shortest context that a plan is made for when nobody asked for one."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def find_device(name: str) -> torch.device:
    """The device of a name; "auto" is the first GPU if there is one, else the CPU.

    Raises:
        ConfigError: no such device on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}; allowed: auto, cpu, cuda, cuda:0, ...") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; allowed: auto, cpu, cuda, cuda:0, ...")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}; this machine has {torch.cuda.device_count()} GPUs that torch can use")
    return device


def parse_dtype(name: str) -> torch.dtype | Literal["auto"]:
    """The dtype of a name.

    Raises:
        ConfigError: it is none of those that models run in.
    """
    if name == "auto":
        return "auto"
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; allowed: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def choose_plan(
    spec: ModelSpec,
    config: CacheConfig,
    dtype: torch.dtype,
    memory: Memory,
    max_context_tokens: int | None,
    max_batch: int,
    *,
    bandwidth: float | None,
) -> tuple[Plan, CacheConfig]:
    """The plan for the context that was asked for, or for the longest that fits, halving from the model's; and the
    settings with what they left open decided.

    Args:
        bandwidth: of the device's memory in bytes a second, where decoding runs by kernels; else None.
    """
    if max_batch < 1:
        raise ConfigError(f"max_batch is {max_batch}; it must be at least 1")

    def plan_for(settings: CacheConfig, context_tokens: int) -> Plan:
        return make_plan(
            spec,
            settings,
            dtype=dtype,
            context_tokens=context_tokens,
            output_tokens=0,
            memory=memory,
            max_batch=max_batch,
            kernels=bandwidth is not None,
        )

    context = max_context_tokens if max_context_tokens is not None else spec.context_tokens
    while True:
        plan = plan_for(config, context)
        if plan.batch or max_context_tokens is not None or context // 2 < SMALLEST_CONTEXT_TOKENS:
            require_fit(plan)
            break
        context //= 2
    if not isinstance(config, ShadowKVConfig):
        return plan, config
    if bandwidth is not None:
        for larger in with_larger_resident_sets(config):
            if (roomy := plan_for(larger, context)).batch == plan.batch:
                plan, config = roomy, larger
                break
    # A whole sequence takes more of the device than a longer one that is compressed. Where the engine decides, it
    # must be so for max_batch of them, so that no request has to wait for it.
    decides = config.dense_tokens is None and config.exact_while_fits and bandwidth is not None
    limit = config.dense_tokens or 0
    if decides and bandwidth is not None:
        limit = dense_tokens(spec.geometry(dtype), config, max_batch, bandwidth)
    limit = min(limit, context)
    while limit > ExactRegion.of(replace(config, dense_tokens=0)).fits:
        whole = replace(config, dense_tokens=limit) if decides else config
        plan = plan_for(whole, context)
        room = memory.device_bytes - plan.weight_bytes - plan.activation_bytes - plan.chosen.step_bytes
        if memory.shared:
            room -= plan.batch * plan.chosen.sequence_host_bytes
        whole_bytes = plan_for(whole, limit).chosen.sequence_device_bytes
        rows = min(room // whole_bytes, max_batch)
        if rows == max_batch or (not decides and rows >= 1):
            arena = max(plan.device_arena_bytes, rows * whole_bytes)
            return replace(plan, device_arena_bytes=arena, note=_whole_note(limit, context)), whole
        if not decides:
            raise CapacityError(
                f"dense_tokens is {config.dense_tokens:,}: a sequence of {limit:,} tokens kept whole needs "
                f"{whole_bytes:,} bytes on the device, where {max(room, 0):,} are left for sequences; lower it"
            )
        limit //= 2
    if decides:
        config = replace(config, dense_tokens=0)
    return plan_for(config, context), config


def _whole_note(limit: int, context: int) -> str:
    note = (
        f"sequences of up to {limit:,} tokens, answer included, stay on the device and are attended densely, which is "
        "faster there"
    )
    return note if limit >= context else f"{note}; longer ones are compressed"


def has_kernels(device: torch.device) -> bool:
    """Whether decoding runs by kernels on this device."""
    return device.type == "cuda" and find_spec("triton") is not None


def use_device(device: torch.device) -> None:
    """Make a GPU the current one, on which kernels are launched and graphs captured."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)


def measured_bandwidth(device: torch.device) -> float | None:
    """Of the device's memory, in bytes a second; None where decoding does not run by kernels."""
    return device_bandwidth(device) if has_kernels(device) else None


def make_steps(decoder: Decoder, cache: Cache[Any, Any], max_rows: int, capacity_tokens: int) -> StepRunner | None:
    """How batches decode: by kernels on a GPU; None where sequences are computed one after the other."""
    if decoder.device.type != "cuda":
        return None
    if not has_kernels(decoder.device):
        logger.warning("Triton is not installed: decoding runs sequence by sequence in plain PyTorch, and slowly")
        return None
    step = cache.make_step(max_rows, capacity_tokens)
    if step is None:
        logger.warning("%s has no kernels for these settings: decoding runs sequence by sequence, slowly", cache.name)
        return None
    return StepRunner(decoder, step)


def make_arenas(plan: Plan, device: torch.device) -> tuple[Arena, Arena]:
    """Memory for as many of the longest sequences as the plan has."""
    on_host = plan.batch * plan.chosen.sequence_host_bytes
    return Arena(plan.device_arena_bytes, device), Arena(on_host, "cpu", pinned=device.type == "cuda")
