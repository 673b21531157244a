"""How far a method's logits are from full attention's, on a text whose next tokens are given.

The prompt's attention is exact under every method, so it is computed once and given to all of them. Then
each is fed the same tokens, one a step, and its logits are compared with full attention's at that step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shadowkv.cache.arena import Arena
from shadowkv.cache.base import Cache, CachedSequence
from shadowkv.cache.methods import method_of
from shadowkv.config import CacheConfig, FullConfig
from shadowkv.engine.memory import find_memory
from shadowkv.engine.plan import activation_bytes
from shadowkv.engine.runner import Runner
from shadowkv.errors import CapacityError, RequestError
from shadowkv.models.decoder import Decoder

Report = Callable[[str, int, int], None]

CUE_TOKENS = 64
"""The beginning of the copied passage that ends the prompt, so that the model knows what to go on with."""
COPY_DEPTH = 0.25
"""Where in the prompt the copied passage stands."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Passage:
    """A prompt and the tokens that are fed after it; the last of them is only predicted."""

    name: str
    prompt_ids: tuple[int, ...]
    forced_ids: tuple[int, ...]


def natural_passage(token_ids: Sequence[int], prompt_tokens: int, steps: int) -> Passage:
    """The text goes on.

    Raises:
        RequestError: the text is too short.
    """
    _need(token_ids, prompt_tokens + steps + 1)
    return Passage(
        "natural", tuple(token_ids[:prompt_tokens]), tuple(token_ids[prompt_tokens : prompt_tokens + steps + 1])
    )


def copy_passage(token_ids: Sequence[int], prompt_tokens: int, steps: int) -> Passage:
    """The text begins to repeat what stands at a quarter of it, and goes on doing so.

    Raises:
        RequestError: the text is too short, or the prompt for the passage.
    """
    _need(token_ids, prompt_tokens)
    start = int(prompt_tokens * COPY_DEPTH)
    end = start + CUE_TOKENS + steps + 1
    if end > prompt_tokens - CUE_TOKENS:
        raise RequestError(
            f"a prompt of {prompt_tokens} tokens is too short to repeat {steps} of them; take a longer one"
        )
    cue = token_ids[start : start + CUE_TOKENS]
    prompt = (*token_ids[: prompt_tokens - CUE_TOKENS], *cue)
    return Passage("copy", prompt, tuple(token_ids[start + CUE_TOKENS : end]))


def _need(token_ids: Sequence[int], tokens: int) -> None:
    if len(token_ids) < tokens:
        raise RequestError(f"the text has {len(token_ids)} tokens and {tokens} are needed; give a longer one")


@dataclass(frozen=True)
class Estimate:
    """A mean over the steps with its 95 % bootstrap interval. Steps of one text are not independent, so
    the interval tells this text's noise, not that of other texts."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Agreement:
    """One method on one passage. ``kl`` is KL(full || method) in nats."""

    passage: str
    label: str
    prompt_tokens: int
    steps: int
    top1: Estimate
    kl: Estimate
    perplexity: float
    hit_rate: float | None
    fetched_bytes_per_step: float
    device_bytes: int
    host_bytes: int
    mean_energy: float | None

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


@dataclass(eq=False)
class _Subject:
    label: str
    cache: Cache[Any, Any]
    seq: CachedSequence


class _Everyone:
    """Gives each layer of the prompt to all subjects."""

    def __init__(self, subjects: Sequence[_Subject]) -> None:
        self.subjects = subjects

    def begin_prompt(self, seq: None, tokens: int) -> None:
        for subject in self.subjects:
            subject.cache.begin_prompt(subject.seq, tokens)

    @property
    def prompt_queries(self) -> int:
        return max(subject.cache.prompt_queries for subject in self.subjects)

    def take_layer(
        self, layer: int, seq: None, k_pre_SKD: Tensor, k_KSD: Tensor, v_KSD: Tensor, q_NWD: Tensor | None = None
    ) -> None:
        for subject in self.subjects:
            wanted = subject.cache.prompt_queries
            own_NWD = q_NWD[:, -wanted:] if q_NWD is not None and wanted else None
            subject.cache.take_layer(layer, subject.seq, k_pre_SKD, k_KSD, v_KSD, own_NWD)


@torch.inference_mode()
def compare(
    decoder: Decoder, passage: Passage, methods: Sequence[tuple[str, CacheConfig]], report: Report
) -> list[Agreement]:
    """Every method on one passage, full attention first.

    Raises:
        RequestError: the passage is longer than the model takes.
        ConfigError: a method's settings do not fit the model.
        CapacityError: the methods' caches do not fit beside each other; says what is needed and what is there.
    """
    total = len(passage.prompt_ids) + len(passage.forced_ids)
    if total > decoder.spec.context_tokens:
        raise RequestError(
            f"prompt and steps are {total} tokens; the model takes {decoder.spec.context_tokens} "
            f"({decoder.spec.context_limit})"
        )
    everyone = [("full", FullConfig()), *methods]
    _require_memory(decoder, [config for _, config in everyone], total)
    subjects = [_open(decoder, label, config, total) for label, config in everyone]
    layers = decoder.spec.layers
    decoder.prefill(
        torch.tensor(passage.prompt_ids, device=decoder.device),
        _Everyone(subjects),
        None,
        progress=lambda done, _: report(f"{passage.name}: prefill", done, layers),
    )
    results: list[Agreement] = []
    reference_TV: Tensor | None = None
    for done, subject in enumerate(subjects):
        report(f"{passage.name}: methods", done, len(subjects))
        logprobs_TV = _feed(decoder, subject, passage.forced_ids[:-1])
        if reference_TV is None:
            reference_TV = logprobs_TV
        results.append(_measure(passage, subject, logprobs_TV, reference_TV))
        subject.cache.release(subject.seq)
    report(f"{passage.name}: methods", len(subjects), len(subjects))
    return results


def _require_memory(decoder: Decoder, configs: Sequence[CacheConfig], tokens: int) -> None:
    """All caches live at once, since one prefill feeds them all."""
    geometry = decoder.spec.geometry(decoder.dtype)
    prices = [method_of(config).price(geometry, config, tokens) for config in configs]
    on_device = sum(price.device_bytes for price in prices)
    on_device += activation_bytes(decoder.spec, decoder.dtype, tokens, 1)
    on_host = sum(price.host_bytes for price in prices)
    memory = find_memory(decoder.device, None, None)
    fits = on_device + on_host <= memory.device_bytes if memory.shared else on_device <= memory.device_bytes
    if not fits or (not memory.shared and on_host > memory.host_bytes):
        there = "together" if memory.shared else f"and {memory.host_bytes:,} on the host"
        raise CapacityError(
            f"{len(configs)} caches of {tokens:,} tokens need {on_device:,} bytes on the device and {on_host:,} on the "
            f"host at once; there are {memory.device_bytes:,} {there}. Compare fewer settings at a time, or a "
            "shorter prompt"
        )


def _open(decoder: Decoder, label: str, config: CacheConfig, tokens: int) -> _Subject:
    geometry, method = decoder.spec.geometry(decoder.dtype), method_of(config)
    method.check(geometry, config)
    price = method.price(geometry, config, tokens)
    device = Arena(price.device_bytes, decoder.device)
    host = Arena(price.host_bytes, "cpu", pinned=decoder.device.type == "cuda")
    cache = method(geometry, config, decoder.rope, device, host)
    return _Subject(label, cache, cache.open(tokens))


def _feed(decoder: Decoder, subject: _Subject, token_ids: Sequence[int]) -> Tensor:
    """Log-probabilities [T, V] after each token, on the CPU."""
    runner = Runner(decoder, subject.cache)
    rows = [runner.decode([subject.seq], [token])[0].log_softmax(-1).cpu() for token in token_ids]
    return torch.stack(rows)


def _measure(passage: Passage, subject: _Subject, logprobs_TV: Tensor, reference_TV: Tensor) -> Agreement:
    steps = len(logprobs_TV)
    targets_T = torch.tensor(passage.forced_ids[1:])
    same_T = (logprobs_TV.argmax(-1) == reference_TV.argmax(-1)).float()
    kl_T = (reference_TV.exp() * (reference_TV - logprobs_TV)).sum(-1).clamp_min(0)  # below 0 only by rounding
    stats = subject.cache.stats(subject.seq)
    return Agreement(
        passage=passage.name,
        label=subject.label,
        prompt_tokens=len(passage.prompt_ids),
        steps=steps,
        top1=estimate(same_T),
        kl=estimate(kl_T),
        perplexity=math.exp(-float(logprobs_TV.gather(1, targets_T[:, None]).mean())),
        hit_rate=stats.hit_rate,
        fetched_bytes_per_step=stats.fetched_bytes / steps,
        device_bytes=stats.device_bytes,
        host_bytes=stats.host_bytes,
        mean_energy=sum(stats.energy) / len(stats.energy) if stats.energy else None,
    )


def estimate(values_T: Tensor) -> Estimate:
    """Mean and percentile bootstrap with a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(values_T), (RESAMPLES, len(values_T)), generator=generator)
    means = values_T.double()[picks].mean(1).sort().values
    low, high = (float(means[int(q * (RESAMPLES - 1))]) for q in (0.025, 0.975))
    return Estimate(float(values_T.double().mean()), low, high)
