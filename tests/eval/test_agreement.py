"""Logit agreement against a naive computation, and the passages that it is measured on."""

import math

import pytest
import torch

from shadowkv.config import FullConfig, ShadowKVConfig
from shadowkv.engine.memory import Memory
from shadowkv.errors import CapacityError, RequestError
from shadowkv.eval import agreement
from shadowkv.eval.agreement import CUE_TOKENS, compare, copy_passage, estimate, natural_passage
from shadowkv.ops.contract.bounds import ACCUMULATOR
from tests.engine.tiny import prompt, tiny_decoder, tiny_engine
from tests.rounding import allowance

SPARSE = ShadowKVConfig(rank=4, budget_tokens=8, outlier_chunks=1, recent_chunks=7)
LOSSLESS = ShadowKVConfig(rank=32, budget_tokens=4096, exact_while_fits=False)


def unseen(stage: str, done: int, total: int) -> None:
    pass


def test_the_natural_passage_goes_on_and_the_copy_repeats():
    ids = list(range(1000))
    natural = natural_passage(ids, 600, 20)
    assert natural.prompt_ids == tuple(range(600))
    assert natural.forced_ids == tuple(range(600, 621))
    copy = copy_passage(ids, 600, 20)
    assert len(copy.prompt_ids) == 600
    assert copy.prompt_ids[-CUE_TOKENS:] == tuple(range(150, 150 + CUE_TOKENS))
    assert copy.forced_ids == tuple(range(150 + CUE_TOKENS, 150 + CUE_TOKENS + 21))
    with pytest.raises(RequestError, match="621 are needed"):
        natural_passage(ids[:620], 600, 20)
    with pytest.raises(RequestError, match="too short to repeat 400"):
        copy_passage(ids, 600, 400)


def test_figures_are_those_of_a_naive_computation(device):
    decoder = tiny_decoder(device)
    passage = natural_passage(prompt(500), 400, 12)
    full, sparse, lossless = compare(decoder, passage, [("sparse", SPARSE), ("lossless", LOSSLESS)], unseen)

    def logprobs_of(config):
        runner = tiny_engine(config, device, decoder=decoder).runner
        seq, _ = runner.prefill(500, passage.prompt_ids)
        rows = [runner.decode([seq], [token])[0].log_softmax(-1) for token in passage.forced_ids[:-1]]
        return torch.stack(rows).cpu()

    p, q = (logprobs_of(config).double() for config in (FullConfig(), SPARSE))
    # How far the other way to the same log-probabilities may be, each as far from the exact ones as rounding puts it.
    off = 2 * max(allowance(lambda config=config: logprobs_of(config), draws=2) for config in (FullConfig(), SPARSE))
    # So much for the log-probability that is looked up, and a share of twice as much for the weights of all.
    kl_off = 2 * off * (1 + float((p.exp() * (p - q).abs()).sum(1).max()))
    kl = sum(float((p[t].exp() * (p[t] - q[t])).sum()) for t in range(12)) / 12
    same = sum(int(p[t].argmax() == q[t].argmax()) for t in range(12)) / 12
    surprise = -sum(float(q[t][token]) for t, token in enumerate(passage.forced_ids[1:])) / 12
    assert sparse.kl.mean == pytest.approx(kl, rel=0, abs=kl_off)
    assert kl > 10 * kl_off
    first, second = torch.stack([p, q]).topk(2).values.unbind(-1)
    assert (first - second > 2 * off).all(), "a close call; take another seed"
    assert sparse.top1.mean == pytest.approx(same)
    assert sparse.perplexity == pytest.approx(math.exp(surprise), rel=2 * off)
    assert full.kl.mean == 0
    assert full.top1.mean == 1
    # Differences of at most 2 * off have a divergence of their square over 8 at most (Hoeffding's lemma); the sum of
    # products of probabilities and differences is rounded besides.
    lost = (p.shape[1] + 8) * ACCUMULATOR * float((p.exp() * p.abs()).sum(1).max())
    assert lossless.kl.mean < off**2 / 2 + 2 * lost
    assert sparse.mean_energy is not None
    assert 0 < sparse.mean_energy < lossless.mean_energy == pytest.approx(1)


def test_an_interval_holds_its_mean_and_shrinks_with_more_steps():
    torch.manual_seed(1)
    values = torch.rand(400)
    few, many = estimate(values[:40]), estimate(values)
    for one, part in ((few, values[:40]), (many, values)):
        assert one.mean == pytest.approx(float(part.double().mean()))
        assert one.low < one.mean < one.high
    assert many.high - many.low < (few.high - few.low) / 2
    assert estimate(values) == many


def test_a_passage_beyond_the_model_is_refused(device):
    with pytest.raises(RequestError, match="the model takes 8192"):
        compare(tiny_decoder(device), natural_passage(prompt(9000), 8500, 10), [], unseen)


def test_a_prompt_that_does_not_fit_is_refused_however_many_methods_there_are(device, monkeypatch):
    monkeypatch.setattr(agreement, "find_memory", lambda *_: Memory(there, 0, shared=True))
    there, passage = 3 << 20, natural_passage(prompt(500), 400, 12)
    compare(tiny_decoder(device), passage, [("sparse", SPARSE)] * 30, unseen)
    there = 1 << 20
    with pytest.raises(
        CapacityError, match=rf"a prompt of 413 tokens with a cache takes .* there are {there:,} together"
    ):
        compare(tiny_decoder(device), passage, [("sparse", SPARSE)], unseen)
