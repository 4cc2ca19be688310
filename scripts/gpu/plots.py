"""Plots of a result, as SVG; needs matplotlib (extra `bench`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu.table import numbers, words


def _error(figs: list[dict[str, Any]]) -> list[list[float]]:
    return [[f["median"] - f["min"] for f in figs], [f["max"] - f["median"] for f in figs]]


def cost_of_rows(ax: Any, data: dict[str, Any]) -> None:
    """C(rows) of both sides."""
    for side in ("base", "ours"):
        rows = sorted((int(n), fig) for n, fig in data[side].get("rows", {}).items())
        if rows:
            figs = [fig for _, fig in rows]
            ax.errorbar([n for n, _ in rows], [f["median"] for f in figs], yerr=_error(figs), marker="o", capsize=3, label=side)
    ax.set(xlabel="rows of a pass", ylabel="ms", title="one pass over so many rows")
    ax.set_ylim(bottom=0)


def time_of_rounds(ax: Any, data: dict[str, Any]) -> None:
    """Milliseconds a round in every mode."""
    both = {**data["base"], **data["ours"]}
    names = [f"{kind}{n}" for kind in ("chain", "tree") for n in numbers(both, kind, "_round_ms")]
    keys = {"ar": "ar_ms", **{name: f"{name}_round_ms" for name in names}}
    for i, side in enumerate(("base", "ours")):
        at = [(x + 0.4 * i - 0.2, data[side][key]) for x, key in enumerate(keys.values()) if key in data[side]]
        if at:
            figs = [fig for _, fig in at]
            ax.bar([x for x, _ in at], [f["median"] for f in figs], 0.4, yerr=_error(figs), capsize=3, label=side)
    ax.set_xticks(range(len(keys)), keys)
    ax.set(ylabel="ms", title="one round")


def speed_by_length(ax: Any, data: dict[str, Any]) -> None:
    """Tokens a second over what a round accepts."""
    for side in ("base", "ours"):
        for key, lengths in data[side].items():
            if key.startswith("synth_"):
                points = sorted((one["tokens_per_round"]["median"], one["tok_s"]) for one in lengths.values())
                figs = [fig for _, fig in points]
                name = f"{side}, {key.removeprefix('synth_')}"
                ax.errorbar(
                    [x for x, _ in points], [f["median"] for f in figs], yerr=_error(figs), marker="o", capsize=3, label=name
                )
        plain = data[side].get("sessions", {}).get("ar")
        if plain:
            ax.axhline(
                plain["tok_s"]["median"],
                linewidth=0.8,
                color="black",
                linestyle="--" if side == "base" else ":",
                label=f"{side}, plain",
            )
    ax.set(xlabel="tokens a round", ylabel="tokens a second", title="speed over accepted length")
    ax.set_ylim(bottom=0)


PLOTS = {"rows": cost_of_rows, "rounds": time_of_rounds, "speed": speed_by_length}


def write(data: dict[str, Any], folder: Path) -> list[Path]:
    """One SVG each; returns their paths. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gpu"  # the same bytes for the same figures
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in PLOTS.items():
        figure, ax = pyplot.subplots(figsize=(6.4, 4), layout="constrained")
        draw(ax, data)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8)
        ax.grid(alpha=0.3)
        figure.suptitle(f"{data['device']}, {words(data)}", fontsize=9)
        paths.append(folder / f"{name}.svg")
        figure.savefig(paths[-1], metadata={"Date": None})
        pyplot.close(figure)
    return paths
