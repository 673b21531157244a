"""The cost of a long queue."""

import sys

from shadowkv.cache.pool import Extents
from shadowkv.config import SamplingParams
from shadowkv.engine.request import Request
from shadowkv.engine.scheduler import Scheduler


def test_a_long_queue_costs_no_more_per_request_than_a_short_one() -> None:
    """Steps of the interpreter, not seconds: twice the queue, at most little more than twice the work."""
    work = []
    for requests in (200, 400):
        s = Scheduler(Extents(1 << 20), Extents(1 << 20), lambda tokens: (tokens, 0), max_batch=1)
        steps = 0

        def count(frame, event, arg):
            nonlocal steps
            steps += 1
            return count

        sys.settrace(count)
        try:
            for i in range(requests):
                s.add(Request(f"r{i}", [1], SamplingParams(max_tokens=1)))
            for i in reversed(range(requests)):
                s.cancel(f"r{i}")
        finally:
            sys.settrace(None)
        work.append(steps)
    assert work[1] < 2.1 * work[0]
