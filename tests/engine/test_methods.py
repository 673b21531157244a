"""Every method behind the engine: requests of any length end once, and what is kept whole answers as full attention."""

from dataclasses import replace

import pytest
import torch

from shadowkv.config import FullConfig, SamplingParams, SnapKVConfig, StreamingConfig
from shadowkv.engine.request import FinishReason
from shadowkv.eval.agreement import Passage, compare
from tests.cache.baselines import BASELINES
from tests.engine.tiny import assert_idle, prompt, run, tiny_decoder, tiny_engine

LENGTHS = (1, 9, 150, 40)


def tokens(outputs):
    return [[sample.token_ids for sample in output.completions] for output in outputs]


@pytest.mark.parametrize("config", BASELINES.values(), ids=BASELINES.keys())
def test_answers_do_not_depend_on_the_batch(device, config):
    # A batch of other rows is summed in another order, which moves logits by 2e-4 at most. With two tokens to draw from
    # and this seed no draw is closer to the other token than 1e-3, and no third token to the second.
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.7, top_k=2, seed=7, n=2)
    prompts = [prompt(length) for length in LENGTHS]
    engine = tiny_engine(config, device)
    together = run(engine, prompts, params)
    assert_idle(engine)
    assert {sample.finish_reason for output in together for sample in output.completions} == {FinishReason.LENGTH}
    assert tokens(together) == [tokens(run(tiny_engine(config, device), [ids], params))[0] for ids in prompts]


@pytest.mark.parametrize("config", BASELINES.values(), ids=BASELINES.keys())
def test_a_budget_that_covers_everything_answers_as_full_attention(device, config):
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = [prompt(length) for length in LENGTHS]
    full = run(tiny_engine(FullConfig(), device), prompts, params)
    assert tokens(run(tiny_engine(replace(config, budget_tokens=400), device), prompts, params)) == tokens(full)


def test_more_than_snapkv_has_room_for_ends_the_request_and_says_what_to_do(device):
    config = SnapKVConfig(budget_tokens=40, window_tokens=8, generated_tokens=16)
    engine = tiny_engine(config, device)
    (refused,) = run(engine, [prompt(100)], SamplingParams(max_tokens=30, ignore_eos=True))
    assert refused.completions[0].finish_reason == FinishReason.ERROR
    assert "generated_tokens is 16" in str(refused)
    (served,) = run(engine, [prompt(100)], SamplingParams(max_tokens=16, ignore_eos=True))
    assert served.completions[0].finish_reason == FinishReason.LENGTH
    assert_idle(engine)


def test_methods_that_share_a_prompt_have_what_they_would_have_alone(device):
    """Full attention and ShadowKV ask for no queries, and SnapKV's windows differ: each gets its own."""
    decoder = tiny_decoder(device)
    passage = Passage("p", tuple(prompt(200)), tuple(prompt(12, seed=3)))
    methods = {
        "wide": SnapKVConfig(budget_tokens=40, window_tokens=24),
        "narrow": SnapKVConfig(budget_tokens=40, window_tokens=3),
        "streaming": StreamingConfig(budget_tokens=40),
        "quest": BASELINES["quest"],
    }
    _, *together = compare(decoder, passage, list(methods.items()), lambda *_: None)
    for row, (label, config) in zip(together, methods.items(), strict=True):
        _, alone = compare(decoder, passage, [(label, config)], lambda *_: None)
        assert row == alone
        assert torch.isfinite(torch.tensor(row.kl.mean))
        assert row.kl.mean > 0
