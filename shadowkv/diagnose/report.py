"""A diagnosis as one document of plain numbers, for JSON, for figures and for tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from shadowkv.diagnose.cosines import BINS, QUANTILES, THRESHOLDS
from shadowkv.diagnose.coverage import LOW_QUANTILE, Covered
from shadowkv.diagnose.measure import Measured, Recommendation
from shadowkv.diagnose.observe import KINDS, LayerFigures, Likeness
from shadowkv.diagnose.recommend import allowed_bytes, full_bytes, python_line
from shadowkv.diagnose.reuse import Reuse
from shadowkv.diagnose.run import Diagnosis
from shadowkv.diagnose.settings import BUDGET_SHARES
from shadowkv.diagnose.spectra import ENERGIES, rank_for, relative_singular_values

FORMAT = 1
"""Goes up when a field changes its meaning."""
DIGITS = 6
"""Significant digits that numbers are kept with."""

Document = dict[str, object]


def document(found: Diagnosis, about: Mapping[str, object]) -> Document:
    """Everything that was measured.

    Args:
        about: what only the caller knows, such as the names of model and text; comes first.
    """
    spec, settings, layers = found.spec, found.settings, found.layers
    whole: Document = {
        "format": FORMAT,
        **about,
        "settings": asdict(settings),
        "geometry": {
            "layers": spec.layers,
            "heads": spec.heads,
            "kv_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "key_dim": spec.kv_rows,
        },
        "spectra": _spectra(layers),
        "similarity": _similarity(found),
        "cosines": _cosines(found),
        "coverage": _coverage(found),
        "reuse": _reuse(found.reuse, settings.budget_tokens),
        "recommendation": _recommendation(found),
    }
    return {name: rounded(value) for name, value in whole.items()}


def rounded(value: object) -> object:
    """Plain lists and numbers of few digits, however deep; tensors become lists."""
    if isinstance(value, Tensor):
        return rounded(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(name): rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return value


def _spectra(layers: Sequence[LayerFigures]) -> Document:
    return {
        "energies": ENERGIES,
        "kinds": {
            kind: {
                "ranks": [[rank_for(one.shares[kind], energy) for energy in ENERGIES] for one in layers],
                "relative_singular_values": [relative_singular_values(one.shares[kind]) for one in layers],
            }
            for kind in KINDS
        },
    }


def _similarity(found: Diagnosis) -> Document:
    own = [one.continuation for one in found.layers]
    texts = {"the prompt's second half": own, **found.others}
    return {
        "rank": found.rank,
        "random": found.rank / found.spec.kv_rows,
        "tokens": found.settings.prompt_tokens // 2,
        "texts": [{"name": name, **_likeness(layers)} for name, layers in texts.items()],
    }


def _likeness(layers: Sequence[Likeness]) -> Document:
    return {
        "plain": [one.plain for one in layers],
        "centred": [one.centred for one in layers],
        "energy_kept": [one.kept for one in layers],
        "energy_of_own": [one.own for one in layers],
    }


def _cosines(found: Diagnosis) -> Document:
    layers = [one.cosines for one in found.layers]
    return {
        "chunk_tokens": found.settings.chunk_tokens,
        "chunks": found.settings.prompt_tokens // found.settings.chunk_tokens,
        "outliers": found.settings.outliers,
        "thresholds": THRESHOLDS,
        "below": [one.below for one in layers],
        "quantile_shares": QUANTILES,
        "quantiles": [one.quantiles for one in layers],
        "histogram_edges": torch.linspace(-1, 1, BINS + 1),
        "histogram": [one.counts.long() for one in layers],
        "outlier_ids": [one.outlier_ids for one in layers],
        "outlier_cosines": [one.outlier_cosines for one in layers],
    }


def _coverage(found: Diagnosis) -> Document:
    def curves(layers: Sequence[Covered]) -> Document:
        return {"mean": [one.mean for one in layers], "low": [one.low for one in layers]}

    return {
        "budgets": BUDGET_SHARES,
        "low_quantile": LOW_QUANTILE,
        "query_tokens": found.settings.query_tokens,
        "always": [float(one.landmarks.always.double().mean()) for one in found.layers],
        "landmarks": curves([one.landmarks for one in found.layers]),
        "oracle": curves([one.oracle for one in found.layers]),
    }


def _reuse(reuse: Reuse, budget_tokens: int) -> Document:
    return {
        "budget_tokens": budget_tokens,
        "method": "selections recorded from one run; hits of all resident sets simulated by replaying them, from the "
        "second step on",
        "rates": {str(multiple): rates for multiple, rates in reuse.rates.items()},
        "counted_by_the_cache": reuse.counted,
    }


def _recommendation(found: Diagnosis) -> Document:
    chosen, spec, tokens = found.recommendation.chosen, found.spec, found.settings.capacity_tokens
    geometry = spec.geometry(found.dtype)
    full = full_bytes(geometry, tokens)
    return {
        "tokens": tokens,
        "allowed_bytes": allowed_bytes(geometry, found.settings),
        "full_attention_bytes": full,
        "python": python_line(chosen.candidate.config),
        "share_of_full_attention": chosen.candidate.device_bytes / full,
        **_measured(chosen),
        **_rounds(found.recommendation),
    }


def _rounds(recommendation: Recommendation) -> Document:
    return {
        "candidates": [_measured(one) for one in recommendation.first],
        "variants": [_measured(one) for one in recommendation.second],
    }


def _measured(one: Measured) -> Document:
    candidate = one.candidate
    return {
        "settings": asdict(candidate.config),
        "device_bytes": candidate.device_bytes,
        "energy_lost": candidate.energy_lost,
        "mass_missed": candidate.mass_missed,
        "natural": one.natural.to_dict(),
        "copy": one.copy.to_dict(),
    }
