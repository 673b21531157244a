"""Logits and softmax parts by the kernel, against the contract's truth and beside its poison."""

import pytest
import torch

from shadowkv.ops.contract.base import excess
from shadowkv.ops.contract.bounds import Bounded
from shadowkv.ops.contract.rows import RowSpec, Sizes
from shadowkv.ops.contract.score import Score, ScoreCase
from shadowkv.ops.select import OUTLIER
from shadowkv.ops.splits import SCORE_SPLIT_CHUNKS as SPLIT
from shadowkv.ops.splits import score_splits
from shadowkv.ops.triton.score import score_landmarks
from tests.ops.truth import assert_within, log_shares

OP = Score()
CASE = ScoreCase(Sizes(2, 4, 64, 4, 8), (RowSpec(600, 5, 4, 9, 16), RowSpec(70, 0, 4, 9, 16)), 8)


def dtypes() -> list[torch.dtype]:
    """bfloat16 products are wrong in Triton's interpreter."""
    import os

    on_gpu = os.environ.get("SHADOWKV_TEST_DEVICE", "cpu") != "cpu"
    return [torch.float32, torch.float16, *([torch.bfloat16] if on_gpu else [])]


@pytest.mark.parametrize("kind", dtypes(), ids=str)
@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: f"{case.sizes}-{case.width}")
def test_truth(device, case, kind):
    assert excess(OP, case, device, kind) == []


def test_parts_make_the_softmax(device):
    """What is chosen by: logit minus the log-sum-exp of the parts, maximum over the group."""
    inputs = OP.make(CASE, device, torch.float32)
    got, truth = OP.run(inputs), OP.truth(inputs)["parts"]
    top, total = got["parts"].double().unbind(-1)
    lse = torch.logsumexp(top + total.log(), dim=-1)
    scores = (got["logits"].double() - lse[..., None]).amax(2)
    # A logarithm moves by the share of the sum that is lost, and no more than with the worst of the parts.
    lost = truth.error[..., 0] + truth.error[..., 1] / truth.value[..., 1].clamp_min(1)
    for row, spec in enumerate(CASE.rows):
        selectable = inputs.tensors[row]["SLOT_OF_CHUNK"][:, : spec.chunks] != OUTLIER
        logits = Bounded.exact(got["logits"][row, :, :, : spec.chunks])
        expected = log_shares(logits, selectable)
        limit = expected.error + lost[row].amax((1, 2))[:, None]
        assert_within(
            scores[row, :, : spec.chunks], Bounded(expected.value, limit).masked_fill(~selectable, -torch.inf)
        )


def test_strides(device):
    """Outputs and queries as slices of larger memory, whose other parts stay as they are."""
    inputs = OP.make(CASE, device, torch.float32)
    logits, parts = OP.outputs(inputs)
    score_landmarks(inputs.rows, inputs.q_BND, logits, parts)
    batch, kv_heads, group, width = logits.shape
    wide_q = torch.full((batch, inputs.q_BND.shape[1] + 3, 80), torch.nan, device=device)
    wide_q[:, 2:-1, 7:71] = inputs.q_BND
    wide_l = torch.full((batch + 1, kv_heads + 1, group + 2, width + 5), 7.0, device=device)
    wide_p = torch.full((batch + 1, kv_heads + 2, group + 1, score_splits(width) + 3, 2), 7.0, device=device)
    wide_l[1:, 1:, 1:-1, 3:-2] = torch.nan
    score_landmarks(inputs.rows, wide_q[:, 2:-1, 7:71], wide_l[1:, 1:, 1:-1, 3:-2], wide_p[1:, 2:, 1:, 1:-2])
    assert torch.equal(wide_l[1:, 1:, 1:-1, 3:-2].nan_to_num(9.0), logits.nan_to_num(9.0))
    assert torch.equal(wide_p[1:, 2:, 1:, 1:-2], parts)
    wide_l[1:, 1:, 1:-1, 3:-2] = 7.0
    wide_p[1:, 2:, 1:, 1:-2] = 7.0
    assert (wide_l == 7.0).all()
    assert (wide_p == 7.0).all()


def test_everything_an_outlier(device):
    case = ScoreCase(Sizes(1, 2, 64, 4, 8), (RowSpec(5, 5, 4, 9, 16),), SPLIT)
    got = OP.run(OP.make(case, device, torch.float32))
    assert (got["logits"] == -torch.inf).all()
    assert (got["parts"][..., 0] == -torch.inf).all()
    assert (got["parts"][..., 1] == 0).all()
