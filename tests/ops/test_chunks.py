"""Chunk means, cosines and outliers against loops over single chunks in float64."""

import pytest
import torch
from torch import Tensor

from shadowkv.ops.chunks import choose_outliers, chunk_means, min_cosine, split_chunks
from shadowkv.ops.contract.bounds import Bounded, stacked
from tests.ops.truth import LAYOUTS, assert_within


@pytest.fixture
def keys(device, dtype) -> Tensor:
    """[K, S, D] with chunks of 8 that agree more or less: a common direction plus noise."""
    common = torch.randn(3, 13, 1, 32, device=device)
    noise = torch.rand(3, 13, 1, 1, device=device) * torch.randn(3, 13, 8, 32, device=device)
    return (common + noise).flatten(1, 2).to(dtype)


def naive_min_cosine(k_LD: Tensor) -> Bounded:
    """Of unit vectors, as the op has them."""
    keys = Bounded.exact(k_LD)
    mean = unit(keys.sum(0, keepdim=True) / k_LD.shape[0])
    return -(-(unit(keys) * mean).sum(1)).amax(0)


def unit(x: Bounded) -> Bounded:
    return x / (x * x).sum(1, keepdim=True).function(torch.sqrt)


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 16, 23])
def test_the_incomplete_chunk_is_left_out(device, dtype, tokens):
    x = torch.randn(2, 23, 4, device=device).to(dtype)[:, :tokens]
    chunks = split_chunks(x, 8)
    assert chunks.shape == (2, tokens // 8, 8, 4)
    for c in range(tokens // 8):
        assert torch.equal(chunks[:, c], x[:, c * 8 : c * 8 + 8])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_means(keys, size, layout):
    k = LAYOUTS[layout](split_chunks(keys, size))
    means = [(Bounded.exact(k[:, c]).sum(1) / size).rounded(k.dtype) for c in range(k.shape[1])]
    assert_within(chunk_means(k), stacked(means, 1))


def test_the_mean_of_large_keys_does_not_overflow(device, dtype):
    """Eight keys of 20,000 sum past float16's largest number; their mean does not."""
    k = torch.full((1, 1, 8, 4), 20000.0, device=device).to(dtype)
    assert torch.equal(chunk_means(k), k[:, :, 0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_lowest_cosine(keys, size, layout):
    k = LAYOUTS[layout](split_chunks(keys, size))
    got = min_cosine(k)
    assert got.dtype == torch.float32
    assert_within(got, stacked([stacked([naive_min_cosine(chunk) for chunk in head], 0) for head in k], 0))


def test_cosine_does_not_depend_on_the_keys_size(keys):
    """A power of two changes no digit, in sums and roots neither."""
    k = split_chunks(keys.float(), 8)
    for scale in (2.0**-40, 2.0**40):
        assert torch.equal(min_cosine(k), min_cosine(k * scale))


def test_zero_keys_have_cosine_zero(device, dtype):
    k = torch.ones(1, 3, 4, 8, device=device, dtype=dtype)
    k[0, 1] = 0  # nothing but zeros
    k[0, 2, 3] = 0  # one zero among others
    opposite = torch.ones(1, 1, 2, 8, device=device, dtype=dtype)
    opposite[0, 0, 1] = -1  # the mean is zero
    assert min_cosine(k)[0, 1:].tolist() == [0, 0]
    assert min_cosine(opposite).item() == 0


def naive_outliers(cosine_C: list[float], outliers: int, sinks: int) -> list[int]:
    order = list(range(min(sinks, len(cosine_C))))
    rest = [c for c in range(len(cosine_C)) if c not in order]
    order += sorted(rest, key=lambda c: (cosine_C[c], c))
    return sorted(order[:outliers])


@pytest.mark.parametrize("outliers", [0, 1, 4, 13, 20])
@pytest.mark.parametrize("sinks", [0, 1, 3])
def test_outliers_are_the_sinks_and_the_worst_described(keys, outliers, sinks):
    k = split_chunks(keys, 8)
    cosine = min_cosine(k).tolist()
    chosen = choose_outliers(k, outliers, sinks)
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == [naive_outliers(row, outliers, sinks) for row in cosine]


def test_ties_go_to_the_lower_chunk(device, dtype):
    k = torch.ones(2, 40, 4, 8, device=device, dtype=dtype)
    k[1, 30, 2] = -1
    assert choose_outliers(k, 3, 0).tolist() == [[0, 1, 2], [0, 1, 30]]
    assert choose_outliers(k, 3, 2).tolist() == [[0, 1, 2], [0, 1, 30]]


def test_no_chunks_have_no_outliers(device, dtype):
    assert choose_outliers(torch.empty(2, 0, 4, 8, device=device, dtype=dtype), 3, 1).shape == (2, 0)
