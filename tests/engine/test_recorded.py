"""A prompt that was computed once is taken by every method as if it had been computed for it alone."""

import pytest
import torch

from shadowkv.config import FullConfig, ShadowKVConfig
from shadowkv.engine.runner import Runner
from shadowkv.errors import CapacityError, NumericsError
from tests.cache.baselines import BASELINES
from tests.engine.tiny import prompt, tiny_decoder, tiny_engine
from tests.rounding import allowance

SPARSE = ShadowKVConfig(rank=12, budget_tokens=16, outlier_chunks=2, recent_chunks=7)
METHODS = {
    "full": FullConfig(),
    "shadowkv": SPARSE,
    "uncentred": ShadowKVConfig(rank=8, centre_keys=False),
    **BASELINES,
}
QUERIES = 40


def decoded(runner: Runner, ids: list[int], steps: int = 6) -> torch.Tensor:
    seq, logits_V = runner.prefill(len(ids) + steps, ids)
    return torch.stack([logits_V] + [runner.decode([seq], [t])[0].clone() for t in prompt(steps, seed=1)])


@pytest.mark.parametrize("length", [5, 300])
@pytest.mark.parametrize("config", METHODS.values(), ids=METHODS.keys())
def test_a_recorded_prompt_is_as_good_as_one_computed(device, config, length):
    decoder, ids = tiny_decoder(device), prompt(length)
    runner = tiny_engine(config, device, decoder=decoder).runner
    computed = decoded(runner, ids)
    record = tiny_engine(FullConfig(), device, decoder=decoder).runner.record(ids, QUERIES)
    before = runner.computed_tokens
    runner.recorded = {tuple(ids): record}
    recorded = decoded(runner, ids)
    assert runner.computed_tokens == before + 6  # the steps alone
    assert torch.equal(decoded(runner, ids), recorded)  # the record is not used up
    # Layers are taken together and not one by one, and more queries are turned: the same sums in another order, twice.
    runner.recorded = {}
    assert (recorded - computed).abs().max() <= 2 * allowance(lambda: decoded(runner, ids), draws=2)


def test_a_record_that_does_not_fit_or_is_broken_is_refused(device):
    runner = tiny_engine(SPARSE, device).runner
    ids = prompt(300)
    record = runner.record(ids, 0)
    runner.recorded = {tuple(ids): record}
    with pytest.raises(CapacityError, match="a prompt of 300 tokens does not fit"):
        runner.prefill(299, ids)
    assert runner.cache.device_arena.used_bytes == 0
    broken = record.k_LKSD[1].clone()
    broken[0, 3] = torch.nan
    with pytest.raises(NumericsError, match="layer 1: a key is NaN"):
        record.take_layer(1, None, record.k_pre_LSKD[1], broken, record.v_LKSD[1])
