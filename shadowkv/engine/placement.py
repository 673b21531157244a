"""Where a model runs, in which precision, and which plan and memory it gets there."""

from typing import Literal

import torch

from shadowkv.cache.arena import Arena
from shadowkv.config import CacheConfig
from shadowkv.engine.memory import Memory
from shadowkv.engine.plan import Plan, make_plan, require_fit
from shadowkv.errors import ConfigError
from shadowkv.models.spec import ModelSpec

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
) -> Plan:
    """The plan for the context that was asked for, or for the longest that fits, halving from the model's."""
    if max_batch < 1:
        raise ConfigError(f"max_batch is {max_batch}; it must be at least 1")
    context = max_context_tokens if max_context_tokens is not None else spec.context_tokens
    while True:
        plan = make_plan(
            spec, config, dtype=dtype, context_tokens=context, output_tokens=0, memory=memory, max_batch=max_batch
        )
        if plan.batch or max_context_tokens is not None or context // 2 < SMALLEST_CONTEXT_TOKENS:
            require_fit(plan)
            return plan
        context //= 2


def make_arenas(plan: Plan, device: torch.device) -> tuple[Arena, Arena]:
    """Memory for as many of the longest sequences as the plan has."""
    on_device = plan.batch * plan.chosen.sequence_device_bytes
    on_host = plan.batch * plan.chosen.sequence_host_bytes
    return Arena(on_device, device), Arena(on_host, "cpu", pinned=device.type == "cuda")
