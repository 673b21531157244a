"""The kernel of logits with a known hit rate."""

import pytest
import torch

from shadowkv.ops.contract.base import excess
from shadowkv.ops.contract.sliding import OverwriteLogits, SlidingCase
from shadowkv.ops.sliding import OUT_OF_REACH

OP = OverwriteLogits()


@pytest.mark.parametrize("case", OP.cases(), ids=str)
def test_contract(case: SlidingCase, device: torch.device) -> None:
    assert excess(OP, case, device, torch.float32) == []


def test_outliers_and_what_is_beyond_a_row_stay(device: torch.device) -> None:
    case = SlidingCase((20, 0), 1, 2, 32, 2, 4, 0.5)
    before, inputs = OP.make(case, device, torch.float32), OP.make(case, device, torch.float32)
    logits_BKGC = OP.run(inputs)["logits"]
    assert torch.equal(logits_BKGC[0, :, :, 20:], before.logits_BKGC[0, :, :, 20:])
    assert torch.equal(logits_BKGC[1], before.logits_BKGC[1])
    assert torch.equal(logits_BKGC.isneginf(), before.logits_BKGC.isneginf())
    assert torch.equal(inputs.parts_BKGZ2[1], before.parts_BKGZ2[1])
    totals_KG = torch.logsumexp(inputs.parts_BKGZ2[0, ..., 0] + inputs.parts_BKGZ2[0, ..., 1].log(), dim=-1)
    assert torch.equal(totals_KG, torch.tensor([[0.0, OUT_OF_REACH]], device=device))
