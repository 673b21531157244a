"""The engine on a tiny random model: what users of such engines have seen break elsewhere."""

import dataclasses
import random

import pytest
import torch

from shadowkv.config import FullConfig, SamplingParams, ShadowKVConfig
from shadowkv.engine.request import FinishReason, Request
from shadowkv.errors import CapacityError, RequestError
from tests.engine.tiny import END, VOCAB, assert_idle, drain, prompt, run, tiny_decoder, tiny_engine
from tests.rounding import allowance

SPARSE = ShadowKVConfig(rank=16, chunk_tokens=8, budget_tokens=64, outlier_chunks=4, recent_chunks=8)
LOSSLESS = ShadowKVConfig(rank=32, budget_tokens=8192, exact_while_fits=False, recent_chunks=8, outlier_chunks=4)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


def tokens(outputs):
    return [output.completions[0].token_ids for output in outputs]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 64, 65, 159, 160, 161, 4096, 4097])
def test_prompts_of_any_length_answer_like_full_attention_where_everything_may_be_attended(device, length):
    full = run(tiny_engine(FullConfig(), device), [prompt(length)], GREEDY)
    lossless = run(tiny_engine(LOSSLESS, device), [prompt(length)], GREEDY)
    assert tokens(full) == tokens(lossless)


def test_logits_are_full_attentions_when_all_is_resident(device):
    """Teacher-forced, so that one step's rounding does not become another text."""
    decoder, ids = tiny_decoder(device), prompt(700)

    def logits_of(config):
        runner = tiny_engine(config, device, decoder=decoder).runner
        seq, first_V = runner.prefill(1000, ids)
        steps = [first_V] + [runner.decode([seq], [t])[0] for t in prompt(20, seed=1)]
        assert runner.cache.stats(seq).attention == ("exact" if config == FullConfig() else "sparse")
        return torch.stack(steps)

    full_TV, lossless_TV = logits_of(FullConfig()), logits_of(LOSSLESS)
    # Both are about the same exact logits, each as far as rounding may put it.
    allowed = sum(allowance(lambda config=config: logits_of(config), draws=2) for config in (FullConfig(), LOSSLESS))
    assert (lossless_TV - full_TV).abs().max() <= allowed


@pytest.mark.parametrize("config", [FullConfig(), SPARSE, LOSSLESS], ids=["full", "sparse", "lossless"])
def test_unequal_lengths_in_one_batch_answer_as_alone(device, config):
    lengths = [37, 512, 3001]
    alone = {n: tokens(run(tiny_engine(config, device), [prompt(n)], GREEDY))[0] for n in lengths}
    for order in ([37, 512, 3001], [3001, 37, 512]):
        outputs = run(tiny_engine(config, device, max_admit=3), [prompt(n) for n in order], GREEDY)
        assert tokens(outputs) == [alone[n] for n in order]


def test_a_short_request_stays_dense_and_says_so(device):
    engine = tiny_engine(ShadowKVConfig(), device)
    (output,) = run(engine, [prompt(500)], GREEDY)
    stats = output.completions[0].stats
    assert stats.attention == "exact"
    assert stats.selected_chunks == stats.fetched_bytes == stats.host_bytes == 0
    assert tokens([output]) == tokens(run(tiny_engine(FullConfig(), device), [prompt(500)], GREEDY))


def test_a_short_prompt_with_a_long_answer_becomes_sparse_on_the_way(device):
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    engine = tiny_engine(SPARSE, device)
    (output,) = run(engine, [prompt(30)], params)
    stats = output.completions[0].stats
    assert len(output.completions[0].token_ids) == 400
    assert stats.attention == "sparse"
    assert stats.tokens == 30 + 399
    assert stats.hits > 0
    assert stats.misses > 0
    exact = run(tiny_engine(FullConfig(), device), [prompt(30)], params)
    fits = SPARSE.outlier_chunks * 8 + SPARSE.budget_tokens + SPARSE.recent_chunks * 8 - 30
    assert output.completions[0].token_ids[:fits] == exact[0].completions[0].token_ids[:fits]


def test_statistics_add_up(device):
    engine = tiny_engine(SPARSE, device)
    (output,) = run(engine, [prompt(1000)], GREEDY)
    stats = output.completions[0].stats
    steps, layers, heads = 23, 2, 2  # the first token comes out of the prefill
    assert stats.selected_chunks == steps * layers * heads * SPARSE.budget_chunks
    assert stats.fetched_chunks == stats.misses
    assert stats.fetched_bytes == stats.misses * 8 * 16 * 4
    assert stats.rank == [16, 16]
    assert all(0 < energy <= 1 for energy in stats.energy)


def test_two_hundred_requests_half_of_them_cancelled_leave_nothing_behind(device):
    rng = random.Random(3)
    engine = tiny_engine(SPARSE, device, max_batch=5, max_admit=2)
    outputs, alive, sent = {}, set(), 0
    while sent < 200 or engine.has_work:
        while sent < 200 and len(alive) < 12:
            name = f"r{sent}"
            params = SamplingParams(max_tokens=rng.randint(1, 12), n=rng.choice([1, 1, 1, 3]), temperature=1.0)
            engine.submit(Request(name, prompt(rng.choice([5, 60, 300]), sent), params))
            alive.add(name)
            sent += 1
        if alive and rng.random() < 0.5:
            victim = rng.choice(sorted(alive))
            assert engine.cancel(victim)
            assert not engine.cancel(victim)
            alive.discard(victim)
        for output in engine.step().outputs:
            assert output.request_id not in outputs
            outputs[output.request_id] = output
            alive.discard(output.request_id)
    assert len(outputs) == 200
    reasons = {c.finish_reason for output in outputs.values() for c in output.completions}
    assert reasons >= {FinishReason.CANCELLED, FinishReason.LENGTH}
    assert_idle(engine)


@pytest.mark.parametrize("config", [FullConfig(), SPARSE], ids=["full", "sparse"])
def test_a_pool_for_two_makes_the_third_wait_and_none_die(device, config):
    decoder = tiny_decoder(device)
    engine = tiny_engine(config, device, decoder=decoder)
    price = type(engine.runner.cache).price(decoder.spec.geometry(decoder.dtype), config, 400 + 24)
    engine = tiny_engine(
        config, device, decoder=decoder, device_bytes=2 * price.device_bytes, host_bytes=2 * price.host_bytes
    )
    outputs = run(engine, [prompt(400, i) for i in range(3)], GREEDY)
    assert [o.completions[0].finish_reason for o in outputs] == [FinishReason.LENGTH] * 3
    assert outputs[2].timing.queued_s > outputs[1].timing.queued_s
    assert_idle(engine)


def test_what_can_never_run_is_refused_with_the_figures(device):
    engine = tiny_engine(SPARSE, device, max_context_tokens=300)
    with pytest.raises(RequestError, match=r"prompt has 290 tokens and max_tokens is 24.*at most 300"):
        engine.submit(Request("long", prompt(290), GREEDY))
    with pytest.raises(RequestError, match="no tokens"):
        engine.submit(Request("empty", [], GREEDY))
    for wrong in (VOCAB, -1, 2.5, True):
        with pytest.raises(RequestError, match="token id"):
            engine.submit(Request("wrong", [1, wrong], GREEDY))
    small = tiny_engine(SPARSE, device, device_bytes=4096)
    with pytest.raises(CapacityError, match="bytes"):
        small.submit(Request("big", prompt(200), GREEDY))
    assert_idle(engine)
    assert_idle(small)


def test_a_request_that_fails_takes_no_other_down(device, monkeypatch):
    engine = tiny_engine(SPARSE, device, max_admit=3)
    original = engine.runner.prefill

    def fail_one(capacity, token_ids, progress=None):
        if len(token_ids) == 111:
            raise RuntimeError("a fault of this prompt")
        return original(capacity, token_ids, progress)

    monkeypatch.setattr(engine.runner, "prefill", fail_one)
    outputs = run(engine, [prompt(100), prompt(111), prompt(400)], dataclasses.replace(GREEDY, n=2, temperature=0.7))
    reasons = [[c.finish_reason for c in output.completions] for output in outputs]
    assert reasons == [[FinishReason.LENGTH] * 2, [FinishReason.ERROR] * 2, [FinishReason.LENGTH] * 2]
    assert "a fault of this prompt" in outputs[1].completions[0].error
    assert_idle(engine)


def test_a_failing_step_ends_every_row_once(device, monkeypatch):
    engine = tiny_engine(SPARSE, device, max_admit=3)

    def fail(seqs, token_ids):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.runner, "decode", fail)
    outputs = run(engine, [prompt(50, i) for i in range(3)], GREEDY)
    assert all(o.completions[0].finish_reason is FinishReason.ERROR for o in outputs)
    assert all(len(o.completions[0].token_ids) == 1 for o in outputs)
    assert_idle(engine)


def test_nan_logits_end_their_row_only(device, monkeypatch):
    engine = tiny_engine(SPARSE, device, max_admit=3)
    original = engine.runner.decode

    def poison(seqs, token_ids):
        logits = original(seqs, token_ids).clone()
        logits[0] = torch.nan
        return logits

    engine.submit(Request("a", prompt(50), GREEDY))
    engine.submit(Request("b", prompt(60), GREEDY))
    engine.step()
    monkeypatch.setattr(engine.runner, "decode", poison)
    (a,) = engine.step().outputs
    monkeypatch.setattr(engine.runner, "decode", original)
    outputs = drain(engine)
    assert a.request_id == "a"
    assert a.completions[0].finish_reason is FinishReason.ERROR
    assert "NaN" in a.completions[0].error
    assert outputs["b"].completions[0].finish_reason is FinishReason.LENGTH
    assert_idle(engine)


def test_several_samples_share_a_prefill_and_differ_by_seed(device):
    engine = tiny_engine(SPARSE, device)
    # Rounding, which batches change, moves logits by 2e-4 at most; here no draw is closer to another token than 3e-3.
    params = SamplingParams(max_tokens=20, temperature=1.0, top_k=4, n=3, seed=11, ignore_eos=True)
    (output,) = run(engine, [prompt(300)], params)
    assert len({c.token_ids for c in output.completions}) == 3
    for i, completion in enumerate(output.completions):
        single = dataclasses.replace(params, n=1, seed=11 + i)
        (alone,) = run(tiny_engine(SPARSE, device), [prompt(300)], single)
        assert alone.completions[0].token_ids == completion.token_ids
    assert_idle(engine)


def test_end_tokens_stop_strings_and_lengths(device):
    engine = tiny_engine(SPARSE, device)
    (free,) = run(engine, [prompt(90)], GREEDY)
    text, ids = free.completions[0].text, free.completions[0].token_ids
    assert text == "".join(chr(32 + t) for t in ids if t != END)
    stop = text[5:8]
    (stopped,) = run(engine, [prompt(90)], dataclasses.replace(GREEDY, stop=stop))
    completion = stopped.completions[0]
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_reason == stop
    assert completion.text == text[: text.index(stop)]
    (ended,) = run(engine, [prompt(90)], SamplingParams(max_tokens=24, stop_token_ids=(ids[3],)))
    first = ids.index(ids[3])
    assert ended.completions[0].token_ids == ids[: first + 1]
    assert ended.completions[0].stop_reason == ids[3]


def test_streamed_pieces_are_the_text(device):
    engine = tiny_engine(SPARSE, device)
    engine.submit(Request("s", prompt(80), dataclasses.replace(GREEDY, n=2, temperature=1.0, seed=1)))
    pieces, ids, finished = {0: "", 1: ""}, {0: (), 1: ()}, {}
    while engine.has_work:
        for chunk in engine.step().chunks:
            pieces[chunk.index] += chunk.text
            ids[chunk.index] += chunk.token_ids
            if chunk.finished:
                assert chunk.index not in finished
                finished[chunk.index] = chunk.finished
    for index, completion in finished.items():
        assert pieces[index] == completion.text
        assert ids[index] == completion.token_ids


def test_questions_about_a_kept_context_do_not_see_each_other(device):
    engine = tiny_engine(SPARSE, device)
    text, question = tuple(prompt(600)), prompt(45, seed=2)
    kept = engine.keep(text)
    for name in ("first", "second"):
        engine.submit(Request(name, [*text, *question], GREEDY, reused_tokens=600), kept)
    outputs = drain(engine)
    assert outputs["first"].completions[0].token_ids == outputs["second"].completions[0].token_ids
    assert kept.seq.tokens == 600
    engine.submit(Request("late", [*text, *question], GREEDY, reused_tokens=600), kept)
    engine.drop(kept)
    (late,) = drain(engine).values()
    assert late.completions[0].finish_reason is FinishReason.ERROR
    assert "released" in late.completions[0].error
    assert_idle(engine)


def test_a_question_about_a_context_is_answered_as_in_one_prompt_where_nothing_is_lost(device):
    for config in (FullConfig(), LOSSLESS):
        text, question = tuple(prompt(600)), prompt(45, seed=2)
        engine = tiny_engine(config, device)
        kept = engine.keep(text)
        engine.submit(Request("q", [*text, *question], GREEDY, reused_tokens=600), kept)
        answer = drain(engine)["q"].completions[0].token_ids
        (whole,) = run(tiny_engine(config, device), [[*text, *question]], GREEDY)
        assert answer == whole.completions[0].token_ids


def test_a_context_that_fills_the_memory_refuses_instead_of_waiting_for_ever(device):
    decoder = tiny_decoder(device)
    price = type(tiny_engine(SPARSE, device, decoder=decoder).runner.cache).price(
        decoder.spec.geometry(decoder.dtype), SPARSE, 600
    )
    engine = tiny_engine(SPARSE, device, decoder=decoder, device_bytes=price.device_bytes + 8192)
    kept = engine.keep(tuple(prompt(600)))
    engine.submit(Request("q", prompt(500), GREEDY))
    (output,) = drain(engine).values()
    assert output.completions[0].finish_reason is FinishReason.ERROR
    assert "kept contexts" in output.completions[0].error
    engine.drop(kept)
    assert_idle(engine)


def test_totals_add_up_what_ended(device):
    engine = tiny_engine(SPARSE, device, max_admit=3)
    outputs = run(engine, [prompt(500), prompt(40), prompt(600)], dataclasses.replace(GREEDY, n=2, temperature=1.0))
    totals, stats = engine.totals, [c.stats for o in outputs for c in o.completions]
    assert totals.requests == 3
    assert totals.finished == {"length": 6}
    assert totals.prompt_tokens == 1140
    assert totals.generated_tokens == 6 * 24
    assert totals.hits == sum(s.hits for s in stats) > 0
    assert totals.misses == sum(s.misses for s in stats) > 0
    assert totals.fetched_bytes == sum(s.fetched_bytes for s in stats)
    assert engine.runner.computed_tokens == 1140 + 6 * 23  # prompts once, and every token that was fed back
    assert totals.to_dict()["hit_rate"] == totals.hits / totals.selected_chunks


@pytest.mark.parametrize("config", [FullConfig(), SPARSE], ids=["full", "sparse"])
def test_resident_bytes_are_the_exact_keys_and_values(device, config):
    token_bytes = 2 * 2 * 2 * 16 * 4  # keys and values, layers, KV heads, width, float32
    for length in (40, 1000):
        (output,) = run(tiny_engine(config, device), [prompt(length)], GREEDY)
        stats = output.completions[0].stats
        if config == FullConfig() or length == 40:
            assert stats.resident_bytes == (length + 23) * token_bytes
        else:
            window = length + 23 - (length // 8 - config.local_chunks) * 8
            assert stats.resident_bytes == (4 * 8 + 64 + window) * token_bytes
