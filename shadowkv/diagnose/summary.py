"""A diagnosis in a few cells: what a terminal shows of its document."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shadowkv.diagnose.observe import POST_CENTRED, PRE_CENTRED, VALUES_CENTRED

Part = Mapping[str, Any]

LAYER_COLUMNS = (
    "layer",
    "keys: rank for 90/95/99 %",
    "after RoPE: 95 %",
    "values: 95 %",
    "similar: 2nd half",
    "other texts",
    "chunks under 0.5",
    "hits, 1x/2x/4x",
    "covered",
    "by the oracle",
    "recommended rank",
)
CANDIDATE_COLUMNS = (
    "budget",
    "resident",
    "chunk",
    "outliers",
    "mean rank",
    "energy lost",
    "attention missed",
    "KL natural",
    "KL copy",
    "top-1 natural",
    "top-1 copy",
    "hits",
    "fetched a step",
)
LOW_COSINE = 0.5


def layer_rows(document: Part) -> list[list[str]]:
    """One row for each layer, and the mean of all in the last."""
    kinds, energies = document["spectra"]["kinds"], document["spectra"]["energies"]
    own, *others = (text["centred"] for text in document["similarity"]["texts"])
    coverage, cosines, rates = document["coverage"], document["cosines"], document["reuse"]["rates"]
    at = _nearest(coverage["budgets"], document["settings"]["budget_share"])
    low, middle = cosines["thresholds"].index(LOW_COSINE), energies.index(0.95)
    layers: list[list[list[float]]] = []
    for layer in range(document["geometry"]["layers"]):
        layers.append(
            [
                kinds[PRE_CENTRED]["ranks"][layer],
                [kinds[POST_CENTRED]["ranks"][layer][middle]],
                [kinds[VALUES_CENTRED]["ranks"][layer][middle]],
                [own[layer]],
                [_mean(other[layer] for other in others)] if others else [],
                [_mean(head[low] for head in cosines["below"][layer])],
                [_mean(step[layer] for step in steps) for steps in rates.values()],
                [coverage["landmarks"]["mean"][layer][at]],
                [coverage["oracle"]["mean"][layer][at]],
                [document["recommendation"]["settings"]["rank"][layer]],
            ]
        )
    forms = (".0f", ".0f", ".0f", ".2f", ".2f", ".2%", ".0%", ".1%", ".1%", ".0f")
    mean = [[_mean(parts) for parts in zip(*cells, strict=True)] for cells in zip(*layers, strict=True)]
    names = [*(str(layer) for layer in range(len(layers))), "mean"]
    return [
        [name, *("/".join(f"{x:{form}}" for x in cell) for cell, form in zip(cells, forms, strict=True))]
        for name, cells in zip(names, [*layers, mean], strict=True)
    ]


def candidate_rows(measured: Sequence[Part]) -> list[list[str]]:
    """One row for each of the settings that were measured."""
    rows = []
    for one in measured:
        settings, natural, copy = one["settings"], one["natural"], one["copy"]
        fetched = (natural["fetched_bytes_per_step"] + copy["fetched_bytes_per_step"]) / 2
        rows.append(
            [
                f"{settings['budget_tokens']:,}",
                f"{settings['resident_tokens']:,}",
                str(settings["chunk_tokens"]),
                str(settings["outlier_chunks"]),
                f"{_mean(settings['rank']):.1f}",
                f"{one['energy_lost']:.1%}",
                f"{one['mass_missed']:.1%}",
                *(f"{passage['kl']['mean']:.4f}" for passage in (natural, copy)),
                *(f"{passage['top1']['mean']:.3f}" for passage in (natural, copy)),
                f"{_mean((natural['hit_rate'], copy['hit_rate'])):.1%}",
                f"{fetched / 1024:,.0f} KiB",
            ]
        )
    return rows


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _nearest(budgets: Sequence[float], share: float) -> int:
    """The place of the measured budget that is nearest to a share."""
    return min(range(len(budgets)), key=lambda place: abs(budgets[place] - share))
