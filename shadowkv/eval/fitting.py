"""As large a context as a length allows: found by bisection, then made smaller for the samples that need it.

Every loop ends: a size only ever shrinks, and a task whose smallest size does not fit is refused.

Source: NVIDIA/RULER scripts/data/synthetic: the largest integer size between ``step`` and an estimate on the
first sample, and ``step`` less for each sample that is then too long.
"""

from collections.abc import Callable, Iterator

from shadowkv.errors import RequestError
from shadowkv.eval.sample import Length, Sample

Build = Callable[[int, int], Sample]
"""A sample from its size in the task's units and its number; the same arguments give the same sample."""


def largest_size(build: Build, length: Length, smallest: int, most: int | None = None) -> int:
    """The largest size at which the first sample fits.

    Args:
        most: sizes above it do not exist.

    Raises:
        RequestError: the smallest size does not fit.
    """
    first = build(smallest, 0)
    total = length.total_tokens(first)
    if total > length.limit_tokens:
        raise RequestError(
            f"{first.task}: the smallest prompt and its answer are {total} tokens and {length.limit_tokens} are "
            "allowed; give a larger length"
        )
    fitting, beyond = smallest, smallest * 2
    while (most is None or beyond <= most) and length.fits(build(beyond, 0)):
        if beyond > 2 * length.limit_tokens:  # a unit without a single token would go on for ever
            break
        fitting, beyond = beyond, beyond * 2
    if most is not None:
        beyond = min(beyond, most + 1)
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        if length.fits(build(middle, 0)):
            fitting = middle
        else:
            beyond = middle
    return fitting


def fitted(build: Build, length: Length, size: int, step: int, index: int) -> Sample:
    """A sample of this size, or of as many steps less as it needs.

    Raises:
        RequestError: not even one step fits.
    """
    smallest = min(size, step)
    while True:
        sample = build(size, index)
        if length.fits(sample):
            return sample
        if size == smallest:
            raise RequestError(
                f"{sample.task}, sample {index}: {length.total_tokens(sample)} tokens at the smallest size and "
                f"{length.limit_tokens} are allowed; give a larger length"
            )
        size = max(size - step, smallest)


def fill(build: Build, length: Length, step: int, samples: int, most: int | None = None) -> Iterator[Sample]:
    """Samples of one length, one after the other.

    Raises:
        RequestError: the smallest size does not fit.
    """
    smallest = step if most is None else min(step, most)
    size = largest_size(build, length, smallest, most)
    for index in range(samples):
        yield fitted(build, length, size, step, index)
