"""The pieces of choosing units in a step, against what the plain path chooses by."""

import pytest
import torch

from shadowkv.ops.contract.bounds import Bounded
from shadowkv.ops.select import chunk_scores, top_chunks

pytest.importorskip("triton")

from shadowkv.cache.selective_step import best_units, group_scores, sum_entries
from tests.ops.truth import assert_within, log_sum_exp


def test_the_best_units_are_those_of_the_plain_path_ties_included(device):
    gen = torch.Generator().manual_seed(0)
    scores_BKC = torch.randint(-4, 4, (3, 2, 50), generator=gen).float().to(device)  # many ties
    scores_BKC[0] = torch.randn(2, 50, generator=gen).to(device) * 1e-30
    scores_BKC[1, :, ::3] = -0.0
    scores_BKC[2, :, 5:] = -torch.inf  # fewer than are chosen
    for count in (1, 7, 20):
        got_BKP = best_units(scores_BKC.clone(), count, torch.empty(3, 2, 50, dtype=torch.int64, device=device))
        for got_KP, scores_KC in zip(got_BKP, scores_BKC, strict=True):
            assert torch.equal(got_KP.sort(1).values, top_chunks(scores_KC, count).sort(1).values)


@pytest.mark.parametrize("entries", [1, 4])
def test_shares_are_those_of_the_plain_path(device, entries: int):
    """Whatever lies beyond a row's units, and with more between logits than float32's exponentials span."""
    gen = torch.Generator().manual_seed(1)
    logits_BKGCE = (torch.randn(2, 2, 3, 24, entries, generator=gen) * 200).to(device)
    open_BKC = torch.rand(2, 2, 24, generator=gen).to(device) < 0.8
    open_BKC[1, :, 10:] = False
    exact_BKGCE = Bounded.exact(logits_BKGCE.clone())
    units_BKGC = log_sum_exp(exact_BKGCE, 4)[..., 0] if entries > 1 else exact_BKGCE[..., 0]
    plain_BKGC = logits_BKGCE.logsumexp(4)
    logits_BKGCE[1, ..., 10:, :] = torch.nan
    found_BKGC = logits_BKGCE[..., 0].clone()
    if entries > 1:
        sum_entries(logits_BKGCE, found_BKGC)
    got_BKC = group_scores(found_BKGC, open_BKC, torch.empty_like(found_BKGC))
    for row in range(2):
        plain_KC = chunk_scores(plain_BKGC[row, :, :, None], open_BKC[row])
        for head in range(2):
            those = open_BKC[row, head].nonzero().flatten()
            units_GC = units_BKGC[row, head][:, those]
            shifted_GC = units_GC - units_GC.amax(1, keepdim=True)
            want_C = (shifted_GC - shifted_GC.exp().sum(1, keepdim=True).function(torch.log)).amax(0)
            assert_within(got_BKC[row, head, those], want_C)
            assert_within(plain_KC[head, those], want_C)
