"""The engine when things go wrong in an odd order: interrupted steps, and contexts that change under a request."""

import pytest

from shadowkv.config import SamplingParams, ShadowKVConfig
from shadowkv.engine.request import FinishReason, Request
from shadowkv.errors import RequestError
from tests.engine.tiny import assert_idle, drain, prompt, run, tiny_engine

SPARSE = ShadowKVConfig(rank=16, chunk_tokens=8, budget_tokens=64, outlier_chunks=4, recent_chunks=8)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
ONE = SamplingParams(max_tokens=1, ignore_eos=True)
TEXT = tuple(prompt(300))


def ask(engine, name, context, question, params=GREEDY, *, keep=False):
    held = context.token_ids
    ids = [*held, *context.pending, *question]
    engine.submit(Request(name, ids, params, reused_tokens=len(held)), context, keep=keep)
    return ids


@pytest.mark.parametrize("moment", ["prefill", "decode", "sample"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError])
def test_a_step_that_is_broken_off_ends_what_it_was_working_on_and_nothing_else(device, monkeypatch, moment, fault):
    engine = tiny_engine(SPARSE, device)
    engine.submit(Request("a", prompt(50), GREEDY))
    engine.step()
    engine.submit(Request("b", prompt(200), GREEDY))

    def fail(*args, **kwargs):
        raise fault

    where = engine.sampler if moment == "sample" else engine.runner
    with monkeypatch.context() as patch:
        patch.setattr(where, moment, fail)
        if fault is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        else:
            engine.submit(Request("c", prompt(60), GREEDY))
            outputs = {output.request_id for output in engine.step().outputs}
            assert outputs == {"prefill": {"b"}, "decode": {"a"}, "sample": {"a", "b"}}[moment]
            return
    engine.submit(Request("c", prompt(60), GREEDY))
    outputs = drain(engine)
    broken = {"prefill": {"b"}, "decode": {"a", "b"}, "sample": {"a", "b"}}[moment]
    assert all(outputs[name].completions[0].finish_reason is FinishReason.ERROR for name in broken)
    for other, length in {"a": 50, "b": 200, "c": 60}.items():
        if other not in broken:
            (alone,) = run(tiny_engine(SPARSE, device), [prompt(length)], GREEDY)
            assert outputs[other].completions[0].token_ids == alone.completions[0].token_ids
    assert_idle(engine)


def test_a_question_that_waited_while_the_context_went_on_is_answered_as_it_was_asked(device):
    engine = tiny_engine(SPARSE, device)
    kept = engine.keep(TEXT)
    ask(engine, "turn", kept, prompt(20, seed=2), ONE, keep=True)
    ids = ask(engine, "late", kept, prompt(30, seed=3))
    late = drain(engine)["late"]
    assert len(kept.token_ids) == 320
    (alone,) = run(tiny_engine(SPARSE, device), [ids], GREEDY)
    assert late.completions[0].token_ids == alone.completions[0].token_ids
    assert late.timing.reused_tokens == 0
    engine.drop(kept)
    assert_idle(engine)


def test_a_context_goes_on_from_one_answer_at_a_time(device):
    engine = tiny_engine(SPARSE, device)
    kept = engine.keep(TEXT)
    ask(engine, "one", kept, prompt(20, seed=2), keep=True)
    with pytest.raises(RequestError, match="one answer at a time"):
        ask(engine, "two", kept, prompt(30, seed=3), keep=True)
    drain(engine)
    ask(engine, "two", kept, prompt(30, seed=3), keep=True)
    drain(engine)
    engine.drop(kept)
    assert_idle(engine)


def test_a_context_that_was_released_is_not_brought_back_by_an_answer(device):
    engine = tiny_engine(SPARSE, device)
    kept = engine.keep(TEXT)
    ask(engine, "turn", kept, prompt(20, seed=2), keep=True)
    engine.step()
    engine.drop(kept)
    assert drain(engine)["turn"].completions[0].finish_reason is FinishReason.LENGTH
    assert kept.seq is None
    assert_idle(engine)


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_request_may_be_cancelled_by_whoever_watches_its_prefill(device, max_tokens):
    engine = tiny_engine(SPARSE, device)
    engine.submit(Request("a", prompt(200), SamplingParams(max_tokens=max_tokens, ignore_eos=True)))
    engine.on_prefill = lambda done, total: engine.cancel("a")
    outputs = drain(engine)
    assert outputs["a"].completions[0].finish_reason is FinishReason.CANCELLED
    assert_idle(engine)


def test_samples_whose_keys_cannot_be_computed_again_end_with_one_error_each(device, monkeypatch):
    engine = tiny_engine(SPARSE, device)
    engine.submit(Request("a", prompt(50), SamplingParams(max_tokens=9, n=3, temperature=1.0, ignore_eos=True)))
    engine.step()

    def fail(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.runner, "must_recompute", lambda before, after: True)
    monkeypatch.setattr(engine.runner, "prefill", fail)
    outputs = drain(engine)
    assert [c.finish_reason for c in outputs["a"].completions] == [FinishReason.ERROR] * 3
    assert_idle(engine)
