"""The rule that kernels are held to: it passes what is rounded correctly, and refuses every known fault."""

from typing import Any

import pytest
import torch

from shadowkv.ops.contract.all import OPS
from shadowkv.ops.contract.base import Op, judged

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_the_truth_rounded_once_is_right(op: Op[Any, Any], device: torch.device, dtype: torch.dtype) -> None:
    for case in op.cases():
        plain, truth = (work(op.make(case, device, dtype)) for work in (op.reference, op.truth))
        assert set(truth) == set(plain) - op.exact
        got = plain | {name: bounded.value.to(plain[name].dtype) for name, bounded in truth.items()}
        assert [one.words for one in judged(got, truth, plain, op.exact) if not one.right] == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_known_fault_is_refused(op: Op[Any, Any], device: torch.device, dtype: torch.dtype) -> None:
    """Each in at least one of the cases: not every case is large or small enough to show every fault."""
    refused: dict[str, int] = {}
    for case in op.cases():
        plain, truth, faults = (work(op.make(case, device, dtype)) for work in (op.reference, op.truth, op.faults))
        for fault, made in faults.items():
            got = {name: x.to(plain[name].dtype) for name, x in made.items()}
            wrong = not all(one.right for one in judged(got, truth, plain, op.exact))
            refused[fault] = refused.get(fault, 0) + wrong
    assert len(refused) >= 2
    assert [fault for fault, times in refused.items() if not times] == []
