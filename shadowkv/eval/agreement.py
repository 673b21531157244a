"""How far a method's logits are from full attention's, on a text whose next tokens are given.

The prompt's attention is exact under every method, so it is computed once, recorded, and given to one after the
other. Each is fed the same tokens, one a step, and its logits are compared with full attention's at that step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from shadowkv.cache.arena import Arena
from shadowkv.cache.base import CacheStats
from shadowkv.cache.methods import method_of
from shadowkv.cache.recorded import RecordedPrompt, recorded_bytes
from shadowkv.config import CacheConfig, FullConfig
from shadowkv.engine.memory import find_memory
from shadowkv.engine.placement import make_steps
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


@torch.inference_mode()
def compare(
    decoder: Decoder, passage: Passage, methods: Sequence[tuple[str, CacheConfig]], report: Report
) -> list[Agreement]:
    """Every method on one passage, full attention first.

    Raises:
        RequestError: the passage is longer than the model takes.
        ConfigError: a method's settings do not fit the model.
        CapacityError: the prompt's record and a cache do not fit beside each other; says what is needed and there.
    """
    total = len(passage.prompt_ids) + len(passage.forced_ids)
    if total > decoder.spec.context_tokens:
        raise RequestError(
            f"prompt and steps are {total} tokens; the model takes {decoder.spec.context_tokens} "
            f"({decoder.spec.context_limit})"
        )
    everyone = [("full", FullConfig()), *methods]
    geometry = decoder.spec.geometry(decoder.dtype)
    nothing = Arena(0, decoder.device)
    caches = [method_of(config)(geometry, config, decoder.rope, nothing, nothing) for _, config in everyone]
    queries = max(cache.prompt_queries for cache in caches)
    _require_memory(decoder, [config for _, config in everyone], total, queries)
    layers = decoder.spec.layers
    recorder = Runner(decoder, caches[0])
    prompt = recorder.record(
        passage.prompt_ids, queries, progress=lambda done, _: report(f"{passage.name}: prefill", done, layers)
    )
    results: list[Agreement] = []
    reference_TV: Tensor | None = None
    for done, (label, config) in enumerate(everyone):
        report(f"{passage.name}: {label}", done, len(everyone))
        logprobs_TV, stats = _feed(decoder, config, prompt, passage.forced_ids[:-1])
        if reference_TV is None:
            reference_TV = logprobs_TV
        results.append(_measure(passage, label, stats, logprobs_TV, reference_TV))
    report(f"{passage.name}: methods", len(everyone), len(everyone))
    return results


def _require_memory(decoder: Decoder, configs: Sequence[CacheConfig], tokens: int, prompt_queries: int) -> None:
    """The recorded prompt, and one cache after the other."""
    geometry = decoder.spec.geometry(decoder.dtype)
    prices = [method_of(config).price(geometry, config, tokens) for config in configs]
    on_device = max(price.device_bytes for price in prices) + recorded_bytes(geometry, tokens, prompt_queries)
    on_device += activation_bytes(decoder.spec, decoder.dtype, tokens, 1)
    on_host = max(price.host_bytes for price in prices)
    memory = find_memory(decoder.device, None, None)
    fits = on_device + on_host <= memory.device_bytes if memory.shared else on_device <= memory.device_bytes
    if not fits or (not memory.shared and on_host > memory.host_bytes):
        there = "together" if memory.shared else f"and {memory.host_bytes:,} on the host"
        raise CapacityError(
            f"a prompt of {tokens:,} tokens with a cache takes {on_device:,} bytes on the device and {on_host:,} on "
            f"the host; there are {memory.device_bytes:,} {there}. Take a shorter prompt"
        )


def _feed(
    decoder: Decoder, config: CacheConfig, prompt: RecordedPrompt, token_ids: Sequence[int]
) -> tuple[Tensor, CacheStats]:
    """Log-probabilities [T, V] after each token, on the CPU, as decoding gives them: by kernels where there are any."""
    geometry, method, tokens = decoder.spec.geometry(decoder.dtype), method_of(config), prompt.tokens + len(token_ids)
    price = method.price(geometry, config, tokens)
    device = Arena(price.device_bytes, decoder.device)
    host = Arena(price.host_bytes, "cpu", pinned=decoder.device.type == "cuda")
    cache = method(geometry, config, decoder.rope, device, host)
    runner = Runner(decoder, cache, make_steps(decoder, cache, 1, tokens))
    seq = cache.open(tokens)
    cache.take_prompt(seq, prompt)
    rows = [runner.decode([seq], [token])[0].log_softmax(-1).cpu() for token in token_ids]
    return torch.stack(rows), cache.stats(seq)


def _measure(passage: Passage, label: str, stats: CacheStats, logprobs_TV: Tensor, reference_TV: Tensor) -> Agreement:
    steps = len(logprobs_TV)
    targets_T = torch.tensor(passage.forced_ids[1:])
    same_T = (logprobs_TV.argmax(-1) == reference_TV.argmax(-1)).float()
    kl_T = (reference_TV.exp() * (reference_TV - logprobs_TV)).sum(-1).clamp_min(0)  # below 0 only by rounding
    return Agreement(
        passage=passage.name,
        label=label,
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
