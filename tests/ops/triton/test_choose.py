"""Chunks, slots and lists by the kernel, equal to the reference's to the last entry."""

from dataclasses import replace

import pytest
import torch

from shadowkv.errors import ShapeError
from shadowkv.ops.contract.base import excess
from shadowkv.ops.contract.choose import STATE, UNSET, Choose, ChooseCase, ChooseInputs
from shadowkv.ops.contract.rows import RowSpec
from shadowkv.ops.rows import Fact, Selection
from shadowkv.ops.splits import choose_width, run_chunks
from shadowkv.ops.triton import choose

OP = Choose()


def equal(got: ChooseInputs, expected: ChooseInputs) -> None:
    ours, theirs = OP.run(got), OP.reference(expected)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("case", OP.cases(), ids=range(len(OP.cases())))
def test_truth(device, case):
    assert excess(OP, case, device, torch.float32) == []


@pytest.mark.parametrize("case", OP.cases()[::2], ids=range(0, len(OP.cases()), 2))
@pytest.mark.parametrize("chunks", [4, 8])
def test_shorter_runs_and_more_programs(device, case, chunks, monkeypatch):
    """Exact whatever ties there are, at a width at which the interpreter is quick."""
    monkeypatch.setattr(choose, "TILE_KEYS", 64)
    monkeypatch.setattr(choose, "run_chunks", lambda most, width: chunks)
    assert excess(OP, case, device, torch.float32) == []


def test_steps_one_after_the_other(device):
    """State that one step leaves is what the next one starts from."""
    case = ChooseCase((RowSpec(60, 2, 14, 9, 16, 10, 3, 2), RowSpec(33, 2, 9, 9, 16, 9, 2, 9)), levels=30)
    got, expected = OP.make(case, device, torch.float32), OP.make(case, device, torch.float32)
    for step in range(8, 14):
        drawn = torch.randint(0, 60, got.logits_BKGC.shape, device=device) / 16
        for inputs in (got, expected):
            inputs.rows.facts_BI[:, Fact.STEP] = step
            kept = inputs.logits_BKGC.isfinite()
            inputs.logits_BKGC[kept] = drawn[kept]
        equal(got, expected)


def test_negative_zero_is_zero(device):
    case = ChooseCase((RowSpec(20, 0, 6, 9, 16, 6),), levels=1, splits=1)
    got, expected = OP.make(case, device, torch.float32), OP.make(case, device, torch.float32)
    for inputs in (got, expected):
        inputs.parts_BKGZ2[..., 0, 0] = 0.0
        inputs.logits_BKGC.fill_(0.0)
        inputs.logits_BKGC[..., ::2] = -0.0
    equal(got, expected)


def test_extreme_scores(device):
    """The interval of keys is wider than an int32 can say."""
    case = ChooseCase((RowSpec(40, 0, 9, 9, 16, 9),), splits=1)
    got, expected = OP.make(case, device, torch.float32), OP.make(case, device, torch.float32)
    for inputs in (got, expected):
        inputs.parts_BKGZ2[..., 0, 0] = 0.0
        inputs.logits_BKGC[..., ::3] = 3e38
        inputs.logits_BKGC[..., 1::3] = -3e38
    equal(got, expected)


def test_strides(device):
    case = replace(OP.cases()[3], spare_width=2)
    plain, expected = OP.make(case, device, torch.float32), OP.make(case, device, torch.float32)
    batch, kv_heads, group, width = plain.logits_BKGC.shape
    logits = torch.full((batch + 1, kv_heads + 1, group + 2, width + 5), torch.nan, device=device)
    parts = torch.full((batch + 1, kv_heads + 2, group + 1, case.splits + 3, 2), torch.nan, device=device)
    logits[1:, 1:, 1:-1, 3:-2], parts[1:, 2:, 1:, 1:-2] = plain.logits_BKGC, plain.parts_BKGZ2
    equal(replace(plain, logits_BKGC=logits[1:, 1:, 1:-1, 3:-2], parts_BKGZ2=parts[1:, 2:, 1:, 1:-2]), expected)


def test_rows_that_select_nothing_are_left_alone(device):
    case = ChooseCase((RowSpec(30, 2, 6, 9, 16, 0), RowSpec(0, 0, 4, 12, 16), RowSpec(0, 0, 1, 0, 8)))
    inputs, before = OP.make(case, device, torch.float32), OP.make(case, device, torch.float32)
    OP.run(inputs)
    assert not inputs.out.attend_count_BK.any()
    assert not inputs.out.fetch_count_BK2.any()
    assert all((lists == UNSET).all() for lists in _lists(inputs.out))
    for after, kept in zip(inputs.tensors, before.tensors, strict=True):
        assert all(torch.equal(after[name], kept[name]) for name in STATE)


def test_nan_logits_touch_no_foreign_memory(device):
    """A sequence whose numbers have failed is ended elsewhere; until then it must not harm the others."""
    case = ChooseCase((RowSpec(30, 2, 6, 9, 16, 6), RowSpec(30, 2, 6, 9, 16, 6)), kv_heads=1)
    got, expected = OP.make(case, device, torch.float32), OP.make(case, device, torch.float32)
    got.logits_BKGC[0], got.parts_BKGZ2[0] = torch.nan, torch.nan
    ours, theirs = OP.run(got), OP.reference(expected)
    assert int(got.out.fetch_count_BK2[0].sum()) == 0
    for name in ("attend", "attend_count", "fetch_chunk", "fetch_slot", "fetch_count"):
        assert torch.equal(ours[name][1], theirs[name][1])
    assert torch.equal(
        got.tensors[0]["SLOT_OF_CHUNK"], OP.make(case, device, torch.float32).tensors[0]["SLOT_OF_CHUNK"]
    )


def test_too_much_to_be_counted(device):
    with pytest.raises(ShapeError, match="65536 slots"):
        OP.run(OP.make(ChooseCase((RowSpec(30, 2, 1 << 16, 9, 16, 6),), kv_heads=1), device, torch.float32))


def test_runs_leave_little_to_search():
    assert [run_chunks(most, 15_360) for most in (1, 32, 128, 129, 256, 1024, 4096)] == [16, 16, 16, 8, 8, 4, 4]
    assert [run_chunks(256, chunks) for chunks in (7_504, 15_312, 131_008)] == [8, 8, 16]
    assert choose_width(160) == 200
    assert choose_width(7) == 9


def _lists(out: Selection) -> tuple[torch.Tensor, ...]:
    return out.attend_BKP, out.fetch_chunk_BKP, out.fetch_slot_BKP
