"""Logit agreement against a naive computation, and the passages that it is measured on."""

import math

import pytest
import torch

from shadowkv.config import FullConfig, ShadowKVConfig
from shadowkv.engine.memory import Memory
from shadowkv.errors import CapacityError, RequestError
from shadowkv.eval import agreement
from shadowkv.eval.agreement import CUE_TOKENS, compare, copy_passage, estimate, natural_passage
from tests.engine.tiny import prompt, tiny_decoder, tiny_engine

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
    logprobs = {}
    for name, config in (("full", FullConfig()), ("sparse", SPARSE)):
        runner = tiny_engine(config, device, decoder=decoder).runner
        seq, _ = runner.prefill(500, passage.prompt_ids)
        rows = [runner.decode([seq], [token])[0].double().log_softmax(-1).cpu() for token in passage.forced_ids[:-1]]
        logprobs[name] = torch.stack(rows)
    p, q = logprobs["full"], logprobs["sparse"]
    kl = sum(float((p[t].exp() * (p[t] - q[t])).sum()) for t in range(12)) / 12
    same = sum(int(p[t].argmax() == q[t].argmax()) for t in range(12)) / 12
    surprise = -sum(float(q[t][token]) for t, token in enumerate(passage.forced_ids[1:])) / 12
    assert sparse.kl.mean == pytest.approx(kl, rel=1e-4)
    assert kl > 0.01
    assert sparse.top1.mean == pytest.approx(same)
    assert sparse.perplexity == pytest.approx(math.exp(surprise), rel=1e-4)
    assert full.kl.mean == 0
    assert full.top1.mean == 1
    assert lossless.kl.mean < 1e-6
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
