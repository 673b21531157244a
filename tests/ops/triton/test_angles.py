"""cos and sin against float64, near and far."""

import torch
import triton
import triton.language as tl

from shadowkv.ops.triton.angles import cos_sin


@triton.jit
def _cos_sin(p_angle, p_cos, p_sin, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cos, sin = cos_sin(tl.load(p_angle + o))
    tl.store(p_cos + o, cos)
    tl.store(p_sin + o, sin)


def test_cos_and_sin(device):
    quarters = torch.arange(4096, dtype=torch.float64) * torch.pi / 2
    angle = torch.cat(
        [
            torch.rand(4096) * 10,
            torch.arange(4096).float(),
            1048575.0 - torch.arange(4096),
            torch.rand(4096) * 2e6,
            quarters.float(),
            (quarters * 300).nextafter(torch.tensor(0.0, dtype=torch.float64)).float(),
            torch.logspace(-30, 0, 4096),
            torch.zeros(4096),
        ]
    ).to(device)
    cos, sin = torch.full_like(angle, torch.nan), torch.full_like(angle, torch.nan)
    _cos_sin[(len(angle) // 4096,)](angle, cos, sin, BLOCK=4096)
    # Half an ulp of 1 for the result, as much for what goes into it.
    limit = torch.finfo(torch.float32).eps
    assert (cos.double() - angle.double().cos()).abs().max() <= limit
    assert (sin.double() - angle.double().sin()).abs().max() <= limit
