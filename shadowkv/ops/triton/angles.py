"""cos and sin of RoPE angles together, as exact as the angle, in a few straight instructions.

The compiler's own cos and sin are as exact, but each carries a branch for large angles that is unrolled for
every element of a tile: over 60 KB of code in a kernel of 10 us, and registers spilled to the stack. Angles are
positions times frequencies of at most 1, so a context of 2 million tokens is the limit of what is exact here.
"""

import triton
import triton.language as tl

FUSED = tl.constexpr(not triton.knobs.runtime.interpret)
"""The interpreter rounds a multiply-add twice; float64 stands in for it there."""

ROUNDING = tl.constexpr(1.5 * 2.0**23)
"""Added to a float32 below 2^22 it leaves no room for fractions: the sum's low bits are the nearest integer."""
QUARTERS = tl.constexpr(0.6366197723675814)
"""Quarter turns in an angle of 1."""
QUARTER_A = tl.constexpr(1.5707963705062866)
"""A quarter turn is the sum of three float32 numbers: its nearest one,"""
QUARTER_B = tl.constexpr(-4.371138828673793e-08)
"""the nearest to what that leaves,"""
QUARTER_C = tl.constexpr(-1.7151245100058819e-15)
"""and the nearest to what remains."""


@triton.jit
def _multiply_add(a, b, c):
    if FUSED:
        return tl.fma(a, tl.full(a.shape, b, tl.float32), c)
    return (a.to(tl.float64) * b + c.to(tl.float64)).to(tl.float32)


@triton.jit
def cos_sin(angle):
    """cos and sin of angles from 0 to 2 million (float32), to 1.2e-7.

    The nearest whole number of quarter turns is taken off without an error to speak of; two polynomials give
    the rest; the number of quarter turns says which is which. The polynomials are Chebyshev fits on +-0.96,
    not +-pi/4, because the quarter turns of a far angle may be counted 0.1 off the nearest.
    """
    shifted = angle * QUARTERS + ROUNDING
    i_quarter = shifted.to(tl.int32, bitcast=True)
    turns = shifted - ROUNDING
    x = _multiply_add(turns, -QUARTER_A, angle)
    x = _multiply_add(turns, -QUARTER_B, x)
    x = _multiply_add(turns, -QUARTER_C, x)
    z = x * x
    sine = x + x * z * (-0.166666672 + z * (0.00833332818 + z * (-0.000198386391 + z * 2.70993746e-06)))
    cosine = 1.0 - 0.5 * z + z * z * (0.0416666605 + z * (-0.00138875865 + z * 2.44237217e-05))
    odd = (i_quarter & 1) != 0
    cos = tl.where(odd, sine, cosine)
    sin = tl.where(odd, cosine, sine)
    cos = tl.where(((i_quarter + 1) & 2) != 0, -cos, cos)
    sin = tl.where((i_quarter & 2) != 0, -sin, sin)
    return cos, sin
