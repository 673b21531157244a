"""What is measured of one layer, on keys whose answer is known."""

import math

import pytest
import torch

from shadowkv.diagnose.cosines import QUANTILES, THRESHOLDS, cosines_of
from shadowkv.diagnose.coverage import Split, context_chunks, coverage
from shadowkv.diagnose.observe import Basis, Likeness, both_spectra
from shadowkv.diagnose.reuse import replay, reuse_of
from shadowkv.diagnose.spectra import (
    energy_shares,
    kept_by,
    rank_for,
    relative_singular_values,
    similarity,
    top_basis,
    weight_shares,
)
from shadowkv.ops.contract.bounds import ACCUMULATOR, FUNCTION
from shadowkv.ops.select import EMPTY

WIDTH = 24
"""K*D of 2 heads of 12."""


def low_rank(rank: int, tokens: int = 400, mean: float = 0.0) -> torch.Tensor:
    """Keys [S, 2, 12] with ``rank`` directions of equal energy about a mean row, none of it along the others."""
    rows, _ = torch.linalg.qr(torch.randn(tokens, rank, dtype=torch.float64))
    rows, _ = torch.linalg.qr(rows - rows.mean(0))
    columns, _ = torch.linalg.qr(torch.randn(WIDTH, rank, dtype=torch.float64))
    constant = mean * torch.linalg.qr(torch.randn(WIDTH, 1, dtype=torch.float64))[0].T
    return (rows @ columns.T + constant).reshape(tokens, 2, 12)


@pytest.mark.parametrize("rank", [1, 4, 20, WIDTH])
def test_the_rank_of_keys_of_low_rank(rank):
    shares = energy_shares(low_rank(rank), centre=False)
    assert float(shares.sum()) == pytest.approx(1)
    assert shares[:rank].tolist() == pytest.approx([1 / rank] * rank)
    for energy in (0.5, 0.9, 0.95, 0.99, 1.0):
        assert rank_for(shares, energy) == math.ceil(energy * rank - 1e-6)
    relative = relative_singular_values(shares)
    assert relative[:rank].tolist() == pytest.approx([1] * rank)
    # Energies are off by the roundings of sums over the tokens and of a decomposition of this width, in float64.
    lost = (400 + WIDTH) * torch.finfo(torch.float64).eps * rank
    assert (relative[rank:] <= lost**0.5).all()


def test_a_mean_takes_a_direction_unless_it_is_subtracted():
    keys = low_rank(4, mean=1.0)
    plain, centred = (energy_shares(keys, centre=centre) for centre in (False, True))
    assert rank_for(plain, 0.99) == 1
    assert rank_for(centred, 0.99) == 4


def test_weights_are_decomposed_by_their_rows():
    weights = low_rank(3).reshape(400, WIDTH).T
    assert rank_for(weight_shares(weights), 0.99) == 3


def test_nothing_has_no_rank():
    shares = energy_shares(torch.zeros(10, 2, 12), centre=True)
    assert rank_for(shares, 0.9) == 0
    assert relative_singular_values(shares).tolist() == [0] * WIDTH


def test_the_similarity_of_subspaces():
    first, second = torch.linalg.qr(torch.randn(WIDTH, WIDTH, dtype=torch.float64))[0].split([8, 16], dim=1)
    turned = first @ torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]
    assert similarity(first, turned) == pytest.approx(1)
    assert similarity(first, second[:, :8]) == pytest.approx(0, abs=1e-12)
    half = torch.cat([first[:, :4], second[:, :4]], dim=1)
    assert similarity(first, half) == pytest.approx(0.5)
    random = [similarity(first, torch.linalg.qr(torch.randn(WIDTH, 8, dtype=torch.float64))[0]) for _ in range(200)]
    assert sum(random) / 200 == pytest.approx(8 / WIDTH, abs=0.02)


def test_the_same_keys_are_alike_and_others_are_not():
    keys = low_rank(6, mean=0.2)
    plain, centred = both_spectra(keys)
    basis = Basis(top_basis(plain, 6), top_basis(centred, 6))
    same, other = Likeness.of(keys, basis), Likeness.of(low_rank(6), basis)
    assert (same.plain, same.centred, same.kept, same.own) == pytest.approx((1, 1, 1, 1))
    assert other.centred < 0.6
    assert other.kept < 0.6 < other.own == pytest.approx(1)


def test_energy_in_another_subspace():
    (spectrum, _) = both_spectra(low_rank(4))
    assert kept_by(top_basis(spectrum, 2), spectrum) == pytest.approx(0.5)
    assert kept_by(top_basis(spectrum, WIDTH), spectrum) == pytest.approx(1)


def test_a_planted_outlier_is_found():
    base = torch.randn(2, 1, 12)
    keys = (base + 0.05 * torch.randn(2, 320, 12)).contiguous()
    keys[1, 8 * 23 + 3] = -base[1, 0]  # head 1, chunk 23
    found = cosines_of(keys, 8, 2)
    assert found.outlier_ids[1].tolist() == [0, 23]
    assert 0 in found.outlier_ids[0].tolist()
    assert float(found.outlier_cosines[1, 1]) < -0.5
    zero, half = THRESHOLDS.index(0.0), THRESHOLDS.index(0.5)
    assert found.below[:, zero].tolist() == pytest.approx([0, 1 / 40])
    assert found.below[:, half].tolist() == pytest.approx([0, 1 / 40])
    assert found.counts.sum(1).tolist() == [40, 40]
    assert float(found.quantiles[1, 0]) == float(found.outlier_cosines[1, 1])
    assert float(found.quantiles[0, QUANTILES.index(0.5)]) > 0.9


SPLIT = Split(4, 1)


def mass_lost(queries: torch.Tensor, keys: torch.Tensor) -> float:
    """What float32 may lose of a share of the attention that is covered.

    A weight is off by what its logit is, a sum of D products, by the mean of that, by two functions and by the sum of
    all weights. Shares of chunks are summed twice, of those that are chosen and of all, which are taken from 1.
    """
    tokens, dim = keys.shape[1:]
    size = float(queries.double().abs().flatten(0, 1).sum(1).max() * keys.abs().max()) / math.sqrt(dim)
    return (2 * (dim + 2) * size + tokens + 2 * tokens) * ACCUMULATOR + 2 * FUNCTION


def test_even_attention_is_covered_by_the_share_of_the_tokens():
    """No selection is better than chance where all keys are the same."""
    keys, queries = torch.ones(2, 400, 8), torch.randn(4, 5, 8)
    chunks, lost = context_chunks(400, 5, 4), mass_lost(queries, keys)
    by_landmarks, oracle = coverage(queries, keys, {SPLIT: [1, 10, 50]}, SPLIT)
    for covered in (by_landmarks[SPLIT], oracle):
        for position in range(5):
            total = 400 - 5 + position + 1
            always = total - (chunks - 1) * 4
            expected = [(always + 4 * budget) / total for budget in (1, 10, 50)]
            found = covered.mass.reshape(2, 5, 2, 3)[:, position].reshape(4, 3)
            none = covered.always.reshape(2, 5, 2)[:, position].flatten()
            assert none.tolist() == pytest.approx([always / total] * 4, rel=0, abs=lost)
            assert found.flatten().tolist() == pytest.approx(expected * 4, rel=0, abs=lost)


def test_no_choice_covers_more_than_the_oracle_and_a_budget_of_all_covers_all():
    keys, queries = 2 * torch.randn(2, 400, 8), 2 * torch.randn(8, 6, 8)
    budgets, lost = [1, 4, 16, 400], mass_lost(queries, keys)
    by_landmarks, oracle = coverage(queries, keys, {SPLIT: budgets, Split(8, 3): budgets}, SPLIT)
    landmarks = by_landmarks[SPLIT]
    assert oracle.mass.shape == (8 * 6, 4)
    assert all(best > found + 2 * lost for best, found in zip(oracle.mean[:3], landmarks.mean[:3], strict=True))
    for covered in (*by_landmarks.values(), oracle):
        assert covered.mean == sorted(covered.mean)
        assert covered.mass[:, 3].tolist() == pytest.approx([1] * 48, rel=0, abs=lost)
        assert all(low < mean for low, mean in zip(covered.low[:3], covered.mean[:3], strict=True))
    # The oracle against every single chunk that a KV head could have chosen instead.
    logits = queries.reshape(2, 4, 6, 8) @ keys.mT[:, None] / math.sqrt(8)
    at, own = torch.arange(400), torch.arange(394, 400)
    weights = logits.masked_fill(at > own[:, None], -torch.inf).softmax(-1)
    chunks = context_chunks(400, 6, 4)
    mass = weights[..., : chunks * 4].reshape(2, 4, 6, chunks, 4).sum(-1)
    rest = 1 - mass.sum(-1)
    best = (rest[..., None] + mass).mean(1).amax(-1).mean()  # outliers count as choices here: a bound from above
    assert oracle.mean[0] >= float(best) - 2 * lost


def test_landmarks_find_a_chunk_whose_keys_point_along_the_query():
    keys, query = torch.randn(1, 400, 8), torch.ones(1, 1, 8)
    keys[0, 4 * 50 : 4 * 51] = 9.0
    by_landmarks, _ = coverage(query, keys, {SPLIT: [1]}, SPLIT)
    assert by_landmarks[SPLIT].mean[0] > 0.999


def test_positions_in_blocks_are_the_same(monkeypatch):
    keys, queries = torch.randn(2, 300, 8), torch.randn(4, 7, 8)
    whole, whole_oracle = coverage(queries, keys, {SPLIT: [3]}, SPLIT)
    monkeypatch.setattr("shadowkv.diagnose.coverage.BLOCK_NUMBERS", 2 * 2 * 300)
    parts, oracle = coverage(queries, keys, {SPLIT: [3]}, SPLIT)
    lost = 2 * mass_lost(queries, keys)
    assert parts[SPLIT].mean == pytest.approx(whole[SPLIT].mean, rel=0, abs=lost)
    assert oracle.mean == pytest.approx(whole_oracle.mean, rel=0, abs=lost)


def steps(*chosen: list[int]) -> list[torch.Tensor]:
    """One layer, one head."""
    return [torch.tensor(ids)[None, None] for ids in chosen]


def test_a_set_of_one_budget_is_the_last_selection_and_larger_ones_remember_more():
    chosen = steps([0, 1], [1, 2], [0, 1], [5, 6], [0, 1])
    assert replay(chosen, 2, 7)[:, 0].tolist() == [0, 0.5, 0.5, 0, 0]
    assert replay(chosen, 4, 7)[:, 0].tolist() == [0, 0.5, 1, 0, 1]
    found = reuse_of(chosen, [0.2], (1, 2))
    assert found.rates[1][:, 0].tolist() == [0.5, 0.5, 0, 0]
    assert found.mean(2) == pytest.approx(2.5 / 4)


def test_free_slots_are_not_selections():
    chosen = [torch.tensor([[[3, EMPTY], [4, EMPTY]]]), torch.tensor([[[3, EMPTY], [5, EMPTY]]])]
    assert replay(chosen, 2, 6).flatten().tolist() == [0, 0.5]


def test_random_selections_hit_by_their_share():
    """The bound that reuse has to beat: of C chunks, P chosen anew each time are resident with probability P / C."""
    chosen = [torch.stack([torch.randperm(50)[:10] for _ in range(40)])[None] for _ in range(30)]
    assert reuse_of(chosen, [], (1,)).mean(1) == pytest.approx(10 / 50, abs=0.02)
