"""Extents against a map of bytes; reservations whole or not at all; tensors carved from an arena."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv.cache.arena import Arena
from shadowkv.cache.layout import Region, bytes_by_kind, carve, copy_overlap, total_bytes
from shadowkv.cache.pool import ALIGN_BYTES, Extent, Extents, aligned, release, reserve
from shadowkv.errors import CapacityError

UNITS = 24


class ByteMap:
    """One owner per aligned unit; the lowest run of free units wins."""

    def __init__(self, units: int) -> None:
        self.owner: list[int | None] = [None] * units

    def runs(self) -> list[tuple[int, int]]:
        """Maximal free runs as (start, length)."""
        runs, start = [], None
        for i, owner in enumerate([*self.owner, -1]):
            if owner is None and start is None:
                start = i
            elif owner is not None and start is not None:
                runs.append((start, i - start))
                start = None
        return runs

    def allocate(self, owner: int, units: int) -> int | None:
        for start, length in self.runs():
            if length >= units:
                self.owner[start : start + units] = [owner] * units
                return start
        return None

    def free(self, owner: int) -> None:
        self.owner = [None if o == owner else o for o in self.owner]


ACTIONS = st.lists(
    st.tuples(st.just("allocate"), st.integers(0, 9 * ALIGN_BYTES)) | st.tuples(st.just("free"), st.integers(0, 99)),
    max_size=40,
)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(ACTIONS, st.integers(0, ALIGN_BYTES - 1))
def test_extents_are_what_a_map_of_bytes_says(actions, surplus):
    """First fit, no overlap, neighbours merged: and the surplus below one unit is not handed out."""
    extents, truth = Extents(UNITS * ALIGN_BYTES + surplus), ByteMap(UNITS)
    held: dict[int, Extent] = {}
    for owner, (action, number) in enumerate(actions):
        if action == "allocate":
            units = max(-(-number // ALIGN_BYTES), 1)
            extent, start = extents.allocate(number), truth.allocate(owner, units)
            assert (extent is None) == (start is None)
            if extent is not None:
                assert extent == Extent(start * ALIGN_BYTES, units * ALIGN_BYTES)
                assert extent.stop == extent.start + extent.size
                held[owner] = extent
        elif held:
            gone = list(held)[number % len(held)]
            extents.free(held.pop(gone))
            truth.free(gone)
        free = [length * ALIGN_BYTES for _, length in truth.runs()]
        assert extents.size_bytes == UNITS * ALIGN_BYTES
        assert extents.free_bytes == sum(free)
        assert extents.used_bytes == sum(extent.size for extent in held.values())
        assert extents.largest_free_bytes == max(free, default=0)
    for extent in held.values():
        extents.free(extent)
    assert extents.used_bytes == 0
    assert extents.allocate(extents.size_bytes) == Extent(0, UNITS * ALIGN_BYTES)


def test_only_what_is_allocated_may_be_freed():
    extents = Extents(8 * ALIGN_BYTES)
    extent = extents.allocate(2 * ALIGN_BYTES)
    with pytest.raises(AssertionError, match="not allocated"):
        extents.free(Extent(0, ALIGN_BYTES))
    extents.free(extent)
    with pytest.raises(AssertionError, match="not allocated"):
        extents.free(extent)
    assert extents.free_bytes == extents.size_bytes


@pytest.mark.parametrize("size", [0, 1, ALIGN_BYTES - 1])
def test_less_than_a_unit_is_no_memory(size):
    extents = Extents(size)
    assert extents.size_bytes == extents.free_bytes == extents.largest_free_bytes == 0
    assert extents.allocate(1) is None


def test_free_memory_is_described_with_its_largest_piece():
    extents = Extents(8 * ALIGN_BYTES)
    first, _, third = (extents.allocate(2 * ALIGN_BYTES) for _ in range(3))
    extents.free(first)
    assert extents.describe_free() == "1,024 of 2,048 bytes are free, the largest piece has 512"
    extents.free(third)
    assert extents.describe_free() == "1,536 of 2,048 bytes are free, the largest piece has 1,024"


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    st.integers(1, 12),
    st.integers(0, 12),
    st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 1200), st.booleans()), max_size=20),
)
def test_a_reservation_is_whole_or_not_at_all(device_units, host_units, requests):
    device, host = Extents(device_units * ALIGN_BYTES), Extents(host_units * ALIGN_BYTES)
    held = []
    for device_bytes, host_bytes, gives_back in requests:
        if gives_back and held:
            release(device, host, held.pop(0))
        before = device.free_bytes, host.free_bytes
        fits = aligned(max(device_bytes, 1)) <= device.largest_free_bytes and (
            not host_bytes or aligned(host_bytes) <= host.largest_free_bytes
        )
        reservation = reserve(device, host, 7, device_bytes, host_bytes)
        assert (reservation is not None) == fits
        if reservation is None:
            assert (device.free_bytes, host.free_bytes) == before
            continue
        held.append(reservation)
        assert reservation.capacity_tokens == 7
        assert reservation.device.size == aligned(max(device_bytes, 1))
        assert (reservation.host is None) == (host_bytes == 0)
    for reservation in held:
        release(device, host, reservation)
    assert device.used_bytes == host.used_bytes == 0


# Tensors over an arena's bytes.

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]


def fill(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return tensor.copy_(torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape) % 50 + number)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sampled_from(DTYPES)),
        min_size=1,
        max_size=6,
    )
)
def test_regions_lie_apart_and_hold_what_is_written(device, shapes):
    regions = [Region(f"r{i}", f"kind {i % 2}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(shapes)]
    arena = Arena(2 * total_bytes(regions) + 4 * ALIGN_BYTES, device)
    before, extent = arena.allocate(300), arena.allocate(total_bytes(regions))
    after = arena.allocate(1)
    guards = [arena.carve(guard, 0, (guard.size,), torch.uint8).fill_(7) for guard in (before, after)]
    tensors = carve(arena, extent, regions)
    for i, region in enumerate(regions):
        tensor = tensors[region.name]
        assert (tensor.shape, tensor.dtype, tensor.device.type) == (region.shape, region.dtype, device.type)
        assert tensor.is_contiguous()
        if tensor.numel():
            assert (tensor.data_ptr() - guards[0].data_ptr()) % ALIGN_BYTES == 0
        fill(tensor, i)
    for i, region in enumerate(regions):
        assert torch.equal(tensors[region.name], fill(torch.empty_like(tensors[region.name]), i))
    assert all((guard == 7).all() for guard in guards)
    assert sum(bytes_by_kind(regions).values()) == total_bytes(regions)


def test_a_tensor_may_not_reach_over_its_extent(device):
    arena = Arena(4 * ALIGN_BYTES, device)
    extent = arena.allocate(ALIGN_BYTES)
    assert arena.carve(extent, 0, (64,), torch.float32).shape == (64,)
    assert arena.carve(extent, 252, (1,), torch.float32).shape == (1,)
    for offset, shape in ((0, (65,)), (4, (64,)), (256, (1,))):
        with pytest.raises(AssertionError, match="reaches over"):
            arena.carve(extent, offset, shape, torch.float32)


def test_kinds_are_summed():
    regions = [
        Region("k", "keys and values", (3, 5), torch.float32),
        Region("ids", "bookkeeping", (1,), torch.int32),
        Region("v", "keys and values", (300,), torch.uint8),
    ]
    assert bytes_by_kind(regions) == {"keys and values": 768, "bookkeeping": 256}
    assert total_bytes(regions) == 1024


def test_what_two_sequences_have_in_common_is_copied(device):
    source = {
        "longer": torch.arange(12, device=device).view(3, 4),
        "shorter": torch.arange(100, 102, device=device),
        "only here": torch.ones(2, device=device),
        "crossed": torch.arange(6, device=device).view(2, 3),
    }
    target = {
        "longer": torch.full((2, 4), -1, device=device),
        "shorter": torch.full((5,), -1, device=device),
        "crossed": torch.full((3, 2), -1, device=device),
        "only there": torch.full((2,), -1, device=device),
    }
    copy_overlap(source, target)
    assert target["longer"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert target["shorter"].tolist() == [100, 101, -1, -1, -1]
    assert target["crossed"].tolist() == [[0, 1], [3, 4], [-1, -1]]
    assert target["only there"].tolist() == [-1, -1]
    assert source["longer"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_memory_that_the_system_does_not_have_is_a_capacity_error(device):
    with pytest.raises(CapacityError, match="could not be allocated"):
        Arena(1 << 60, device)


def test_pinned_memory_is_pinned_and_exact(device):
    if device.type != "cuda":
        pytest.skip("pinning needs a GPU")
    size = (1 << 20) + ALIGN_BYTES  # just above a power of two
    arena = Arena(size, "cpu", pinned=True)
    extent = arena.allocate(size)
    tensor = arena.carve(extent, 0, (size,), torch.uint8)
    assert tensor.is_pinned()
    assert arena.size_bytes == size
