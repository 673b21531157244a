"""What travels is complete in JSON, and its durations and rates are charged to the right phase."""

import json
import math

import pytest

from shadowkv.cache.base import CacheStats
from shadowkv.config import SamplingParams
from shadowkv.engine.request import (
    Completion,
    FinishReason,
    Request,
    RequestOutput,
    StreamChunk,
    Timing,
    TokenLogprob,
)
from shadowkv.errors import RequestError


def test_output_survives_json() -> None:
    impossible = TokenLogprob(5, "x", -math.inf, top=((1, "é", -0.5), (2, "\n", -math.inf)))
    completion = Completion(
        index=0,
        text="é",
        token_ids=(1, 5),
        finish_reason=FinishReason.STOP,
        stop_reason="\n",
        logprobs=(impossible,),
        stats=CacheStats("full", "exact", 2, 10, 20, hits=3, misses=1),
    )
    output = RequestOutput("r", (7, 8), (completion,), Timing(0.5, 2.0, 4.0, 10, 4, 9))
    back = json.loads(json.dumps(output.to_dict(), allow_nan=False))
    assert back["request_id"] == "r"
    assert back["prompt_token_ids"] == [7, 8]
    assert back["completions"][0]["finish_reason"] == "stop"
    assert back["completions"][0]["stop_reason"] == "\n"
    assert back["completions"][0]["logprobs"][0]["logprob"] == -9999.0
    assert back["completions"][0]["logprobs"][0]["top"][0] == {"token_id": 1, "token": "é", "logprob": -0.5}
    assert back["completions"][0]["stats"]["hit_rate"] == 0.75
    assert back["timing"]["prefill_tokens_per_s"] == 3.0
    assert back["timing"]["decode_tokens_per_s"] == 2.0


def test_chunk_carries_the_completion_only_at_the_end() -> None:
    assert StreamChunk("r", 1, "a", (3,)).to_dict()["finished"] is None
    done = Completion(1, "a", (3,), FinishReason.LENGTH)
    finished = StreamChunk("r", 1, "", (), done).to_dict()["finished"]
    assert finished == done.to_dict()
    assert finished["logprobs"] is None
    assert finished["stats"] is None


def test_decode_rate_leaves_out_the_tokens_that_the_prefill_gave() -> None:
    assert Timing(0, 1.0, 2.0, 5, 0, 12, samples=2).decode_tokens_per_s == 5.0
    assert Timing(0, 1.0, 0.0, 5, 0, 2, samples=2).decode_tokens_per_s is None
    assert Timing(0, 0.0, 0.0, 5, 0, 0).prefill_tokens_per_s is None


def test_request_phases() -> None:
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=5), arrival=10.0)
    assert request.capacity_tokens == 8
    waiting = request.timing(12.0)
    assert (waiting.queued_s, waiting.prefill_s, waiting.decode_s) == (2.0, 0.0, 0.0)
    request.admitted, request.prefilled, request.generated_tokens = 13.0, 17.0, 4
    done = request.timing(19.0)
    assert (done.queued_s, done.prefill_s, done.decode_s) == (3.0, 4.0, 2.0)
    assert done.decode_tokens_per_s == 1.5


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="no tokens"):
        Request("r", [], SamplingParams())


@pytest.mark.parametrize("reused", [-1, 3, 4])
def test_reuse_leaves_the_last_prompt_token(reused: int) -> None:
    with pytest.raises(RequestError, match="last prompt token"):
        Request("r", [1, 2, 3], SamplingParams(), reused_tokens=reused)
