"""One diagnosis from beginning to end: look at the prompt and other texts, decode, recommend, measure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from shadowkv.cache.arena import Arena
from shadowkv.cache.shadowkv import ShadowKVCache
from shadowkv.cache.shadowkv_layout import ranks
from shadowkv.config import ShadowKVConfig
from shadowkv.diagnose.coverage import Split
from shadowkv.diagnose.measure import Recommendation, measure, tokens_needed
from shadowkv.diagnose.observe import PRE_CENTRED, LayerFigures, Likeness, Observer, OtherText, look_at
from shadowkv.diagnose.recommend import budgets_of, candidates, config_of, possible, splits_to_try
from shadowkv.diagnose.reuse import Reuse, decode_selections, reuse_of
from shadowkv.diagnose.settings import RESIDENT_MULTIPLES, DiagnoseSettings
from shadowkv.engine.placement import make_steps
from shadowkv.engine.runner import Runner
from shadowkv.errors import RequestError
from shadowkv.eval.agreement import copy_passage
from shadowkv.models.decoder import Decoder
from shadowkv.models.spec import ModelSpec

Report = Callable[[str, int, int], None]

OTHER_PARTS = 2
"""Parts of the text itself that stand for other texts where none are given."""


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found. ``others`` has, by the name of a text, its likeness in every layer."""

    settings: DiagnoseSettings
    spec: ModelSpec
    dtype: torch.dtype
    rank: int
    layers: list[LayerFigures]
    others: dict[str, list[Likeness]]
    reuse: Reuse
    recommendation: Recommendation


def check(spec: ModelSpec, dtype: torch.dtype, settings: DiagnoseSettings) -> None:
    """Refuse what cannot be done, before weights are loaded.

    Raises:
        RequestError: prompt and steps are longer than the model takes.
        ConfigError: the byte budget is too small.
    """
    if settings.capacity_tokens > spec.context_tokens:
        raise RequestError(
            f"{settings.prompt_tokens:,} tokens of prompt and {settings.steps:,} steps; "
            f"{spec.architecture} takes {spec.context_tokens:,} ({spec.context_limit})"
        )
    possible(spec.geometry(dtype), settings)


def choose_others(
    token_ids: Sequence[int], given: Mapping[str, Sequence[int]], settings: DiagnoseSettings
) -> dict[str, Sequence[int]]:
    """The texts that the prompt's first half is compared with, each as long: those given, else other parts of the text.

    None where none is given and the text ends too early.

    Raises:
        RequestError: a text, or a given one, is too short; says what is needed. Or there are too many steps.
    """
    half, used = settings.prompt_tokens // 2, tokens_needed(settings)
    if len(token_ids) < used:
        raise RequestError(
            f"the text has {len(token_ids):,} tokens and {used:,} are needed: the prompt, and twice the steps; "
            "give a longer text, or fewer --prompt-tokens"
        )
    copy_passage(token_ids, settings.prompt_tokens, settings.steps)
    for name, ids in given.items():
        if len(ids) < half:
            raise RequestError(f"{name} has {len(ids):,} tokens and {half:,} are needed: half of the prompt")
    if given:
        return {name: ids[:half] for name, ids in given.items()}
    rest = len(token_ids) - used
    parts = min(OTHER_PARTS, rest // half)
    starts = [used + (rest - half) * (part + 1) // parts for part in range(parts)]
    return {f"the text from token {start:,} on": token_ids[start : start + half] for start in starts}


@torch.inference_mode()
def diagnose(
    decoder: Decoder,
    token_ids: Sequence[int],
    others: Mapping[str, Sequence[int]],
    settings: DiagnoseSettings,
    report: Report,
) -> Diagnosis:
    """Look at one text, and recommend settings for it.

    Args:
        token_ids: the prompt and what comes after it.
        others: from :func:`choose_others`.

    Raises:
        RequestError, ConfigError: as :func:`check` and :func:`choose_others`.
        CapacityError: memory does not suffice for measuring.
        NumericsError: a key is NaN or infinite; names the layer.
    """
    check(decoder.spec, decoder.dtype, settings)
    geometry = decoder.spec.geometry(decoder.dtype)
    rank = settings.rank or ranks(geometry, ShadowKVConfig())[0]
    rank = min(rank, geometry.key_dim, settings.prompt_tokens // 2)
    layers, reuse = _look_and_decode(decoder, token_ids, settings, rank, report)
    found: dict[str, list[Likeness]] = {}
    for number, (name, ids) in enumerate(others.items(), start=1):
        sink, stage = OtherText([one.basis for one in layers]), f"looking at other texts, {number} of {len(others)}"
        look_at(decoder, ids, sink, None, partial(report, stage))
        found[name] = sink.layers
    tried = candidates(
        geometry, settings, torch.stack([one.shares[PRE_CENTRED] for one in layers]), mean_missed(layers)
    )
    recommendation = measure(decoder, token_ids, settings, tried, report)
    return Diagnosis(settings, decoder.spec, decoder.dtype, rank, layers, found, reuse, recommendation)


def mean_missed(layers: Sequence[LayerFigures]) -> dict[Split, list[float]]:
    """The attention mass that landmarks miss, by split and budget: the mean over layers."""
    return {
        split: [sum(losses) / len(layers) for losses in zip(*(one.missed[split] for one in layers), strict=True)]
        for split in layers[0].missed
    }


def _look_and_decode(
    decoder: Decoder, token_ids: Sequence[int], settings: DiagnoseSettings, rank: int, report: Report
) -> tuple[list[LayerFigures], Reuse]:
    """One prefill for the figures and for a cache that then decodes; the cache's memory is free again afterwards."""
    split, capacity = Split(settings.chunk_tokens, settings.outliers), settings.capacity_tokens
    # Compressed whatever fits, since what is looked at is what is selected.
    config = replace(config_of(split, settings.budget_tokens, rank), exact_while_fits=False)
    geometry = decoder.spec.geometry(decoder.dtype)
    price = ShadowKVCache.price(geometry, config, capacity)
    device = Arena(price.device_bytes, decoder.device)
    host = Arena(price.host_bytes, "cpu", pinned=decoder.device.type == "cuda")
    cache = ShadowKVCache(geometry, config, decoder.rope, device, host)
    seq, runner = cache.open(capacity), Runner(decoder, cache, make_steps(decoder, cache, 1, capacity))
    observer = Observer(
        decoder,
        rank=rank,
        query_tokens=settings.query_tokens,
        split=split,
        budgets={one: budgets_of(settings, one) for one in splits_to_try(settings)},
        cache=cache,
    )
    prompt, forced = token_ids[: settings.prompt_tokens], token_ids[settings.prompt_tokens : capacity]
    look_at(decoder, prompt, observer, seq, partial(report, "looking at the prompt"))
    chosen = decode_selections(runner, seq, forced, partial(report, "decoding its continuation"))
    return observer.layers, reuse_of(chosen, cache.stats(seq).hit_rates, RESIDENT_MULTIPLES)
