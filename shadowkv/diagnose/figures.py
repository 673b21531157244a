"""The figures of a diagnosis, drawn from its document alone, so that they can be drawn again from the JSON."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowkv.eval.plotting import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Part = Mapping[str, Any]
"""A document or an object in it."""

DEPTH_COLOURS = "viridis"
MARKERS = "osD^v"


def write_figures(document: Part, directory: Path) -> list[Path]:
    """One PNG for each question; the paths, in the order of the page that explains them.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    return [save_figure(draw(document), directory / f"{name}.png") for name, draw in FIGURES.items()]


def draw_spectra(document: Part) -> "Figure":
    """Singular values over the largest one, a line for each layer."""
    kinds = document["spectra"]["kinds"]
    figure = new_figure(13, 6.4)
    axes = figure.subplots(2, 4, sharey=True).T.flatten()
    for axis, (kind, part) in zip(axes, kinds.items(), strict=True):
        layers = part["relative_singular_values"]
        for layer, line in enumerate(layers):
            axis.plot(range(1, len(line) + 1), line, color=_depth_colour(axis, layer, len(layers)), linewidth=0.8)
        axis.set(title=kind, yscale="log", ylim=(1e-3, 1.3), xlabel="direction", xlim=(1, len(layers[0])))
        axis.grid(alpha=0.3)
    for axis in axes[:2]:
        axis.set_ylabel("singular value / largest")
    _depth_bar(figure, list(axes), document["geometry"]["layers"])
    return _titled(figure, document, "Singular values of all KV heads of a layer together")


def draw_ranks(document: Part) -> "Figure":
    """Directions that keep 90, 95 and 99 % of the energy, by layer."""
    spectra, width = document["spectra"], document["geometry"]["key_dim"]
    figure = new_figure(13, 6.4)
    axes = figure.subplots(2, 4, sharex=True, sharey=True).T.flatten()
    for axis, (kind, part) in zip(axes, spectra["kinds"].items(), strict=True):
        for place, energy in enumerate(spectra["energies"]):
            axis.plot([ranks[place] for ranks in part["ranks"]], marker=".", label=f"{energy:.0%} of the energy")
        axis.set(title=kind, ylim=(0, width * 1.03))
        axis.grid(alpha=0.3)
        _layer_axis(axis, document)
    for axis in axes[:2]:
        axis.set_ylabel(f"directions of {width}")
    axes[0].legend(loc="upper left")
    return _titled(figure, document, "How many directions hold the energy of a layer")


def draw_similarity(document: Part) -> "Figure":
    """How alike the subspaces of the first half and of other keys are, and what the first half's basis keeps."""
    part = document["similarity"]
    figure = new_figure(13, 4.6)
    axes = figure.subplots(1, 3, sharey=True)
    titles = {
        "plain": "keys as they are",
        "centred": "keys about their mean",
        "energy_kept": "energy about the mean that\nthe first half's basis keeps",
    }
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for text, marker in zip(part["texts"], MARKERS * len(part["texts"]), strict=False):
            axis.plot(text[name], marker=marker, markersize=3, label=text["name"])
        axis.set(title=title, ylim=(0, 1.03))
        axis.grid(alpha=0.3)
        _layer_axis(axis, document)
    for axis in axes[:2]:
        axis.axhline(part["random"], color="grey", linestyle="--", label="random subspaces, on average")
    axes[0].set_ylabel(r"similarity, $\|U_a^T U_b\|_F^2 / r$")
    axes[2].set_ylabel("share")
    axes[2].tick_params(labelleft=True)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    title = f"Pre-RoPE key subspaces of rank {part['rank']} against the prompt's first {part['tokens']:,} tokens"
    return _titled(figure, document, title)


def draw_cosines(document: Part) -> "Figure":
    """The lowest cosine of every chunk, sorted; and where the outliers stand."""
    part = document["cosines"]
    figure = new_figure(13, 4.8)
    sorted_axis, place_axis = figure.subplots(1, 2)
    layers = part["quantiles"]
    # A logarithmic axis has no place for 0 %: the very lowest is that of one chunk.
    shares = [max(share, 1 / part["chunks"]) * 100 for share in part["quantile_shares"]]
    lowest = 0.0
    for layer, heads in enumerate(layers):
        line = [sum(column) / len(heads) for column in zip(*heads, strict=True)]
        lowest = min(lowest, *line)
        sorted_axis.plot(shares, line, color=_depth_colour(sorted_axis, layer, len(layers)), linewidth=0.9)
    outliers = 100 * part["outliers"] / part["chunks"]
    sorted_axis.axvline(outliers, color="crimson", linestyle="--", label=f"the {part['outliers']} outlier chunks")
    sorted_axis.set(title="sorted, mean over KV heads", xscale="log", xlim=(shares[0], 100), ylabel="lowest cosine")
    sorted_axis.set_ylim(lowest - 0.05, 1.03)
    sorted_axis.set_xlabel("chunks, % (lowest cosines first)")
    sorted_axis.grid(alpha=0.3)
    sorted_axis.legend(loc="lower right")
    _depth_bar(figure, [sorted_axis], len(layers))
    places, depths, cosines = [], [], []
    for layer, heads in enumerate(part["outlier_ids"]):
        for head, ids in enumerate(heads):
            places += [chunk * part["chunk_tokens"] for chunk in ids]
            depths += [layer] * len(ids)
            cosines += part["outlier_cosines"][layer][head]
    dots = place_axis.scatter(places, depths, c=cosines, s=9, cmap="plasma", vmin=-1, vmax=1)
    place_axis.set(title="outlier chunks of all KV heads", xlabel="position in the prompt, tokens", ylabel="layer")
    figure.colorbar(dots, ax=place_axis, label="lowest cosine")
    title = f"Lowest cosine between a chunk's mean and its {part['chunk_tokens']} post-RoPE keys"
    return _titled(figure, document, title)


def draw_coverage(document: Part) -> "Figure":
    """Attention mass by budget, and what landmarks miss in each layer."""
    part = document["coverage"]
    budgets = [100 * share for share in part["budgets"]]
    figure = new_figure(13, 4.8)
    mass_axis, missed_axis = figure.subplots(1, 2)
    for name, colour in (("oracle", "tab:green"), ("landmarks", "tab:blue")):
        for which, style, label in (("mean", "-", "mean"), ("low", ":", f"{part['low_quantile']:.0%} quantile")):
            layers = part[name][which]
            line = [100 * sum(column) / len(layers) for column in zip(*layers, strict=True)]
            mass_axis.plot(budgets, line, style, color=colour, marker=".", label=f"{name}, {label}")
    always = part["always"]
    mass_axis.axhline(100 * sum(always) / len(always), color="grey", linestyle="--", label="without a budget")
    mass_axis.set(title="mean over layers", xscale="log", ylim=(0, 103), ylabel="attention covered, %")
    mass_axis.legend(loc="lower right")
    mass_axis.grid(alpha=0.3)
    missed = [[100 * (1 - mean) for mean in layer] for layer in part["landmarks"]["mean"]]
    image = missed_axis.imshow(missed, aspect="auto", cmap="magma_r", vmin=0, interpolation="nearest")
    missed_axis.set_xticks(range(len(budgets)), [f"{budget:.3g}" for budget in budgets])
    missed_axis.set(title="missed by landmarks, mean over heads and positions", ylabel="layer")
    figure.colorbar(image, ax=missed_axis, label="attention missed, %")
    for axis in (mass_axis, missed_axis):
        axis.set_xlabel("budget, % of the prompt")
    mass_axis.set_xticks(budgets, [f"{budget:.3g}" for budget in budgets])
    mass_axis.minorticks_off()
    return _titled(figure, document, "Attention covered by the budget, the outliers and the recent tokens")


def draw_reuse(document: Part) -> "Figure":
    """Hit rates by step and by layer, for several resident sets."""
    part = document["reuse"]
    figure = new_figure(13, 4.4)
    step_axis, layer_axis = figure.subplots(1, 2, sharey=True)
    for multiple, rates in part["rates"].items():
        by_step = [100 * sum(layers) / len(layers) for layers in rates]
        by_layer = [100 * sum(column) / len(rates) for column in zip(*rates, strict=True)]
        label = f"{int(multiple) * part['budget_tokens']:,} tokens resident ({multiple}x the budget)"
        step_axis.plot(range(2, len(rates) + 2), by_step, marker=".", label=label)
        layer_axis.plot(by_layer, marker=".", label=label)
    step_axis.set(title="by step, mean over layers", xlabel="step", ylabel="selected chunks that are resident, %")
    layer_axis.set(title="by layer, mean over steps")
    _layer_axis(layer_axis, document)
    for axis in (step_axis, layer_axis):
        axis.set_ylim(0, 103)
        axis.grid(alpha=0.3)
    figure.legend(*step_axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    title = f"Hit rates at a budget of {part['budget_tokens']:,} tokens, replayed from one run's selections"
    return _titled(figure, document, title)


def draw_recommendation(document: Part) -> "Figure":
    """The ranks, and what was measured of the candidates and of the variants of the best one."""
    part, width = document["recommendation"], document["geometry"]["key_dim"]
    figure = new_figure(13, 4.8)
    rank_axis, *axes = figure.subplots(1, 3, width_ratios=(1.1, 1, 1))
    ranks = part["settings"]["rank"]
    rank_axis.bar(range(len(ranks)), ranks, color="tab:blue")
    rank_axis.set(title="recommended rank by layer", ylabel=f"directions of {width}")
    _layer_axis(rank_axis, document)
    _measured(axes[0], part["candidates"], _candidate_name, "candidates, where they were chosen")
    _measured(axes[1], part["variants"], _variant_name, "the best one, on the next tokens")
    axes[0].legend()
    kept = part["share_of_full_attention"]
    return _titled(figure, document, f"Recommendation for {kept:.1%} of full attention's memory")


def _measured(axis: "Axes", rows: Sequence[Part], name: Callable[[Part], str], title: str) -> None:
    for passage, offset in (("natural", -0.1), ("copy", 0.1)):
        places = [place + offset for place in range(len(rows))]
        means = [row[passage]["kl"]["mean"] for row in rows]
        reach = [
            [mean - row[passage]["kl"]["low"] for mean, row in zip(means, rows, strict=True)],
            [row[passage]["kl"]["high"] - mean for mean, row in zip(means, rows, strict=True)],
        ]
        axis.errorbar(places, means, reach, fmt="o", markersize=4, capsize=3, label=f"{passage} passage")
    axis.set_xticks(range(len(rows)), [name(row) for row in rows], fontsize=8)
    axis.set(title=title, ylabel="KL to full attention, nats (95 %)", xlim=(-0.5, len(rows) - 0.5))
    axis.set_yscale("log", nonpositive="clip")
    axis.grid(alpha=0.3, which="both")


def _candidate_name(row: Part) -> str:
    settings = row["settings"]
    ranks = settings["rank"]
    return (
        f"rank {sum(ranks) / len(ranks):.0f}\nbudget {settings['budget_tokens']}\n"
        f"chunk {settings['chunk_tokens']}\noutliers {settings['outlier_chunks']}"
    )


def _variant_name(row: Part) -> str:
    settings = row["settings"]
    kib = (row["natural"]["fetched_bytes_per_step"] + row["copy"]["fetched_bytes_per_step"]) / 2 / 1024
    return f"{settings['budget_tokens']} of {settings['resident_tokens']}\nchosen a step\n{kib:,.0f} KiB fetched"


def _layer_axis(axis: "Axes", document: Part) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("layer")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlim(-0.6, document["geometry"]["layers"] - 0.4)


def _depth_colour(axis: "Axes", layer: int, layers: int) -> Any:
    from matplotlib import colormaps

    return colormaps[DEPTH_COLOURS](layer / max(layers - 1, 1))


def _depth_bar(figure: "Figure", axes: "list[Axes]", layers: int) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    figure.colorbar(ScalarMappable(Normalize(0, layers - 1), DEPTH_COLOURS), ax=axes, label="layer")


def _titled(figure: "Figure", document: Part, title: str) -> "Figure":
    about = f"{document['model']} in {document['dtype']}, {document['settings']['prompt_tokens']:,} tokens"
    figure.suptitle(f"{title}\n{about}")
    return figure


FIGURES: dict[str, Callable[[Part], "Figure"]] = {
    "spectra": draw_spectra,
    "ranks": draw_ranks,
    "similarity": draw_similarity,
    "cosines": draw_cosines,
    "coverage": draw_coverage,
    "reuse": draw_reuse,
    "recommendation": draw_recommendation,
}
