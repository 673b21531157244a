"""Who runs next: continuous batching, first come first served. Pure bookkeeping; knows no torch.

Every step all running samples decode, and then at most ``max_admit`` requests join from the head of the
queue, in order of arrival; nobody overtakes and nobody is preempted. So a waiting request waits only for
those ahead of it, and a running one is held up by at most ``max_admit`` prefills per step.

Memory is reserved for a sample's whole life (prompt and every token it may generate) when it is admitted,
by taking the extents from the ledgers, so nothing dies half-way and fragmentation is seen before it hurts.
What the scheduler took it gives back, sample by sample (:meth:`Scheduler.release`), unless an owner that
outlives the request, such as a kept context, takes it over (:meth:`Scheduler.detach`).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shadowkv.cache.pool import Extents, Reservation, aligned, release, reserve
from shadowkv.engine.request import Request
from shadowkv.errors import CapacityError, ConfigError, RequestError

Price = Callable[[int], tuple[int, int]]
"""Device and host bytes of one sequence of at most so many tokens; must not fall as tokens rise."""


@dataclass(frozen=True)
class Admission:
    """A request to prefill now, with one reservation of ``request.capacity_tokens`` per sample."""

    request: Request
    reservations: tuple[Reservation, ...]


@dataclass(frozen=True)
class Refusal:
    """A request that left the queue because it cannot be served."""

    request: Request
    error: CapacityError


@dataclass(frozen=True)
class Step:
    """What to do now: prefill ``admit``, decode the samples (request, index) that were running before."""

    admit: tuple[Admission, ...] = ()
    decode: tuple[tuple[Request, int], ...] = ()
    refused: tuple[Refusal, ...] = ()


@dataclass
class _Running:
    request: Request
    held: dict[int, Reservation]
    live: set[int]


class Scheduler:
    """The queue, the running batch, and the memory of what runs.

    Args:
        device, host: the ledgers that sequences take memory from. Others may hold extents there too.
        price: see :data:`Price`.
        max_batch: the most samples that run at once.
        max_admit: the most requests that join per step.
    """

    def __init__(self, device: Extents, host: Extents, price: Price, max_batch: int, max_admit: int = 1) -> None:
        for name, value in (("max_batch", max_batch), ("max_admit", max_admit)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        self.device = device
        self.host = host
        self.max_batch = max_batch
        self.max_admit = max_admit
        self._price = price
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: dict[str, _Running] = {}

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests with at least one running sample."""
        return len(self._running)

    @property
    def running_samples(self) -> int:
        return sum(len(entry.live) for entry in self._running.values())

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running or request_id in self._waiting

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue.

        Raises:
            CapacityError: it could not run even if nothing else did.
            RequestError: a request of this id is still here.
        """
        if request.id in self:
            raise RequestError(f"a request with the id {request.id!r} is being served; choose another id")
        samples, capacity = request.params.n, request.capacity_tokens
        if samples > self.max_batch:
            raise CapacityError(
                f"n is {samples} samples, and at most {self.max_batch} run at once; lower n or raise max_batch"
            )
        if not self._fits_empty(capacity, samples):
            raise CapacityError(self._never_fits(request))
        self._waiting[request.id] = request

    def schedule(self) -> Step:
        """Choose the next step and reserve the memory of what it admits.

        A request that does not fit although nothing runs or could be admitted before it is refused:
        others hold the memory, and no step of ours would give it back.
        """
        decode = tuple((entry.request, index) for entry in self._running.values() for index in sorted(entry.live))
        admit: list[Admission] = []
        refused: list[Refusal] = []
        while self._waiting and len(admit) < self.max_admit:
            head = next(iter(self._waiting.values()))
            if self.running_samples + head.params.n > self.max_batch:
                break
            reservations = self._reserve(head)
            if reservations is not None:
                del self._waiting[head.id]
                held = dict(enumerate(reservations))
                self._running[head.id] = _Running(head, held, set(held))
                admit.append(Admission(head, reservations))
            elif self._running:
                break
            else:
                del self._waiting[head.id]
                refused.append(Refusal(head, CapacityError(self._held_by_others(head))))
        return Step(tuple(admit), decode, tuple(refused))

    def release(self, request_id: str, index: int) -> bool:
        """A sample ended: it leaves the batch and its memory is free at once, unless it was detached.

        The caller must be done with the memory: the next :meth:`schedule` may give it away.

        Returns:
            Whether it was the request's last one; the request has left the scheduler then.
        """
        entry = self._running[request_id]
        entry.live.remove(index)
        if index in entry.held:
            release(self.device, self.host, entry.held.pop(index))
        if not entry.live:
            del self._running[request_id]
        return not entry.live

    def detach(self, request_id: str, index: int) -> Reservation:
        """Hand a running sample's memory to the caller, who frees it from now on. The sample still runs."""
        return self._running[request_id].held.pop(index)

    def finish(self, request_id: str) -> Request:
        """A running request ended: all samples that were left are released."""
        entry = self._running[request_id]
        for index in sorted(entry.live):
            self.release(request_id, index)
        return entry.request

    def cancel(self, request_id: str) -> Request | None:
        """Take out a waiting or running request; None when it has left already (it may just have ended).

        As with :meth:`release`, the caller must be done with the memory of a running one.
        """
        if request_id in self._running:
            return self.finish(request_id)
        return self._waiting.pop(request_id, None)

    def requests(self) -> Iterator[Request]:
        """All requests here: the running ones, then the waiting ones, each in order of arrival."""
        yield from (entry.request for entry in self._running.values())
        yield from self._waiting.values()

    def longest_tokens(self, samples: int = 1) -> int:
        """The largest prompt + max_tokens that would fit if nothing else ran; 0 when nothing fits."""
        if not self._fits_empty(1, samples):
            return 0
        low, high = 1, 2
        while self._fits_empty(high, samples):
            low, high = high, 2 * high
            if high > 1 << 40:
                return low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits_empty(middle, samples) else (low, middle)
        return low

    def _reserve(self, request: Request) -> tuple[Reservation, ...] | None:
        """Memory for all samples, or for none."""
        device_bytes, host_bytes = self._price(request.capacity_tokens)
        taken: list[Reservation] = []
        for _ in range(request.params.n):
            reservation = reserve(self.device, self.host, request.capacity_tokens, device_bytes, host_bytes)
            if reservation is None:
                for earlier in taken:
                    release(self.device, self.host, earlier)
                return None
            taken.append(reservation)
        return tuple(taken)

    def _needs(self, capacity_tokens: int, samples: int) -> tuple[int, int]:
        """Bytes as the ledgers count them (aligned) on device and host."""
        device_bytes, host_bytes = self._price(capacity_tokens)
        return samples * aligned(max(device_bytes, 1)), samples * aligned(host_bytes)

    def _fits_empty(self, capacity_tokens: int, samples: int) -> bool:
        device_bytes, host_bytes = self._needs(capacity_tokens, samples)
        return device_bytes <= self.device.size_bytes and host_bytes <= self.host.size_bytes

    def _never_fits(self, request: Request) -> str:
        device_bytes, host_bytes = self._needs(request.capacity_tokens, request.params.n)
        longest = self.longest_tokens(request.params.n)
        return (
            f"{_question(request)} needs {device_bytes:,} bytes on the device and {host_bytes:,} on the host; "
            f"there are {self.device.size_bytes:,} and {self.host.size_bytes:,}. The longest prompt + max_tokens "
            f"that fits is {longest:,} tokens with n={request.params.n}: shorten one of them"
        )

    def _held_by_others(self, request: Request) -> str:
        device_bytes, host_bytes = self._needs(request.capacity_tokens, request.params.n)
        return (
            f"{_question(request)} needs {device_bytes:,} bytes on the device ({self.device.describe_free()}) and "
            f"{host_bytes:,} on the host ({self.host.describe_free()}). Nothing is running: kept contexts hold "
            "the rest; drop some, or shorten the prompt or max_tokens"
        )


def _question(request: Request) -> str:
    return (
        f"a prompt of {request.prompt_tokens:,} tokens with max_tokens={request.params.max_tokens:,} and "
        f"n={request.params.n}"
    )
