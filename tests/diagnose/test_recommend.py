"""From bytes to settings: what is recommended costs what was allowed, and nothing better was left out."""

import itertools

import pytest
import torch

from shadowkv import ShadowKVConfig
from shadowkv.cache.arena import Arena
from shadowkv.cache.base import Geometry
from shadowkv.cache.shadowkv import ShadowKVCache
from shadowkv.diagnose.coverage import context_chunks
from shadowkv.diagnose.recommend import (
    RANK_STEP,
    allowed_bytes,
    budgets_of,
    candidates,
    device_bytes,
    energy_lost,
    fewer_fetches,
    full_bytes,
    python_line,
    splits_to_try,
    water_fill,
)
from shadowkv.diagnose.settings import BUDGET_SHARES, DiagnoseSettings
from shadowkv.errors import ConfigError
from shadowkv.models.rope import build_rope
from tests.engine.tiny import tiny_spec

GEOMETRY = Geometry(4, 4, 2, 32, torch.float32)
"""K*D is 64."""


def spectra(layers: int = 4, width: int = 64) -> torch.Tensor:
    """Shares that fall more and more slowly from layer to layer."""
    falls = torch.stack([torch.arange(width) * -(0.4 / (1 + layer)) for layer in range(layers)]).double().exp()
    return falls / falls.sum(1, keepdim=True)


def settings(**changes: object) -> DiagnoseSettings:
    return DiagnoseSettings(**{"prompt_tokens": 2000, "steps": 16, **changes})  # type: ignore[arg-type]


def missed(given: DiagnoseSettings) -> dict:
    """Less with larger budgets, smaller chunks and more outliers."""
    return {
        split: [0.6 - share - 0.01 * split.outliers / 8 + 0.002 * split.chunk_tokens for share in BUDGET_SHARES]
        for split in splits_to_try(given)
    }


def test_no_other_way_to_give_out_directions_keeps_more():
    shares = spectra(3, 24)
    given = water_fill(shares, 5)
    assert sum(given) == 5 * RANK_STEP
    assert min(given) >= RANK_STEP
    best = min(
        energy_lost(shares, [RANK_STEP * blocks for blocks in ways])
        for ways in itertools.product((1, 2, 3), repeat=3)
        if sum(ways) == 5
    )
    assert energy_lost(shares, given) == pytest.approx(best)
    assert given[2] > given[0]


def test_ranks_end_with_the_dimensions():
    assert water_fill(spectra(2, 20), 100) == (20, 20)
    assert water_fill(spectra(2, 20), 0) == (8, 8)
    assert energy_lost(spectra(2, 20), (20, 20)) == pytest.approx(0)


@pytest.mark.parametrize(
    "memory", [{}, {"keep_share": 0.3}, {"keep_share": 0.5}, {"keep_share": 0.9}, {"device_bytes_per_token": 700}]
)
def test_every_candidate_reserves_what_is_allowed_and_one_more_block_would_not(memory):
    given = settings(**memory)
    allowed, tokens = allowed_bytes(GEOMETRY, given), given.capacity_tokens
    found = candidates(GEOMETRY, given, spectra(), missed(given))
    assert found
    for one in found:
        assert one.device_bytes <= allowed
        # What the cache takes, to the byte: an arena of this size has room for one sequence and nothing more.
        config, rope = one.config, build_rope(tiny_spec(), torch.device("cpu"))
        price = ShadowKVCache.price(GEOMETRY, config, tokens)
        assert price.device_bytes == one.device_bytes
        arena = Arena(one.device_bytes, "cpu")
        ShadowKVCache(GEOMETRY, config, rope, arena, Arena(price.host_bytes, "cpu")).open(tokens)
        assert arena.free_bytes == 0
        blocks = sum(config.rank) // RANK_STEP
        if blocks < 4 * 64 // RANK_STEP:
            more = ShadowKVConfig(**{**vars(config), "rank": water_fill(spectra(), blocks + 1)})
            assert device_bytes(GEOMETRY, more, tokens) > allowed


def test_candidates_are_those_that_nothing_beats():
    given = settings(keep_share=0.5)
    everything = candidates(GEOMETRY, given, spectra(), missed(given), most=1000)
    losses = [(one.mass_missed, one.energy_lost) for one in everything]
    assert losses == sorted(losses)
    assert [energy for _, energy in losses] == sorted({energy for _, energy in losses}, reverse=True)
    few = candidates(GEOMETRY, given, spectra(), missed(given), most=3)
    assert len(few) == 3
    assert (few[0], few[-1]) == (everything[0], everything[-1])


def test_the_budget_in_bytes_is_a_share_of_full_attention():
    given = settings(keep_share=0.5)
    assert full_bytes(GEOMETRY, 2016) == 2016 * 2 * 64 * 4 * 4
    assert allowed_bytes(GEOMETRY, given) == full_bytes(GEOMETRY, 2016) // 2
    assert allowed_bytes(GEOMETRY, settings(device_bytes_per_token=77)) == 77 * 2016


def test_too_little_memory_is_refused_and_what_is_named_suffices():
    with pytest.raises(ConfigError, match=r"give --keep [\d.]+% or more") as refused:
        candidates(GEOMETRY, settings(keep_share=0.01), spectra(), {})
    share, per_token = (
        str(refused.value).partition(flag)[2].split()[0] for flag in ("--keep ", "--device-bytes-per-token ")
    )
    for enough in ({"keep_share": float(share.removesuffix("%")) / 100}, {"device_bytes_per_token": int(per_token)}):
        assert candidates(GEOMETRY, settings(**enough), spectra(), missed(settings()))
    with pytest.raises(ConfigError, match="saves no memory"):
        candidates(Geometry(4, 4, 2, 1, torch.float32), settings(prompt_tokens=520), spectra(4, 2), {})


def test_fewer_fetches_take_the_same_memory():
    given = settings(keep_share=0.5)
    for one in candidates(GEOMETRY, given, spectra(), missed(given)):
        part = fewer_fetches(one.config, 2)
        assert part.resident_tokens == one.config.budget_tokens
        assert one.config.budget_tokens / 2 <= part.budget_tokens < one.config.budget_tokens / 2 + part.chunk_tokens
        assert device_bytes(GEOMETRY, part, 2016) == one.device_bytes


def test_the_python_line_works_when_pasted():
    config = ShadowKVConfig(rank=(8, 16), budget_tokens=64, resident_tokens=128, attend="resident", dense_tokens=0)
    line = python_line(config)
    assert eval(line, {"ShadowKVConfig": ShadowKVConfig}) == config
    assert "chunk_tokens" not in line
    assert python_line(ShadowKVConfig()) == "ShadowKVConfig()"


def test_splits_leave_most_chunks_to_be_chosen():
    given = settings(prompt_tokens=512, steps=8, chunk_tokens=8)
    for split in splits_to_try(given):
        assert split.outliers <= context_chunks(512, 64, split.chunk_tokens) // 4
        assert budgets_of(given, split) == sorted(budgets_of(given, split))
    assert len(splits_to_try(given)) == len(set(splits_to_try(given)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_tokens": 100}, "--prompt-tokens is 100; it must be at least 512"),
        ({"steps": 1}, "--steps is 1; it must be at least 2"),
        ({"rank": 0}, "--rank is 0"),
        ({"query_tokens": 251}, "--query-tokens is 251; it must be at most --prompt-tokens / 8"),
        ({"chunk_tokens": 126}, "--chunk-tokens is 126; it must be at most --prompt-tokens / 16"),
        ({"outlier_chunks": 32}, "--outlier-chunks is 32; it must be at most an eighth of the prompt's 250 chunks"),
        ({"budget_share": 0.0}, "--budget is 0"),
        ({"keep_share": 1.5}, "--keep is 1.5"),
        ({"keep_share": 0.5, "device_bytes_per_token": 9}, "exclude each other"),
    ],
)
def test_refused_settings(changes, says):
    with pytest.raises(ConfigError, match=says):
        settings(**changes)
