"""OpenAI's bodies in, requests out; nothing that cannot be done is ignored."""

import json

import pytest

from shadowkv.config import SamplingParams
from shadowkv.protocol import CHAT, COMPLETIONS, BodyError, completion_object, error_object, read_body
from tests.cli.fakes import FakeLLM


def test_openai_defaults() -> None:
    work = read_body(COMPLETIONS, {"model": "m", "prompt": "hi"})
    assert (work.api, work.prompts) == ("completions", ("hi",))
    assert work.params == SamplingParams(max_tokens=16, temperature=1.0)
    work = read_body(CHAT, {"messages": [{"role": "user", "content": "hi"}]})
    assert work.messages == ({"role": "user", "content": "hi"},)
    assert work.params == SamplingParams(temperature=1.0)
    assert read_body(COMPLETIONS, {"prompt": "hi"}, 7).params.max_tokens == 7


def test_every_parameter() -> None:
    body = {
        "prompt": "hi",
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "n": 2,
        "stop": ["a", "b"],
        "seed": 3,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "logprobs": 2,
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "stop_token_ids": [1, 2],
        "min_tokens": 1,
        "include_stop_str_in_output": True,
    }
    assert read_body(COMPLETIONS, body).params == SamplingParams(
        max_tokens=5,
        temperature=0.0,
        top_p=0.5,
        n=2,
        stop=("a", "b"),
        seed=3,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        logprobs=2,
        top_k=4,
        min_p=0.1,
        repetition_penalty=1.1,
        ignore_eos=True,
        stop_token_ids=(1, 2),
        min_tokens=1,
        include_stop_str_in_output=True,
    )


def test_prompt_forms() -> None:
    assert read_body(COMPLETIONS, {"prompt": [1, 2]}).prompts == ((1, 2),)
    assert read_body(COMPLETIONS, {"prompt": ["a", "b"]}).prompts == ("a", "b")
    assert read_body(COMPLETIONS, {"prompt": [[1], [2, 3]]}).prompts == ((1,), (2, 3))


def test_chat_forms() -> None:
    body = {
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
        "max_completion_tokens": 9,
        "logprobs": True,
        "top_logprobs": 3,
        "stop": "x",
    }
    work = read_body(CHAT, body)
    assert work.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"})
    assert (work.params.max_tokens, work.params.logprobs, work.params.stop) == (9, 3, ("x",))


def test_what_asks_for_nothing_is_accepted() -> None:
    body = {"prompt": "a", "stream": False, "echo": False, "best_of": 1, "logit_bias": {}, "suffix": None, "user": "me"}
    assert read_body(COMPLETIONS, body).prompts == ("a",)


@pytest.mark.parametrize(
    ("url", "body", "param", "says"),
    [
        ("/v1/embeddings", {}, "url", "allowed: /v1/completions, /v1/chat/completions"),
        (COMPLETIONS, None, "body", "missing"),
        (COMPLETIONS, {}, "prompt", "prompt is missing"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "prompt is empty"),
        (COMPLETIONS, {"prompt": []}, "prompt", "prompt is empty"),
        (COMPLETIONS, {"prompt": ["a", ""]}, "prompt", "prompt is empty"),
        (COMPLETIONS, {"prompt": ["a", [1.5]]}, "prompt", "must be a string"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "must be a string"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens", "must be an integer"),
        (COMPLETIONS, {"prompt": "a", "temperature": True}, "temperature", "must be a number"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "temperature is -1.0"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p", "greater than 0"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop", "non-empty"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "allowed: 0 to 20"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        (COMPLETIONS, {"prompt": "a", "stream": True}, "stream", "not supported"),
        (COMPLETIONS, {"prompt": "a", "frobnicate": 1}, "frobnicate", "not a supported parameter"),
        (COMPLETIONS, {"prompt": "a", "messages": []}, "messages", "not a supported parameter"),
        (COMPLETIONS, {"prompt": "a", "min_tokens": 99}, "min_tokens", "more than max_tokens"),
        (CHAT, {"prompt": "a"}, "messages", "messages is missing"),
        (CHAT, {"messages": []}, "messages", "at least one"),
        (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "allowed: system"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "a string"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "messages[0].tool_calls", "not"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "text"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "max_completion_tokens": 2},
            "max_tokens",
            "differ",
        ),
    ],
)
def test_a_fault_is_named(url: str, body: object, param: str, says: str) -> None:
    with pytest.raises(BodyError) as raised:
        read_body(url, body)
    assert raised.value.param == param
    assert says in str(raised.value)


def test_completion_object() -> None:
    work = read_body(COMPLETIONS, {"prompt": ["ab", "cd"], "n": 2, "logprobs": 1, "max_tokens": 2})
    llm = FakeLLM()
    outputs = [llm.answer("r", llm.tokenizer.encode(str(prompt)), work.params) for prompt in work.prompts]
    made = completion_object(work, outputs, model="m", object_id="cmpl-1", created=5)
    choices = made["choices"]
    assert isinstance(choices, list)
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "ba"), (1, "ba"), (2, "dc"), (3, "dc")]
    assert choices[0]["finish_reason"] == "length"
    assert choices[0]["logprobs"] == {
        "tokens": ["b", "a"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"A": -9999.0}, {"A": -9999.0}],
        "text_offset": [0, 1],
    }
    assert made["usage"] == {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14}
    json.dumps(made, allow_nan=False)


def test_chat_object() -> None:
    work = read_body(CHAT, {"messages": [{"role": "user", "content": "é"}], "logprobs": True, "max_tokens": 1})
    made = completion_object(
        work, [FakeLLM().answer("r", [233], work.params)], model="m", object_id="chatcmpl-1", created=5
    )
    assert made["object"] == "chat.completion"
    assert made["choices"] == [
        {
            "index": 0,
            "finish_reason": "length",
            "message": {"role": "assistant", "content": "é", "refusal": None},
            "logprobs": {
                "content": [{"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9], "top_logprobs": []}],
                "refusal": None,
            },
        }
    ]


def test_error_object() -> None:
    assert error_object("no", status=400, param="n", code="c") == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "c"}
    }
    assert error_object("no", status=500)["error"] == {
        "message": "no",
        "type": "server_error",
        "param": None,
        "code": None,
    }
