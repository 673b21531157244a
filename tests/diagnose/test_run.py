"""A whole diagnosis of a tiny model: against the cache's own counts, and against figures made the naive way."""

import json
import math
from functools import cache

import pytest
import torch

from shadowkv.cache.shadowkv_layout import sequence_price
from shadowkv.diagnose import run
from shadowkv.diagnose.coverage import Split, context_chunks
from shadowkv.diagnose.measure import tokens_needed
from shadowkv.diagnose.observe import PRE_CENTRED, Observer, look_at
from shadowkv.diagnose.report import document, rounded
from shadowkv.diagnose.run import Diagnosis, choose_others, diagnose
from shadowkv.diagnose.settings import DiagnoseSettings
from shadowkv.errors import ConfigError, NumericsError, RequestError
from tests.diagnose.test_arithmetic import mass_lost
from tests.engine.tiny import prompt, tiny_decoder, tiny_spec

SETTINGS = DiagnoseSettings(prompt_tokens=512, steps=6, query_tokens=16, keep_share=0.7, budget_share=0.05)
TEXT = prompt(1100)


def unseen(stage: str, done: int, total: int) -> None:
    pass


@cache
def found() -> Diagnosis:
    decoder = tiny_decoder(torch.device("cpu"))
    return diagnose(decoder, TEXT, choose_others(TEXT, {"itself": TEXT}, SETTINGS), SETTINGS, unseen)


def test_the_cache_counts_the_hits_that_are_replayed():
    reuse = found().reuse
    rates = reuse.rates[1]
    assert rates.shape == (SETTINGS.steps - 1, 2)
    assert reuse.budget_chunks == SETTINGS.budget_tokens // 8
    # The cache's own count is over all steps, the first of which finds nothing.
    assert (rates.sum(0) / SETTINGS.steps).tolist() == pytest.approx(reuse.counted)
    assert 0 < reuse.mean(1) < reuse.mean(2) < reuse.mean(4) < 1


def test_a_text_is_like_itself():
    """Computed alone, its keys are rounded otherwise; what that turns subspaces by (10^-3 at most) counts squared."""
    for layer, likeness in enumerate(found().others["itself"]):
        assert (likeness.plain, likeness.centred) == pytest.approx((1, 1), abs=1e-5)
        assert likeness.kept == pytest.approx(likeness.own, abs=1e-5)
        own = found().layers[layer].continuation
        assert own.kept <= own.own + 1e-9


def test_the_prompt_is_seen_as_it_is():
    """Coverage by all tokens' exact attention, and the spectrum by a singular value decomposition."""
    decoder = tiny_decoder(torch.device("cpu"))
    kept: dict[int, tuple[torch.Tensor, ...]] = {}

    class Keeper(Observer):
        def take_layer(self, layer, seq, *tensors):
            kept[layer] = tuple(tensor.clone() for tensor in tensors)
            super().take_layer(layer, seq, *tensors)

    split = Split(8, 2)
    keeper = Keeper(decoder, rank=8, query_tokens=16, split=split, budgets={split: [4]})
    look_at(decoder, TEXT[:512], keeper, None, lambda done, total: None)
    k_pre, k, _, q = kept[1]
    rows = k_pre.flatten(1).double()
    centred = rows - rows.mean(0)
    singular = torch.linalg.svdvals(centred)
    shares = keeper.layers[1].shares[PRE_CENTRED]
    # Both in float64: sums over the tokens, of numbers whose mean is not 0, and a decomposition of the rows' width.
    lost = (
        2
        * (512 + rows.shape[1])
        * torch.finfo(torch.float64).eps
        * float(rows.norm() / (rows - rows.mean(0)).norm()) ** 2
    )
    assert shares.tolist() == pytest.approx((singular**2 / singular.square().sum()).tolist(), rel=0, abs=lost)
    # The oracle by hand: query head 3 shares KV head 1 with query head 2.
    logits = q.reshape(2, 2, 16, 16) @ k.mT[:, None] / math.sqrt(16)
    later = torch.arange(512) > torch.arange(496, 512)[:, None]
    weights = logits.masked_fill(later, -torch.inf).softmax(-1)
    chunks = context_chunks(512, 16, 8)
    mass = weights[..., : chunks * 8].reshape(2, 2, 16, chunks, 8).sum(-1)
    for head, ids in enumerate(keeper.layers[1].cosines.outlier_ids):
        mass[head][..., ids[ids < chunks]] = 0
    rest = 1 - mass.sum(-1)
    order = mass.sum(1).topk(4, dim=-1).indices
    expected = rest + mass.gather(-1, order[:, None].expand(-1, 2, -1, -1)).sum(-1)
    assert keeper.layers[1].oracle.mean == pytest.approx([float(expected.mean())], rel=0, abs=2 * mass_lost(q, k))


def test_what_is_recommended_fits_and_was_measured_on_other_tokens():
    diagnosis = found()
    recommendation, chosen = diagnosis.recommendation, diagnosis.recommendation.chosen
    geometry = diagnosis.spec.geometry(diagnosis.dtype)
    price = sequence_price(geometry, chosen.candidate.config, SETTINGS.capacity_tokens)
    assert price.device_bytes == chosen.candidate.device_bytes
    assert price.device_bytes <= 0.7 * 2 * 518 * 32 * 2 * 4
    assert chosen in recommendation.second
    assert chosen.kl <= recommendation.second[0].kl_high
    best = min(recommendation.first, key=lambda one: one.kl).candidate
    assert recommendation.second[0].candidate == best
    assert {one.candidate.device_bytes for one in recommendation.second} == {best.device_bytes}
    for one in (*recommendation.first, *recommendation.second):
        assert (one.natural.device_bytes, one.copy.device_bytes) == (one.candidate.device_bytes,) * 2
        assert one.natural.hit_rate is not None  # it selected: nothing fits whole
    again = next(one for one in recommendation.first if one.candidate == best)
    assert again.natural.kl.mean != recommendation.second[0].natural.kl.mean


def test_the_document_is_stable_and_plain():
    about = {"model": "tiny", "dtype": "float32"}
    once = json.dumps(document(found(), about), allow_nan=False)
    decoder = tiny_decoder(torch.device("cpu"))
    again = diagnose(decoder, TEXT, choose_others(TEXT, {"itself": TEXT}, SETTINGS), SETTINGS, unseen)
    assert once == json.dumps(document(again, about), allow_nan=False)
    read = json.loads(once)
    assert list(read)[:4] == ["format", "model", "dtype", "settings"]
    assert len(read["coverage"]["oracle"]["mean"]) == read["geometry"]["layers"] == 2
    assert rounded((1 / 3, torch.ones(2), {"a": 7})) == [0.333333, [1.0, 1.0], {"a": 7}]


def test_other_parts_of_the_text_stand_for_other_texts():
    used = tokens_needed(SETTINGS)
    text = list(range(used + 700))
    others = choose_others(text, {}, SETTINGS)
    assert list(others) == [f"the text from token {start:,} on" for start in (used + 222, used + 444)]
    assert [list(ids) for ids in others.values()] == [text[s : s + 256] for s in (used + 222, used + 444)]
    assert choose_others(text[: used + 255], {}, SETTINGS) == {}
    assert choose_others(text[:used], {"given": range(300)}, SETTINGS) == {"given": range(256)}


def test_texts_that_are_too_short_are_refused():
    with pytest.raises(RequestError, match="the text has 524 tokens and 525 are needed"):
        choose_others(range(524), {}, SETTINGS)
    with pytest.raises(RequestError, match="given has 255 tokens and 256 are needed"):
        choose_others(range(600), {"given": range(255)}, SETTINGS)
    with pytest.raises(RequestError, match="too short to repeat 300"):
        choose_others(range(2000), {}, DiagnoseSettings(prompt_tokens=512, steps=300))


def test_what_cannot_be_done_is_refused_before_anything_is_computed():
    spec, dtype = tiny_spec(512), torch.float32
    with pytest.raises(RequestError, match="512 tokens of prompt and 6 steps; tiny takes 512"):
        run.check(spec, dtype, SETTINGS)
    with pytest.raises(ConfigError, match="give --keep"):
        run.check(tiny_spec(), dtype, DiagnoseSettings(prompt_tokens=512, keep_share=0.05))


def test_bad_numbers_name_their_layer():
    decoder = tiny_decoder(torch.device("cpu"))
    decoder.layers[1].qkv[decoder.spec.q_rows] = torch.nan
    with pytest.raises(NumericsError, match="layer 1"):
        diagnose(decoder, TEXT, {}, SETTINGS, unseen)
