"""The front door on a tiny random model: several callers at once, and what they leave behind."""

import gc

import pytest

from shadowkv import LLM, FullConfig, SamplingParams, ShadowKVConfig
from shadowkv.engine.memory import Memory
from shadowkv.engine.placement import choose_plan
from shadowkv.errors import ConfigError, RequestError
from tests.engine.tiny import Letters, assert_idle, prompt, tiny_decoder

SPARSE = ShadowKVConfig(rank=16, chunk_tokens=8, budget_tokens=64, outlier_chunks=4, recent_chunks=8)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def open_llm(device, config=SPARSE, device_bytes=64 << 20) -> LLM:
    decoder = tiny_decoder(device)
    plan, config = choose_plan(
        decoder.spec, config, decoder.dtype, Memory(device_bytes, 64 << 20), 2048, 4, bandwidth=None
    )
    llm = LLM.__new__(LLM)
    llm._max_batch = 4
    llm._build(decoder, Letters(), config, plan, None)
    return llm


def text_of(chunks):
    return "".join(chunk.text for chunk in chunks)


def assert_left_clean(llm):
    assert not llm.has_work
    assert_idle(llm.engine)


def test_streams_and_calls_side_by_side_lose_no_piece(device):
    llm = open_llm(device)
    prompts = [prompt(40), prompt(300), prompt(90), prompt(25)]
    alone = [output.completions[0].text for output in llm.generate(prompts, GREEDY)]
    first, second = llm.stream(prompts[0], GREEDY), llm.stream(prompts[1], GREEDY)
    pairs = list(zip(first, second, strict=True))
    assert [text_of(chunks) for chunks in zip(*pairs, strict=True)] == alone[:2]
    waiting = llm.stream(prompts[2], GREEDY)
    other = llm.submit(prompts[3], GREEDY)
    assert llm.generate([prompts[0]], GREEDY)[0].completions[0].text == alone[0]
    assert text_of(waiting) == alone[2]
    while llm.has_work:
        for output in llm.step():
            assert output.request_id == other
            assert output.completions[0].text == alone[3]
    assert_left_clean(llm)


@pytest.mark.parametrize("way", ["closed", "let go"])
@pytest.mark.parametrize("pieces", [0, 3])
def test_a_stream_that_is_not_read_to_its_end_is_cancelled(device, way, pieces):
    llm = open_llm(device)
    stream = llm.stream(prompt(40), GREEDY)
    for _ in range(pieces):
        next(stream)
    if way == "closed":
        stream.close()
        assert list(stream) == []
    else:
        del stream
        gc.collect()
    assert_left_clean(llm)


def test_a_call_that_is_interrupted_after_a_request_ended_leaves_no_output_behind(device):
    llm = open_llm(device)

    def interrupt(stage, done, total):
        if stage == "requests" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt(20), prompt(30)], [SamplingParams(max_tokens=1), GREEDY], progress=interrupt)
    assert_left_clean(llm)


def test_memory_for_one_long_sequence_serves_several_short_ones_together(device):
    price = open_llm(device, FullConfig()).plan
    fixed = price.weight_bytes + price.activation_bytes
    llm = open_llm(device, FullConfig(), fixed + price.chosen.sequence_device_bytes)
    assert llm.plan.batch == 1
    ids = [llm.submit(prompt(50, i), GREEDY) for i in range(3)]
    for _ in ids:
        llm.step()
    assert llm.engine.scheduler.running_samples == 3
    (output,) = llm.generate([prompt(60)], SamplingParams(max_tokens=2, n=4, temperature=1.0))
    assert len(output.completions) == 4


def test_arguments_of_another_type_are_named(device):
    llm = open_llm(device)
    for prompts, name in ((None, "NoneType"), (42, "int"), ((word for word in "ab"), "generator")):
        with pytest.raises(RequestError, match=f"text, token ids, or a list of either; got {name}"):
            llm.generate(prompts)
    for params in ({"max_tokens": 3}, 3, [3], ["greedy"]):
        with pytest.raises(ConfigError, match="give SamplingParams"):
            llm.generate([prompt(20)], params)
    with pytest.raises(ConfigError, match="the sampling settings are of type dict; give SamplingParams"):
        llm.stream(prompt(20), {"max_tokens": 3})
    assert_left_clean(llm)
