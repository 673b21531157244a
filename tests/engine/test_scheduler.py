"""The scheduler against a brute-force simulation, with real ledgers under it."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shadowkv
from shadowkv.cache.pool import ALIGN_BYTES, Extent, Extents, release
from shadowkv.config import SamplingParams
from shadowkv.engine.request import Request
from shadowkv.engine.scheduler import Scheduler, Step
from shadowkv.errors import CapacityError, ConfigError, RequestError

UNIT = ALIGN_BYTES


def price(capacity_tokens: int) -> tuple[int, int]:
    """One unit of device memory per token and one of host memory per two, so that both can be short."""
    return capacity_tokens * UNIT, capacity_tokens // 2 * UNIT


def request(id: str, prompt: int = 1, generate: int = 1, n: int = 1) -> Request:
    return Request(id, range(prompt), SamplingParams(max_tokens=generate, n=n))


def scheduler(device: int, host: int = 1000, max_batch: int = 8, max_admit: int = 1) -> Scheduler:
    return Scheduler(Extents(device * UNIT), Extents(host * UNIT), price, max_batch, max_admit)


def admitted(step: Step) -> list[str]:
    return [admission.request.id for admission in step.admit]


def keep(ledger: Extents, units: int) -> Extent:
    """A context that somebody else keeps in the same ledger."""
    extent = ledger.allocate(units * UNIT)
    assert extent is not None
    return extent


def test_three_requests_in_a_pool_for_two() -> None:
    s = scheduler(device=20, host=10)
    for id in "abc":
        s.add(request(id, prompt=4, generate=6))
    assert admitted(s.schedule()) == ["a"]
    assert admitted(s.schedule()) == ["b"]
    for _ in range(6):
        step = s.schedule()
        assert (admitted(step), step.refused) == ([], ())
        assert [(r.id, i) for r, i in step.decode] == [("a", 0), ("b", 0)]
    assert s.device.free_bytes == s.host.free_bytes == 0
    assert s.release("a", 0)
    step = s.schedule()
    assert admitted(step) == ["c"]
    assert [r.id for r, _ in step.decode] == ["b"]
    s.finish("b")
    s.finish("c")
    assert s.idle
    assert s.device.used_bytes == s.host.used_bytes == 0


def test_short_host_memory_alone_makes_a_request_wait_and_costs_no_device_memory() -> None:
    s = scheduler(device=100, host=5)
    s.add(request("a", 4, 4))
    s.add(request("b", 4, 4))
    assert admitted(s.schedule()) == ["a"]
    used = s.device.used_bytes
    assert admitted(s.schedule()) == []
    assert s.device.used_bytes == used


def test_nobody_overtakes_a_large_head() -> None:
    s = scheduler(device=20)
    s.add(request("a", 5, 5))
    s.add(request("large", 10, 10))
    s.add(request("small"))
    assert [admitted(s.schedule()) for _ in range(3)] == [["a"], [], []]
    s.finish("a")
    assert [admitted(s.schedule()) for _ in range(2)] == [["large"], []]
    s.finish("large")
    assert admitted(s.schedule()) == ["small"]


def test_samples_of_a_request_are_admitted_together_and_freed_apart() -> None:
    s = scheduler(device=30, max_batch=4)
    s.add(request("three", 5, 5, n=3))
    (admission,) = s.schedule().admit
    assert len({r.device.start for r in admission.reservations}) == 3
    assert [(r.capacity_tokens, r.device.size) for r in admission.reservations] == [(10, 10 * UNIT)] * 3
    s.add(request("two", 5, 5, n=2))
    assert not s.release("three", 1)
    assert s.schedule().admit == ()
    assert not s.release("three", 0)
    step = s.schedule()
    assert admitted(step) == ["two"]
    assert [(r.id, i) for r, i in step.decode] == [("three", 2)]
    assert s.release("three", 2)
    assert "three" not in s


def test_batch_is_counted_in_samples() -> None:
    s = scheduler(device=1000, max_batch=3, max_admit=9)
    s.add(request("a", n=2))
    s.add(request("b", n=2))
    s.add(request("c"))
    assert admitted(s.schedule()) == ["a"]
    s.release("a", 0)
    assert admitted(s.schedule()) == ["b"]
    with pytest.raises(CapacityError, match="n is 4 samples, and at most 3"):
        s.add(request("d", n=4))


def test_max_admit_bounds_the_prefills_of_a_step() -> None:
    s = scheduler(device=1000, max_admit=2)
    for id in "abcde":
        s.add(request(id))
    assert [admitted(s.schedule()) for _ in range(3)] == [["a", "b"], ["c", "d"], ["e"]]


def test_what_can_never_fit_is_refused_at_once_with_the_figures() -> None:
    s = scheduler(device=40, host=10)
    with pytest.raises(CapacityError) as refusal:
        s.add(request("a", prompt=30, generate=5))
    text = str(refusal.value)
    for figure in (35 * UNIT, 17 * UNIT, 40 * UNIT, 10 * UNIT):
        assert f"{figure:,}" in text
    assert "21 tokens" in text
    assert s.idle
    s.add(request("b", prompt=16, generate=5))
    assert admitted(s.schedule()) == ["b"]


@given(device=st.integers(0, 60), host=st.integers(0, 30), n=st.integers(1, 4))
def test_longest_tokens_is_the_largest_that_add_takes(device: int, host: int, n: int) -> None:
    s = scheduler(device, host)
    fitting = [t for t in range(1, 100) if n * t <= device and n * (t // 2) <= host]
    assert s.longest_tokens(n) == max(fitting, default=0)


def test_rounding_to_the_alignment_is_counted() -> None:
    """Three times 300 bytes would fit into 1024, but each takes 512 of them: refused at once, not for ever."""
    for sizes in ((300, 0), (1, 300)):
        s = Scheduler(Extents(4 * UNIT), Extents(4 * UNIT), lambda _, sizes=sizes: sizes, max_batch=8)
        with pytest.raises(CapacityError, match="1,536 bytes" if sizes[0] == 300 else "1,536 on the host"):
            s.add(request("a", n=3))
        s.add(request("b", n=2))
        assert admitted(s.schedule()) == ["b"]


def test_memory_held_by_others_refuses_instead_of_waiting_for_ever() -> None:
    s = scheduler(device=20)
    kept = keep(s.device, 12)
    s.add(request("large", 5, 5))
    s.add(request("small", 3, 3))
    step = s.schedule()
    (refusal,) = step.refused
    assert refusal.request.id == "large"
    assert f"{10 * UNIT:,}" in str(refusal.error)
    assert f"{8 * UNIT:,}" in str(refusal.error)
    assert admitted(step) == ["small"]
    s.finish("small")
    assert s.idle
    s.device.free(kept)


def test_memory_held_by_others_is_waited_for_while_something_runs() -> None:
    s = scheduler(device=20)
    s.add(request("a", 5, 5))
    s.schedule()
    kept = keep(s.device, 5)
    s.add(request("b", 5, 5))
    assert s.schedule() == Step(decode=s.schedule().decode)
    s.device.free(kept)
    assert admitted(s.schedule()) == ["b"]


def test_fragments_are_not_mistaken_for_room() -> None:
    s = scheduler(device=30, max_admit=3)
    for id in "abc":
        s.add(request(id, 5, 5))
    s.schedule()
    s.finish("a")
    s.finish("c")
    s.add(request("d", 10, 10))
    assert s.device.free_bytes == 20 * UNIT
    assert s.schedule().admit == ()
    s.finish("b")
    assert admitted(s.schedule()) == ["d"]


def test_detached_memory_is_the_callers() -> None:
    s = scheduler(device=30)
    s.add(request("a", 5, 5, n=2))
    s.schedule()
    kept = s.detach("a", 1)
    assert s.running_samples == 2
    assert not s.release("a", 1)
    assert s.device.used_bytes == 20 * UNIT
    s.finish("a")
    assert s.idle
    assert s.device.used_bytes == 10 * UNIT
    s.add(request("b", 20, 5))
    release(s.device, s.host, kept)
    assert admitted(s.schedule()) == ["b"]


def test_cancel_waiting_running_and_gone() -> None:
    s = scheduler(device=20)
    a, b = request("a", 10, 10), request("b", 10, 10)
    s.add(a)
    s.add(b)
    s.schedule()
    assert s.cancel("b") is b
    assert s.cancel("a") is a
    assert s.cancel("a") is None
    assert s.idle
    assert s.device.used_bytes == 0


def test_an_id_is_unique_while_it_is_here() -> None:
    s = scheduler(device=20)
    s.add(request("a"))
    with pytest.raises(RequestError, match="'a'"):
        s.add(request("a"))
    s.schedule()
    with pytest.raises(RequestError, match="'a'"):
        s.add(request("a"))
    s.finish("a")
    s.add(request("a"))


@pytest.mark.parametrize(("max_batch", "max_admit"), [(0, 1), (1, 0)])
def test_limits_must_be_positive(max_batch: int, max_admit: int) -> None:
    with pytest.raises(ConfigError):
        scheduler(1, 1, max_batch, max_admit)


def test_the_scheduler_does_not_import_torch() -> None:
    """Whatever the package's front door imports, which is stood in for here."""
    code = f"""
import sys, types
front = types.ModuleType("shadowkv")
front.__path__ = {list(shadowkv.__path__)!r}
sys.modules["shadowkv"] = front
import shadowkv.engine.scheduler
sys.exit("torch" in sys.modules or "transformers" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- against brute force ----


@dataclass
class Job:
    """A request as the simulation knows it; each sample takes its own number of steps."""

    request: Request
    steps: list[int]
    cancel_at: int | None


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int, int, int, dict[int, list[Job]]]:
    device, host = draw(st.integers(4, 24)), draw(st.integers(2, 12))
    max_batch, max_admit = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    arrivals: dict[int, list[Job]] = {}
    for number in range(draw(st.integers(1, 14))):
        n, generate = draw(st.integers(1, 3)), draw(st.integers(1, 8))
        made = request(f"r{number}", draw(st.integers(1, 12)), generate, n)
        steps = draw(st.lists(st.integers(1, generate), min_size=n, max_size=n))
        cancel_at = draw(st.none() | st.integers(0, 30))
        arrivals.setdefault(draw(st.integers(0, 20)), []).append(Job(made, steps, cancel_at))
    return device, host, max_batch, max_admit, arrivals


@settings(max_examples=300, deadline=None)
@given(worlds())
def test_against_brute_force(world: tuple[int, int, int, int, dict[int, list[Job]]]) -> None:
    """Every step is predicted by replaying the rule from scratch on a bitmap of memory units."""
    device, host, max_batch, max_admit, arrivals = world
    s = scheduler(device, host, max_batch, max_admit)
    queue: list[Job] = []
    batch: dict[tuple[str, int], int] = {}  # running sample -> steps left
    memory: dict[tuple[str, int], tuple[range, range]] = {}
    left: list[str] = []
    known: dict[str, Job] = {}
    accepted: list[str] = []
    admission_order: list[str] = []

    def hole(size: int, index: int) -> range | None:
        """First fit by trying every start: which is the lowest run of units that nobody holds?"""
        total = (device, host)[index]
        busy = {unit for ranges in memory.values() for unit in ranges[index]}
        for start in range(total - size + 1):
            if busy.isdisjoint(range(start, start + size)):
                return range(start, start + size)
        return None

    def try_admit(job: Job) -> bool:
        need = job.request.capacity_tokens
        n = job.request.params.n
        for i in range(n):
            places = hole(need, 0), hole(need // 2, 1)
            if places[0] is None or places[1] is None:
                for j in range(i):
                    del memory[job.request.id, j]
                return False
            memory[job.request.id, i] = (places[0], places[1])
        return True

    def leave(id: str, index: int) -> None:
        del batch[id, index], memory[id, index]
        if not any(other == id for other, _ in batch):
            left.append(id)

    for now in range(400):
        for job in arrivals.get(now, []):
            n, need = job.request.params.n, job.request.capacity_tokens
            known[job.request.id] = job
            if n <= max_batch and n * need <= device and n * (need // 2) <= host:
                s.add(job.request)
                queue.append(job)
                accepted.append(job.request.id)
            else:
                with pytest.raises(CapacityError):
                    s.add(job.request)
        for id, job in known.items():
            if job.cancel_at == now:
                here = id in accepted and id not in left
                assert (s.cancel(id) is job.request) == here
                if job in queue:
                    queue.remove(job)
                    left.append(id)
                for index in [i for other, i in batch if other == id]:
                    leave(id, index)

        expected_decode = list(batch)
        expected_admit: list[str] = []
        while queue and len(expected_admit) < max_admit and len(batch) + queue[0].request.params.n <= max_batch:
            if not try_admit(queue[0]):
                break
            job = queue.pop(0)
            expected_admit.append(job.request.id)
            batch.update({(job.request.id, i): steps for i, steps in enumerate(job.steps)})

        step = s.schedule()
        assert admitted(step) == expected_admit
        assert [(r.id, i) for r, i in step.decode] == expected_decode
        assert step.refused == ()
        admission_order += expected_admit
        for admission in step.admit:
            for i, reservation in enumerate(admission.reservations):
                place, host_place = memory[admission.request.id, i]
                assert reservation.device.start == place.start * UNIT
                assert reservation.device.size == len(place) * UNIT
                assert (0 if reservation.host is None else reservation.host.size) == len(host_place) * UNIT
        assert s.device.used_bytes == sum(len(d) for d, _ in memory.values()) * UNIT <= device * UNIT
        assert s.host.used_bytes == sum(len(h) for _, h in memory.values()) * UNIT <= host * UNIT
        assert (s.waiting, s.running_samples) == (len(queue), len(batch))
        assert [r.id for r in s.requests()] == list(dict.fromkeys(id for id, _ in batch)) + [
            j.request.id for j in queue
        ]

        for id, index in list(batch):
            batch[id, index] -= 1
            if batch[id, index] == 0:
                leave(id, index)
                assert s.release(id, index) == (id in left)
        if now > 30 and s.idle:
            break

    assert s.idle, "a request is starved"
    assert sorted(left) == sorted(accepted), "every request leaves exactly once"
    assert admission_order == [id for id in accepted if id in admission_order], "first come first served"
    assert s.device.used_bytes == s.host.used_bytes == s.running == s.waiting == 0
