"""Times of GPU work by events: behind a flush of the L2 cache, in a captured graph, so that launches do not count."""

from collections.abc import Callable, Sequence

import torch

from shadowkv.bench.statistics import Spread
from shadowkv.engine.placement import use_device
from shadowkv.errors import ConfigError

FLUSH_BYTES = 256 << 20
"""Written before every repetition: more than any L2 cache, and long enough for the host to run ahead."""
WARMUP = 3
REPETITIONS = 30

Work = Callable[[], object]


def require_gpu(device: torch.device) -> None:
    """Refuse to time kernels elsewhere.

    Raises:
        ConfigError: the device is no GPU.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"kernels are timed on a GPU only, and the device is {device}; `shadowkv check` tests them on a CPU"
        )


def timer() -> torch.cuda.Event:
    """An event that knows when the device reached it."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Stopwatch:
    """Times work on one GPU. It holds the buffer that flushes the L2 cache."""

    def __init__(self, device: torch.device) -> None:
        require_gpu(device)
        use_device(device)
        self.device = device
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def time(self, works: Sequence[Work], *, before: Work | None = None, repetitions: int = REPETITIONS) -> Spread:
        """Milliseconds of one piece of work.

        All pieces are of one kind on tensors of their own; each runs once per repetition, so it finds its
        inputs in no cache.

        Args:
            before: called before every repetition, outside of what is timed (undoes what work has changed).
        """
        replay = self._captured(works)
        times = []
        for i in range(WARMUP + repetitions):
            if before is not None:
                before()
            self._flush.fill_(i % 128)
            start, end = timer(), timer()
            start.record()
            replay()
            end.record()
            end.synchronize()
            if i >= WARMUP:
                times.append(start.elapsed_time(end) / len(works))
        return Spread.of(times)

    def _captured(self, works: Sequence[Work]) -> Work:
        """One graph that does them all, after each has run once (which compiles it)."""
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for work in works:
                work()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for work in works:
                work()
        return graph.replay
