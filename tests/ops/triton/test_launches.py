"""Launches that are noted can be made again."""

import pytest
import torch
import triton
import triton.language as tl

from shadowkv.ops.triton.launches import recorded


@triton.jit
def _add_one(p_x, BLOCK: tl.constexpr):
    at = p_x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(at, tl.load(at) + 1)


def test_a_launch_again(device: torch.device) -> None:
    x = torch.zeros(16, device=device)
    with recorded() as launches:
        _add_one[(2,)](x, BLOCK=8)
        x.mul_(10)  # not a kernel of ours
    assert len(launches) == 1
    launches[0]()
    assert x.unique().tolist() == [11.0]
    _add_one[(2,)](x, BLOCK=8)
    assert len(launches) == 1


def test_an_error_leaves_launching_as_it_was(device: torch.device) -> None:
    with pytest.raises(ValueError, match="inside"), recorded() as launches:
        raise ValueError("inside")
    _add_one[(1,)](torch.zeros(8, device=device), BLOCK=8)
    assert launches == []
