"""The memory plan: what everything costs before anything is allocated. Arithmetic only.

Prices of sequences come from the cache methods and are exact. Activations are an estimate from the
shapes that a prefill holds at its peak.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from shadowkv.cache.base import Cache, Geometry, Price
from shadowkv.cache.layout import total_bytes
from shadowkv.cache.methods import method_of
from shadowkv.cache.shadowkv_layout import ranks
from shadowkv.config import CacheConfig, FullConfig, ShadowKVConfig
from shadowkv.engine.memory import Memory
from shadowkv.errors import CapacityError, RequestError
from shadowkv.models.spec import ModelSpec
from shadowkv.ops.chunks import SLICE_TOKENS

PREFILL_SLICE_TOKENS = 4096
"""Tokens of the prompt that pass through a projection or the MLP at a time."""

GB = 1e9


def activation_bytes(spec: ModelSpec, dtype: torch.dtype, context_tokens: int, batch: int) -> int:
    """Peak of one prefill of ``context_tokens``, besides weights and cache, and the logits of a batch.

    All the while there are the residual stream and the positions. Beside them there is either a slice of the
    projections (and of their rotation in float32) with one layer's queries, keys before and after RoPE and
    values; or these and the attention's outputs; or the cache at work (keys and values, and slices of keys
    widened to float32); or a slice of the MLP.
    """
    part, size = min(context_tokens, PREFILL_SLICE_TOKENS), dtype.itemsize
    kv, q = 3 * spec.kv_rows * context_tokens * size, spec.q_rows * context_tokens * size
    fused, turned = spec.q_rows + 2 * spec.kv_rows, 3 * spec.q_rows + spec.head_dim
    projecting = kv + q + part * ((spec.hidden + fused) * size + 4 * turned)
    attention = kv + 2 * q
    widened = 4 * 4 * min(context_tokens, SLICE_TOKENS) * spec.kv_rows
    cache = kv + q + context_tokens * spec.kv_rows * size + widened
    mlp = q + part * (3 * spec.ffn + 4 * spec.hidden) * size
    residual = context_tokens * (spec.hidden * size + 8)  # 8 for a position
    return residual + max(projecting, attention, cache, mlp) + 2 * 4 * batch * spec.vocab


@dataclass(frozen=True)
class MethodPlan:
    """What one method makes of the memory. ``limit`` names what stops a larger batch."""

    method: str
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    sequence_device_bytes: int
    sequence_host_bytes: int
    step_bytes: int
    """What the kernels of a decoding step work in, for the whole batch."""
    largest_batch: int
    limit: str


@dataclass(frozen=True)
class Savings:
    """Key and value bytes of full attention over those that ShadowKV keeps on the device.

    ``paper_formula`` is arXiv 2410.21465's, whose term for outliers and selected chunks lacks a factor
    K*D; ``true_bytes`` is the same account with it; ``all_bytes`` counts whatever is reserved here.
    """

    paper_formula: float
    true_bytes: float
    all_bytes: float


@dataclass(frozen=True)
class Plan:
    """What the machine chose, or would choose."""

    model: str
    dtype: str
    context_tokens: int
    output_tokens: int
    batch: int
    weight_bytes: int
    activation_bytes: int
    device_arena_bytes: int
    """What is allocated for sequences on the device."""
    memory: Memory
    chosen: MethodPlan
    full: MethodPlan
    savings: Savings | None
    equivalent_bandwidth_gb_s: float | None
    assumptions: str | None
    note: str | None

    def to_dict(self) -> dict[str, object]:
        """Everything, for JSON. Units are in the names; memory in bytes."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The plan in words, a fact a line."""
        mem = self.memory
        where = "device and host together" if mem.shared else f"device, {mem.host_bytes / GB:.2f} GB host"
        out = [
            f"{self.model} in {self.dtype}, {self.chosen.method}: up to {self.batch} sequences of "
            f"{self.context_tokens + self.output_tokens:,} tokens in {mem.device_bytes / GB:.2f} GB {where}",
            f"weights {self.weight_bytes / GB:.3f} GB, activations {self.activation_bytes / GB:.3f} GB, decoding "
            f"{self.chosen.step_bytes / GB:.3f} GB; per "
            f"sequence {self.chosen.sequence_device_bytes / GB:.4f} GB on the device, "
            f"{self.chosen.sequence_host_bytes / GB:.4f} GB on the host "
            f"(full attention: {self.full.sequence_device_bytes / GB:.4f} GB)",
        ]
        return [*out, self.note] if self.note else out


def largest_batch(memory: Memory, fixed_bytes: int, price: Price, row_bytes: int) -> tuple[int, str]:
    """How many sequences fit beside what is fixed, each with ``row_bytes`` to be computed in, and what stops one
    more."""
    room = memory.device_bytes - fixed_bytes
    if memory.shared:
        return max(room, 0) // (price.device_bytes + price.host_bytes + row_bytes), "memory"
    on_device = max(room, 0) // (price.device_bytes + row_bytes)
    if price.host_bytes and memory.host_bytes // price.host_bytes < on_device:
        return memory.host_bytes // price.host_bytes, "host memory"
    return on_device, "device memory"


def find_savings(geometry: Geometry, config: ShadowKVConfig, context_tokens: int) -> Savings:
    """See :class:`Savings`. Source: arXiv 2410.21465, section 4.2."""
    width, size = geometry.key_dim, config.chunk_tokens
    full = 2 * context_tokens * width * geometry.layers
    exact_vectors = 2 * (config.budget_chunks + config.outlier_chunks) * size
    paper = true = 0.0
    for rank in ranks(geometry, config):
        common = context_tokens * width / size + context_tokens * rank + rank * width
        paper += common + exact_vectors
        true += common + exact_vectors * width
    price = method_of(config).price(geometry, config, context_tokens)
    reserved = price.device_bytes / geometry.dtype.itemsize
    return Savings(full / paper, full / true, full / reserved)


def equivalent_bandwidth(
    config: ShadowKVConfig, context_tokens: int, gpu_gb_s: float, pcie_gb_s: float, hit_rate: float
) -> float:
    """GB/s at which dense attention would have to read its keys and values to be as fast.

    Source: arXiv 2410.21465, section 4.2.
    """
    size = config.chunk_tokens
    kept = context_tokens / size + 2 * (config.budget_chunks + config.outlier_chunks) * size
    fetched = (1 - hit_rate) * config.budget_chunks * size * gpu_gb_s / pcie_gb_s
    return 2 * context_tokens * gpu_gb_s / (kept + fetched)


def make_plan(
    spec: ModelSpec,
    config: CacheConfig,
    *,
    dtype: torch.dtype,
    context_tokens: int,
    output_tokens: int,
    memory: Memory,
    max_batch: int | None = None,
    gpu_gb_s: float | None = None,
    pcie_gb_s: float | None = None,
    hit_rate: float = 0.6,
    kernels: bool = True,
) -> Plan:
    """Plan for sequences of ``context_tokens`` prompt tokens and ``output_tokens`` generated ones.

    Args:
        max_batch: sequences that run at the same time, at most; None for as many as fit.
        kernels: whether decoding runs by kernels, which work in memory of their own.

    A plan in which nothing fits has ``batch`` 0; :func:`require_fit` refuses it.

    Raises:
        RequestError: the lengths are not positive, or beyond what the model computes.
        ConfigError: the settings do not fit the model.
    """
    if context_tokens < 1 or output_tokens < 0:
        raise RequestError(
            f"the context is {context_tokens} tokens and the output {output_tokens}; give at least 1 and 0"
        )
    capacity = context_tokens + output_tokens
    if capacity > spec.context_tokens:
        raise RequestError(
            f"context and output are {capacity:,} tokens together; {spec.architecture} takes "
            f"{spec.context_tokens:,} ({spec.context_limit})"
        )
    geometry = spec.geometry(dtype)
    weights = spec.weight_bytes(dtype)
    activations = activation_bytes(spec, dtype, context_tokens, max_batch or 1)

    def step_bytes(method: type[Cache[Any, Any]], method_config: CacheConfig, rows: int) -> int:
        return total_bytes(method.step_regions(geometry, method_config, rows, capacity) or [])

    def plan_method(method: type[Cache[Any, Any]], method_config: CacheConfig) -> MethodPlan:
        method.check(geometry, method_config)
        price = method.price(geometry, method_config, capacity)
        step = step_bytes(method, method_config, max_batch or 1) if kernels else 0
        # Without a limit on the batch, every sequence that fits brings the row that it is computed in.
        fixed, row = (step, 0) if max_batch else (0, step)
        fits, limit = largest_batch(memory, weights + activations + fixed, price, row)
        return MethodPlan(
            method.name,
            price.device,
            price.host,
            price.device_bytes,
            price.host_bytes,
            fixed or row * max(fits, 1),
            fits,
            limit,
        )

    chosen = plan_method(method_of(config), config)
    full = plan_method(method_of(FullConfig()), FullConfig())
    savings = bandwidth = assumptions = note = None
    if isinstance(config, ShadowKVConfig):
        savings = find_savings(geometry, config, context_tokens)
        if gpu_gb_s is not None and pcie_gb_s is not None:
            bandwidth = equivalent_bandwidth(config, context_tokens, gpu_gb_s, pcie_gb_s, hit_rate)
            assumptions = (
                f"at {gpu_gb_s:g} GB/s of GPU memory, {pcie_gb_s:g} GB/s of PCIe, hit rate {hit_rate:g} (assumed)"
            )
        if not price_needs_host(chosen):
            note = (
                f"all {capacity:,} tokens fit in the exact region: attended exactly, nothing is compressed, since "
                "dense attention is faster at this length"
            )
    batch = min(chosen.largest_batch, max_batch or chosen.largest_batch)
    return Plan(
        model=spec.architecture,
        dtype=str(dtype).removeprefix("torch."),
        context_tokens=context_tokens,
        output_tokens=output_tokens,
        batch=batch,
        weight_bytes=weights,
        activation_bytes=activations,
        device_arena_bytes=batch * chosen.sequence_device_bytes,
        memory=memory,
        chosen=chosen,
        full=full,
        savings=savings,
        equivalent_bandwidth_gb_s=bandwidth,
        assumptions=assumptions,
        note=note,
    )


def price_needs_host(plan: MethodPlan) -> bool:
    """Whether a sequence of this plan is compressed, rather than kept exact as a whole."""
    return "exact tokens" not in plan.device_bytes


def require_fit(plan: Plan) -> None:
    """Refuse a plan in which not one sequence fits.

    Raises:
        CapacityError: says the bytes needed, the bytes there, and what would fit.
    """
    if plan.batch:
        return
    chosen = plan.chosen
    fixed = plan.weight_bytes + plan.activation_bytes + chosen.step_bytes
    need, there = fixed + chosen.sequence_device_bytes, plan.memory.device_bytes
    if plan.memory.shared:
        need += chosen.sequence_host_bytes
    raise CapacityError(
        f"one sequence of {plan.context_tokens + plan.output_tokens:,} tokens under {chosen.method} needs {need:,} "
        f"bytes on the device ({plan.weight_bytes:,} weights, {plan.activation_bytes:,} activations, "
        f"{chosen.step_bytes:,} decoding, "
        f"{chosen.sequence_device_bytes:,} cache) and {chosen.sequence_host_bytes:,} on the host; there are {there:,} "
        f"and {plan.memory.host_bytes:,}. The largest batch that fits is 0: shorten the context, lower the rank "
        "or the budget, or give more memory"
    )
