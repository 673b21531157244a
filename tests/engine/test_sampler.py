"""Each filter against a naive oracle, draws against their distribution, rows against their neighbours."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shadowkv.config import SamplingParams
from shadowkv.engine.sampler import Sampled, Sampler, SampleState, adjusted, draw
from shadowkv.errors import NumericsError, ShapeError
from shadowkv.ops.contract.bounds import ROUNDOFF, Bounded
from tests.ops.truth import assert_within, log_sum_exp

logit = st.one_of(st.floats(-8, 8, width=32), st.integers(-3, 3).map(float), st.just(-math.inf))
rows = st.lists(logit, min_size=1, max_size=12).filter(lambda row: max(row) > -math.inf)


def tokens(outcomes: list[Sampled | NumericsError]) -> list[int]:
    ids = []
    for outcome in outcomes:
        assert isinstance(outcome, Sampled)
        ids.append(outcome.token_id)
    return ids


def run(sampler: Sampler, logits_BV: Tensor, states: list[SampleState], steps: int) -> list[list[int]]:
    """Tokens by step and row, always from the same logits."""
    return [tokens(sampler.sample(logits_BV, states)) for _ in range(steps)]


# ---- the candidates that the cuts leave ----


def naive_probabilities(row: list[float], params: SamplingParams) -> tuple[dict[int, float], float]:
    """Kept tokens and their probabilities, and how near top-p's cut is to an undecidable tie."""
    top = max(row)
    scaled = [(x - top) / params.temperature for x in row]  # logits that are equal from here on are a tie
    weight = {i: math.exp(x) for i, x in enumerate(scaled)}
    kept = [i for i in weight if weight[i] >= params.min_p]
    kept.sort(key=lambda i: (-scaled[i], i))
    if params.top_k:
        kept = kept[: params.top_k]
    total = sum(weight[i] for i in kept)
    margin = min(abs(weight[i] - params.min_p) for i in weight)
    if params.top_p < 1:
        cut, mass = [], 0.0
        for i in kept:
            margin = min(margin, abs(mass - params.top_p * total))
            if mass < params.top_p * total:
                cut.append(i)
            mass += weight[i]
        kept = cut
    total = sum(weight[i] for i in kept)
    return {i: weight[i] / total for i in kept}, margin


cuts = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    top_k=st.integers(0, 14),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)


@pytest.mark.parametrize("few", [3, 2048], ids=["mostly-sorted", "mostly-top"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=rows, params=cuts)
@example(row=[0.0, 1.0, -1.1754943508222875e-38, 0.0], params=SamplingParams(temperature=0.7, top_k=3))
def test_cuts_and_probabilities_equal_the_oracle(
    few: int, monkeypatch: pytest.MonkeyPatch, row: list[float], params: SamplingParams
) -> None:
    """The inverse CDF is walked on a grid: each kept token gets its share of it, no other one any."""
    monkeypatch.setattr("shadowkv.engine.sampler.FEW", few)
    expected, margin = naive_probabilities(row, params)
    assume(margin > 1e-9)
    grid = 64
    hits = Counter(int(draw(torch.tensor(row), params, (i + 0.5) / grid)) for i in range(grid))
    assert set(hits) <= set(expected)
    for token, probability in expected.items():
        assert abs(hits[token] / grid - probability) <= 1.5 / grid


@settings(max_examples=200, deadline=None)
@given(row=rows, params=cuts, uniform=st.sampled_from([0.0, 0.5, math.nextafter(1.0, 0.0)]))
def test_a_candidate_is_always_left(row: list[float], params: SamplingParams, uniform: float) -> None:
    assert row[int(draw(torch.tensor(row), params, uniform))] > -math.inf


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6, 100.0])
@pytest.mark.parametrize("top_p", [1e-300, 1e-12, 0.5, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 1.0])
def test_extreme_settings_leave_the_best(temperature: float, top_p: float, min_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, top_k=1)
    row_V = torch.tensor([3e38, -3e38, -math.inf, 2e38])
    assert int(draw(row_V, params, math.nextafter(1.0, 0.0))) == 0


def test_ties_go_to_the_lowest_id() -> None:
    row_V = torch.tensor([1.0, 5.0, 5.0, 5.0])
    kept = {int(draw(row_V, SamplingParams(temperature=1.0, top_k=2), u / 100)) for u in range(100)}
    assert kept == {1, 2}
    sampler = Sampler(4, "cpu")
    states = [sampler.open(SamplingParams()), sampler.open(SamplingParams(presence_penalty=1.0))]
    assert tokens(sampler.sample(row_V.expand(2, 4), states)) == [1, 1]


# ---- distribution ----


def chi_square(counts: Counter[int], probability: dict[int, float], draws: int) -> float:
    assert set(counts) <= set(probability)
    return sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in probability.items())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=11),
        SamplingParams(temperature=0.6, seed=12),
        SamplingParams(temperature=1.3, top_k=7, seed=13),
        SamplingParams(temperature=1.0, top_p=0.8, seed=14),
        SamplingParams(temperature=1.0, min_p=0.02, seed=15),
        SamplingParams(temperature=1.5, top_k=9, top_p=0.9, min_p=0.05, seed=16),
    ],
    ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square at its 0.1 % point (Wilson-Hilferty); a wrong temperature fails it, as shown below."""
    draws = 4000
    row = torch.randn(20, generator=torch.Generator().manual_seed(3)).mul(1.5).tolist()
    sampler = Sampler(20, "cpu")
    state = sampler.open(params)
    counts = Counter(step[0] for step in run(sampler, torch.tensor([row]), [state], draws))
    probability, _ = naive_probabilities(row, params)
    freedom = len(probability) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square(counts, probability, draws) < bound
    warmer = SamplingParams(params.max_tokens, params.temperature * 1.2, params.top_p, params.top_k, params.min_p)
    wrong = {i: math.exp(row[i] / warmer.temperature) for i in probability}
    total = sum(wrong.values())
    assert chi_square(counts, {i: w / total for i, w in wrong.items()}, draws) > bound


def test_samples_of_a_request_differ_and_are_uncorrelated() -> None:
    sampler = Sampler(2, "cpu")
    states = [sampler.open(SamplingParams(temperature=1.0, n=2, seed=5), index=i) for i in range(2)]
    steps = run(sampler, torch.zeros(2, 2), states, 2000)
    equal = sum(a == b for a, b in steps)
    assert abs(equal - 1000) < 3.3 * math.sqrt(500)


# ---- seeds ----


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.integers(1, 6), where=st.integers(0, 5), others=st.integers(0, 1000))
def test_a_seeded_row_does_not_depend_on_its_batch(data: st.DataObject, size: int, where: int, others: int) -> None:
    where = where % size
    vocab = 50
    sampler = Sampler(vocab, "cpu")
    g = torch.Generator().manual_seed(others)
    mine = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, frequency_penalty=0.3, logprobs=2, seed=77)
    other = st.builds(SamplingParams, temperature=st.sampled_from([0.0, 1.0]), top_k=st.integers(0, 5))
    logits_V = torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    alone = sampler.open(mine, index=1)
    batch = [sampler.open(data.draw(other)) for _ in range(size)]
    batch[where] = sampler.open(mine, index=1)
    for _ in range(6):
        logits_BV = torch.randn(size, vocab, generator=g)
        logits_BV[where] = logits_V
        (expected,) = sampler.sample(logits_V[None], [alone])
        assert sampler.sample(logits_BV, batch)[where] == expected


def test_sample_i_uses_seed_plus_i_and_no_seed_is_fresh() -> None:
    sampler = Sampler(1000, "cpu")
    logits_BV = torch.zeros(1, 1000)

    def answer(seed: int | None, index: int) -> list[list[int]]:
        return run(sampler, logits_BV, [sampler.open(SamplingParams(temperature=1.0, seed=seed), index=index)], 5)

    assert answer(4, 3) == answer(7, 0)
    assert answer(4, 3) != answer(4, 2)
    assert answer(None, 0) != answer(None, 0)
    assert answer(-3, 0) == answer(-3, 0) != answer(3, 0)


def test_draws_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    sampler = Sampler(10, "cpu")
    run(sampler, torch.zeros(1, 10), [sampler.open(SamplingParams(temperature=1.0))], 3)
    assert torch.equal(torch.get_rng_state(), before)


# ---- penalties and masks ----

ids = st.lists(st.integers(0, 7), max_size=10)


@settings(max_examples=200, deadline=None)
@given(
    row=st.lists(st.floats(-5, 5, width=32), min_size=8, max_size=8),
    prompt=ids,
    answer=ids,
    repetition=st.sampled_from([1.0, 0.5, 1.3]),
    presence=st.sampled_from([0.0, -1.5, 0.75]),
    frequency=st.sampled_from([0.0, -0.5, 1.25]),
)
def test_penalties_equal_the_oracle(
    row: list[float], prompt: list[int], answer: list[int], repetition: float, presence: float, frequency: float
) -> None:
    params = SamplingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    state = Sampler(8, "cpu").open(params, prompt)
    for token in answer:
        state.count(torch.tensor(token))
    expected, size = list(row), [0.0] * 8
    for i in range(8):
        if i in prompt or i in answer:
            expected[i] = expected[i] / repetition if expected[i] > 0 else expected[i] * repetition
        size[i] = abs(expected[i]) + abs(frequency) * answer.count(i) + abs(presence)
        expected[i] -= frequency * answer.count(i) + presence * (i in answer)
    # A quotient or product by a rounded rate, and two differences: none is larger than these magnitudes together.
    allowed_V = 6 * ROUNDOFF * torch.tensor(size, dtype=torch.float64)
    assert_within(adjusted(torch.tensor(row), state), Bounded(torch.tensor(expected, dtype=torch.float64), allowed_V))


def test_chosen_tokens_are_counted_as_they_come() -> None:
    """Greedy with a penalty that outweighs the logits visits the vocabulary once, then begins again."""
    sampler = Sampler(4, "cpu")
    state = sampler.open(SamplingParams(frequency_penalty=2.0))
    steps = run(sampler, torch.tensor([[0.3, 0.2, 0.1, 0.0]]), [state], 8)
    assert [step[0] for step in steps] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert state.generated_tokens == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_tokens_are_masked_until_min_tokens(temperature: float) -> None:
    sampler = Sampler(6, "cpu")
    logits_BV = torch.tensor([[0.0, 50.0, 0.0, 40.0, 0.0, 45.0]])
    params = SamplingParams(min_tokens=3, temperature=temperature, stop_token_ids=(5, 9999), seed=0)
    state = sampler.open(params, end_token_ids=[1, 3])
    steps = [step[0] for step in run(sampler, logits_BV, [state], 4)]
    assert not {1, 3, 5} & set(steps[:3])
    assert steps[3] == 1


# ---- rows without a token to choose ----


@pytest.mark.parametrize(
    "bad", [[math.nan, 1, 2], [1, 2, math.nan], [math.nan] * 3, [math.inf, 1, 2], [-math.inf] * 3], ids=str
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_unusable_row_fails_alone(bad: list[float], temperature: float) -> None:
    sampler = Sampler(3, "cpu")
    params = SamplingParams(temperature=temperature, top_k=2, top_p=0.9, frequency_penalty=0.1, logprobs=3, seed=1)
    good = [0.0, 1.0, 2.0]
    (expected,) = sampler.sample(torch.tensor([good]), [sampler.open(params)])
    first, middle, last = sampler.sample(
        torch.tensor([good, bad, good]), [sampler.open(params), sampler.open(params), sampler.open(params)]
    )
    assert first == last == expected
    assert isinstance(middle, NumericsError)
    assert "NaN or infinite" in str(middle)


def test_a_row_of_nothing_but_end_tokens_says_so() -> None:
    sampler = Sampler(3, "cpu")
    state = sampler.open(SamplingParams(min_tokens=1), end_token_ids=[0, 2])
    (outcome,) = sampler.sample(torch.tensor([[1.0, -math.inf, 2.0]]), [state])
    assert isinstance(outcome, NumericsError)
    assert "min_tokens" in str(outcome)


# ---- log-probabilities ----


@pytest.mark.parametrize("top", [0, 1, 5, 99])
def test_logprobs_are_those_of_the_model(top: int) -> None:
    vocab = 30
    sampler = Sampler(vocab, "cpu")
    logits_BV = torch.randn(3, vocab) * 3
    params = SamplingParams(temperature=2.0, top_k=20, frequency_penalty=1.0, logprobs=top, seed=2)
    states = [sampler.open(params), sampler.open(SamplingParams()), sampler.open(params)]
    outcomes = sampler.sample(logits_BV, states)
    truth_BV = Bounded.exact(logits_BV) - log_sum_exp(Bounded.exact(logits_BV), 1)
    for i in (0, 2):
        outcome = outcomes[i]
        assert isinstance(outcome, Sampled)
        order_V = logits_BV[i].argsort(descending=True)[:top]
        assert [token for token, _ in outcome.top] == order_V.tolist()
        assert_within(torch.tensor([logprob for _, logprob in outcome.top]), truth_BV[i, order_V])
        assert_within(torch.tensor(outcome.logprob), truth_BV[i, outcome.token_id])
    assert outcomes[1] == Sampled(int(logits_BV[1].argmax()))


# ---- seams ----


def test_half_precision_logits_and_an_empty_batch() -> None:
    sampler = Sampler(5, "cpu")
    assert sampler.sample(torch.empty(0, 5), []) == []
    row_V = torch.tensor([0, 1, 3, 2, 0], dtype=torch.bfloat16)
    assert tokens(sampler.sample(row_V[None], [sampler.open(SamplingParams())])) == [2]


@pytest.mark.parametrize("shape", [(1, 5), (2, 4), (3, 5)])
def test_wrong_shapes_are_refused(shape: tuple[int, int]) -> None:
    sampler = Sampler(5, "cpu")
    with pytest.raises(ShapeError, match=r"\(2, 5\)"):
        sampler.sample(torch.zeros(shape), [sampler.open(SamplingParams()), sampler.open(SamplingParams())])


def test_logits_are_not_written_to() -> None:
    sampler = Sampler(5, "cpu")
    logits_BV = torch.randn(2, 5)
    before_BV = logits_BV.clone()
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0, min_tokens=1, logprobs=1)
    sampler.sample(logits_BV, [sampler.open(params, [1], [2]), sampler.open(SamplingParams())])
    assert torch.equal(logits_BV, before_BV)
