"""Rotary embedding for contracts: rows of frequencies, and rotation with a bound on its error."""

import torch
from torch import Tensor

from shadowkv.ops.contract.bounds import Bounded, concatenated, stacked
from shadowkv.ops.rope import Rope

ROPE_ROWS = 3
COS_ERROR = 2.0**-23
"""The most that cos and sin of a float32 angle miss, as ``ops.triton.angles`` promises. The angle itself is exact: a
position times a frequency in float32, as every model makes it."""


def make_rope(rotary_dim: int, interleaved: bool, device: torch.device) -> Rope:
    """Several rows, each with frequencies and a factor of its own."""

    def frequencies(length: int) -> tuple[Tensor, float]:
        exponents_F = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return 1.0 / (10000.0 * (1 + length)) ** exponents_F, 1 + 0.3 * length

    rope = Rope(frequencies, lambda length: length, rotary_dim=rotary_dim, interleaved=interleaved, device=device)
    for length in range(ROPE_ROWS):
        rope.row(length)
    return rope


def cos_sin(positions: Tensor, rows: Tensor, rope: Rope) -> tuple[Bounded, Bounded]:
    """cos and sin [..., rotary/2] times the row's factor."""
    table, rows = rope.table, rows.long()
    angles = (positions.float()[..., None] * table.inv_freq_XF[rows]).double()
    factor = Bounded.exact(table.factor_X[rows][..., None])
    cos, sin = (Bounded(of(angles), torch.full_like(angles, COS_ERROR)) * factor for of in (torch.cos, torch.sin))
    return cos, sin


def turned_back(x: Bounded, positions: Tensor, rows: Tensor, rope: Rope) -> Bounded:
    """Undo the rotation of x [..., D] to positions [...] in float32."""
    cos, sin = cos_sin(positions, rows, rope)
    norm = cos * cos + sin * sin
    return turned(x, cos / norm, -sin / norm, rope.interleaved)


def turned(x: Bounded, cos: Bounded, sin: Bounded, interleaved: bool) -> Bounded:
    """Rotate the first dimensions of x [..., D] by angles [..., rotary/2] in float32; the others stay."""
    half = cos.value.shape[-1]
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
    pair = [a * cos - b * sin, b * cos + a * sin]
    both = stacked(pair, -1).moved(lambda y: y.flatten(-2)) if interleaved else concatenated(pair, -1)
    return concatenated([both, x[..., 2 * half :]], -1)
