"""The best k of a block of int32 keys, and places in a mask, without sorting.

Design. The best k are those above a threshold, which is found by splitting the interval between the lowest and the
highest key in three: a round counts the keys above two thresholds in one reduction over the block (both counts in
the halves of an int32, which the hardware adds in one instruction a warp), and the search ends as soon as a
threshold leaves exactly k: after some 8 rounds of 0.15 us where keys are spread, 20 at most. Of keys equal to the
last threshold the first are taken.

Keys lie as a matrix whose rows are consecutive, so that a rank is a scan inside few threads and one over the rows;
a scan over all of them would read the sums of all warps in every thread, several times.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))
"""The key of what cannot be chosen."""
HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def rank(b_x_XX):
    """Sums of all entries before each one, row by row."""
    b_row_X = tl.sum(b_x_XX, axis=1)
    b_before_X = tl.cumsum(b_row_X, axis=0) - b_row_X
    return b_before_X[:, None] + tl.cumsum(b_x_XX, axis=1) - b_x_XX


@triton.jit
def threshold(b_key_XX, count, low, held):
    """A key that ``held`` keys reach, of which ``above`` exceed it: held is ``count``, or only above is less.

    ``low`` is a key that ``held`` keys reach, at least ``count``.
    """
    low = low.to(tl.int64)
    high = tl.max(b_key_XX).to(tl.int64)
    above = held * 0
    while (low < high) & (held != count):
        third = low + (high - low + 2) // 3
        two_thirds = low + (2 * (high - low) + 2) // 3
        b_over_XX = (b_key_XX >= third.to(tl.int32)).to(tl.int32)
        b_over_XX += (b_key_XX >= two_thirds.to(tl.int32)).to(tl.int32) << 16
        counts = tl.sum(b_over_XX)
        many = counts & 0xFFFF
        few = (counts >> 16) & 0xFFFF
        upper = few >= count
        middle = many >= count
        low = tl.where(upper, two_thirds, tl.where(middle, third, low))
        held = tl.where(upper, few, tl.where(middle, many, held))
        above = tl.where(upper, above, tl.where(middle, few, many))
        high = tl.where(upper, high, tl.where(middle, two_thirds - 1, third - 1))
    return low.to(tl.int32), held, above


@triton.jit
def best(b_key_XX, count, low, held):
    """Which keys are the ``count`` largest, ties to the first."""
    low, held, above = threshold(b_key_XX, count, low, held)
    m_best_XX = b_key_XX >= low
    if held != count:
        m_tie_XX = b_key_XX == low
        m_best_XX = (b_key_XX > low) | (m_tie_XX & (rank(m_tie_XX.to(tl.int32)) < count - above))
    return m_best_XX, low


@triton.jit
def bounds(b_key_XX):
    """The lowest key that can be chosen, and how many can."""
    m_XX = b_key_XX != LOWEST
    return tl.min(tl.where(m_XX, b_key_XX, HIGHEST)), tl.sum(m_XX.to(tl.int32))
