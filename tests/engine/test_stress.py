"""A batch that never stays the same: rows join, leave, are cancelled and lose their resident sets."""

import random
from dataclasses import replace

import pytest
import torch

from shadowkv.config import SamplingParams, ShadowKVConfig
from shadowkv.engine import graphs
from shadowkv.engine.engine import Engine
from shadowkv.engine.request import FinishReason, Request
from shadowkv.ops.select import EMPTY
from tests.engine.tiny import assert_idle, drain, prompt, tiny_decoder, tiny_engine, tiny_spec

pytest.importorskip("triton")

CONFIG = ShadowKVConfig(
    rank=24, chunk_tokens=4, budget_tokens=16, outlier_chunks=3, local_chunks=1, recent_chunks=4, resident_tokens=24
)
ROWS = 4
LONGEST = 300


def open_engine(device: torch.device) -> Engine:
    spec = replace(tiny_spec(), head_dim=64, rope=replace(tiny_spec().rope, rotary_dim=64))
    decoder = tiny_decoder(device, spec=spec)
    return tiny_engine(
        CONFIG, device, max_batch=ROWS, max_context_tokens=LONGEST, decoder=decoder, max_admit=ROWS, kernels=True
    )


@torch.inference_mode()
def lose_resident_sets(engine: Engine, chance: random.Random) -> None:
    """So that everything that a row selects next is missing. Which tokens it attends to is not changed by that."""
    for entry in engine._entries.values():
        for sample in entry.samples.values():
            tensors = sample.seq.tensors
            if "resident_ids" in tensors and chance.random() < 0.5:
                tensors["resident_ids"].fill_(EMPTY)
                tensors["last_used"].fill_(EMPTY)
                tensors["slot_of_chunk"].clamp_max_(EMPTY)


def test_every_row_gets_the_tokens_of_its_solo_run(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # A matrix product rounds differently for another number of rows; so all steps have the same number here.
    monkeypatch.setattr(graphs, "padded_rows", lambda rows, max_rows: max_rows)
    steps, longest_answer = (2000, 90) if device.type == "cuda" else (24, 9)
    chance, engine = random.Random(1), open_engine(device)
    requests: dict[str, Request] = {}
    outputs, cancelled = {}, set()
    for step in range(steps):
        if chance.random() < 0.3 and len(engine._entries) < 2 * ROWS:
            ids = prompt(chance.randint(5, 180), seed=step)
            params = SamplingParams(max_tokens=chance.randint(2, longest_answer), temperature=0, ignore_eos=True)
            request = Request(f"r{step}", ids, params)
            requests[request.id] = request
            engine.submit(request)
        if chance.random() < 0.03 and engine._entries:
            victim = chance.choice(sorted(engine._entries))
            engine.cancel(victim)
            cancelled.add(victim)
        if chance.random() < 0.2:
            lose_resident_sets(engine, chance)
        outputs |= {output.request_id: output for output in engine.step().outputs}
    outputs |= drain(engine)
    assert_idle(engine)
    assert set(outputs) == set(requests)
    alone = open_engine(device)
    checked = 0
    for name, request in requests.items():
        (mine,) = outputs[name].completions
        assert (mine.finish_reason is FinishReason.CANCELLED) == (name in cancelled)
        alone.submit(Request(name, request.prompt_token_ids, request.params))
        (solo,) = drain(alone)[name].completions
        assert mine.token_ids == solo.token_ids[: len(mine.token_ids)]
        checked += len(mine.token_ids)
    assert checked > steps // 2
