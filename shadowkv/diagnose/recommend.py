"""From a byte budget and what was measured of a prompt to settings that might use it well.

The device bytes of ShadowKV go into directions of the keys and into slots, chunk means and outliers. For every way to
cut the context and every budget, the rest of the bytes is given to the ranks. Of all these, those stay that no other
one beats in both the energy that ranks lose and the attention mass that selection misses. Which of them is best, only
logits can tell (``diagnose.measure``).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from shadowkv.cache.base import Geometry
from shadowkv.cache.methods import method_of
from shadowkv.cache.shadowkv_layout import ExactRegion
from shadowkv.config import FullConfig, ShadowKVConfig
from shadowkv.diagnose.coverage import LOCAL_TOKENS, Split, context_chunks
from shadowkv.diagnose.settings import BUDGET_SHARES, USUAL_KEEP, DiagnoseSettings, budget_chunks
from shadowkv.errors import ConfigError

RANK_STEP = 8
"""Directions are given out so many at a time: rows of 16 bytes in 16 bits, which kernels read at once."""
WINDOW_TOKENS = 128
"""The recent window, as ShadowKV's 16 chunks of 8."""
CHUNK_TOKENS = (4, 8, 16)
OUTLIER_CHUNKS = (1, 8, 48)
CANDIDATES = 5


@dataclass(frozen=True)
class Candidate:
    """Settings that fit, and what they are expected to lose.

    Args:
        device_bytes: what a sequence reserves on the device.
        energy_lost: share of the keys' energy about their mean outside the ranks' subspaces, mean over layers.
        mass_missed: attention that selection by landmarks leaves out, mean over layers, heads and positions.
    """

    config: ShadowKVConfig
    device_bytes: int
    energy_lost: float
    mass_missed: float


def full_bytes(geometry: Geometry, tokens: int) -> int:
    """What full attention reserves on the device."""
    return method_of(FullConfig()).price(geometry, FullConfig(), tokens).device_bytes


def device_bytes(geometry: Geometry, config: ShadowKVConfig, tokens: int) -> int:
    """What these settings reserve on the device."""
    return method_of(config).price(geometry, config, tokens).device_bytes


def allowed_bytes(geometry: Geometry, settings: DiagnoseSettings) -> int:
    """The byte budget for prompt and answer."""
    tokens = settings.capacity_tokens
    if settings.device_bytes_per_token is not None:
        return settings.device_bytes_per_token * tokens
    return int((settings.keep_share or USUAL_KEEP) * full_bytes(geometry, tokens))


def splits_to_try(settings: DiagnoseSettings) -> list[Split]:
    """The figures' own split first, and others with few enough outliers for the prompt: an eighth of it at most."""
    found = [Split(settings.chunk_tokens, settings.outliers)]
    for size in sorted({*CHUNK_TOKENS, settings.chunk_tokens}):
        chunks = context_chunks(settings.prompt_tokens, settings.query_tokens, size)
        found += [Split(size, outliers) for outliers in OUTLIER_CHUNKS if outliers <= chunks // 8]
    return list(dict.fromkeys(found))


def budgets_of(settings: DiagnoseSettings, split: Split) -> list[int]:
    """The budgets that mass is measured at, in chunks."""
    return [budget_chunks(share, settings.prompt_tokens, split.chunk_tokens) for share in BUDGET_SHARES]


def config_of(split: Split, budget_tokens: int, rank: int | tuple[int, ...] = RANK_STEP) -> ShadowKVConfig:
    """Settings that leave nothing to the engine, so that their price is what is reserved anywhere."""
    local = max(LOCAL_TOKENS // split.chunk_tokens, 1)
    return ShadowKVConfig(
        rank=rank,
        chunk_tokens=split.chunk_tokens,
        budget_tokens=budget_tokens,
        outlier_chunks=split.outliers,
        local_chunks=local,
        recent_chunks=max(WINDOW_TOKENS // split.chunk_tokens, local + 2),
        resident_tokens=budget_tokens,
        dense_tokens=0,
    )


def water_fill(shares_LX: Tensor, blocks: int, step: int = RANK_STEP) -> tuple[int, ...]:
    """Give blocks of ``step`` directions to the layers where they hold most energy, at least one to each.

    Directions hold less and less, so taking the best block every time keeps the most energy that so many can.

    Shapes: shares [LAYERS, K*D], each row descending.
    """
    layers, width = shares_LX.shape
    gains = torch.stack([part.sum(1) for part in torch.split(shares_LX, step, dim=1)], dim=1)
    gains[:, 0] = torch.inf
    best = gains.flatten().argsort(descending=True, stable=True)[: max(blocks, layers)]
    given = torch.bincount(best // gains.shape[1], minlength=layers)
    return tuple(min(int(count) * step, width) for count in given)


def energy_lost(shares_LX: Tensor, ranks: Sequence[int]) -> float:
    """The mean over layers of what lies outside these many directions."""
    kept = [float(row_X[:rank].sum()) for row_X, rank in zip(shares_LX, ranks, strict=True)]
    return max(0.0, 1 - sum(kept) / len(kept))


def with_ranks(
    geometry: Geometry, config: ShadowKVConfig, shares_LX: Tensor, allowed: int, tokens: int
) -> tuple[ShadowKVConfig, tuple[int, ...]]:
    """These settings with the largest ranks that the bytes allow, and these ranks. The smallest have to fit."""
    fewest, most = geometry.layers, geometry.layers * -(-geometry.key_dim // RANK_STEP)
    while fewest < most:  # prices grow with the blocks
        middle = (fewest + most + 1) // 2
        tried = replace(config, rank=water_fill(shares_LX, middle))
        if device_bytes(geometry, tried, tokens) <= allowed:
            fewest = middle
        else:
            most = middle - 1
    ranks = water_fill(shares_LX, fewest)
    return replace(config, rank=ranks), ranks


class Possible(NamedTuple):
    """A way to cut the context and a budget of it, with the smallest ranks; and its place in ``BUDGET_SHARES``."""

    split: Split
    place: int
    config: ShadowKVConfig


def possible(geometry: Geometry, settings: DiagnoseSettings) -> list[Possible]:
    """What fits with the smallest ranks; needs nothing measured.

    Raises:
        ConfigError: the byte budget is too small for any; says what the least is.
    """
    tokens, allowed = settings.capacity_tokens, allowed_bytes(geometry, settings)
    priced: list[tuple[int, Possible]] = []
    for split in splits_to_try(settings):
        for place, budget in enumerate(budgets_of(settings, split)):
            config = config_of(split, budget * split.chunk_tokens)
            if ExactRegion.of(config).compressible(settings.prompt_tokens):
                priced.append((device_bytes(geometry, config, tokens), Possible(split, place, config)))
    found = [one for price, one in priced if price <= allowed]
    if found:
        return found
    full, least = full_bytes(geometry, tokens), min((price for price, _ in priced), default=None)
    if least is None or least > full:
        raise ConfigError(f"at {tokens:,} tokens ShadowKV saves no memory of this model; give a longer --prompt-tokens")
    raise ConfigError(
        f"the memory to recommend for is {allowed:,} bytes at {tokens:,} tokens, {allowed / full:.1%} of full "
        f"attention's; the least that ShadowKV takes is {least:,}: give --keep {math.ceil(1000 * least / full) / 10}% "
        f"or more, or --device-bytes-per-token {-(-least // tokens)}"
    )


def candidates(
    geometry: Geometry,
    settings: DiagnoseSettings,
    shares_LX: Tensor,
    missed: Mapping[Split, Sequence[float]],
    most: int = CANDIDATES,
) -> list[Candidate]:
    """Settings within the byte budget that none beats in both losses, from the least mass missed to the most.

    Args:
        shares_LX: energy shares of each layer's centred pre-RoPE keys.
        missed: by split, the mean mass that landmarks miss, at :func:`budgets_of`.

    Raises:
        ConfigError: the budget is too small for any; says what the least is.
    """
    tokens, allowed = settings.capacity_tokens, allowed_bytes(geometry, settings)
    found: list[Candidate] = []
    for split, place, bare in possible(geometry, settings):
        config, ranks = with_ranks(geometry, bare, shares_LX, allowed, tokens)
        loss, price = energy_lost(shares_LX, ranks), device_bytes(geometry, config, tokens)
        found.append(Candidate(config, price, loss, missed[split][place]))
    return _spread(_unbeaten(found), most)


def _unbeaten(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other one beats or equals in both losses, by the mass that they miss."""
    front: list[Candidate] = []
    for one in sorted(found, key=lambda c: (c.mass_missed, c.energy_lost, c.device_bytes)):
        if not front or one.energy_lost < front[-1].energy_lost:
            front.append(one)
    return front


def _spread(front: Sequence[Candidate], most: int) -> list[Candidate]:
    """At most so many of them, both ends among them."""
    if len(front) <= most:
        return list(front)
    return [front[round(i * (len(front) - 1) / (most - 1))] for i in range(most)]


def fewer_fetches(config: ShadowKVConfig, multiple: int) -> ShadowKVConfig:
    """The same memory with a budget of one part in ``multiple`` of the resident set, all of which is attended."""
    chunks = -(-config.budget_chunks // multiple)
    return replace(config, budget_tokens=chunks * config.chunk_tokens, attend="resident")


def python_line(config: ShadowKVConfig) -> str:
    """The settings that differ from the defaults, as Python."""
    usual = ShadowKVConfig()
    changed = {f.name: getattr(config, f.name) for f in fields(config)}
    shown = [f"{name}={value!r}" for name, value in changed.items() if value != getattr(usual, name)]
    return f"ShadowKVConfig({', '.join(shown)})"
