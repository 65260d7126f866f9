"""Draws figures of a conversion as SVG: bits and errors by layer and projection, size against
divergence, divergence by position.

Needs matplotlib, which the `plots` extra installs.
"""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .calibration.logits import LogitCheck
from .sizes import SizePoint

BITS, ERRORS, SIZES, POSITIONS = "bits.svg", "errors.svg", "sizes.svg", "positions.svg"
CAPTIONS = {
    BITS: "Bits per weight by layer and projection",
    ERRORS: "Relative error by layer and projection",
    SIZES: "Size against predicted divergence, this model and other ways to convert it",
    POSITIONS: "Divergence by position",
}
_LAYER = re.compile(r"layers\.(\d+)\.(?:self_attn\.|mlp\.)?(.+?)(?:\.weight)?$")
_SETTINGS = {
    "svg.hashsalt": "mlxinfer",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NONE = "none"  # what belongs to no layer
_PARTS = 8  # of a context, that divergences are averaged over
_NUMBERED = 12  # layers up to which cells have numbers in them


def available() -> bool:
    """Whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def plot_tensors(folder: Path, tensors: Sequence[dict[str, Any]]) -> list[str]:
    """Bits and error of each matrix, by layer and projection; the names of the files."""
    for name, value, form in (
        (BITS, lambda t: t["num_bytes"] * 8 / t["num_weights"], "{:.2f}"),
        (ERRORS, lambda t: t["relative"], "{:.2g}"),
    ):
        _map_figure(folder / name, CAPTIONS[name], _by_place(tensors, value), form)
    return [BITS, ERRORS]


def plot_predicted(folder: Path, points: Sequence[SizePoint]) -> str:
    """Targets, uniform formats, and the last point, which is the model itself."""
    series = ["--target-bpw" if "target" in p.label else "one format for all" for p in points[:-1]]
    labels = [p.label.rpartition(" ")[2] for p in points[:-1]]
    shown = [
        (label, p.bits_per_weight, p.kl, own)
        for label, p, own in zip([*labels, ""], points, [*series, "this one"], strict=True)
    ]
    plot_sizes(folder / SIZES, shown, "predicted KL divergence (nats)")
    return SIZES


def plot_positions(folder: Path, checks: Sequence[LogitCheck]) -> str:
    """Means over parts of the contexts, beside each other for each length."""
    figure, panels = _figure(3.2 * len(checks), 2.6, columns=len(checks))
    for check, axes in zip(checks, panels, strict=True):
        means = _fewer(check.kl_by_position)
        edges = [check.context * i / len(means) for i in range(len(means) + 1)]
        axes.stairs(means, edges, fill=True, alpha=0.6)
        axes.axhline(sum(means) / len(means), color="black", linewidth=0.8, linestyle="--")
        axes.set(title=f"contexts of {check.context} tokens", xlabel="position", ylim=(0, None))
        axes.set_xticks(edges[::2])
    panels[0].set_ylabel("KL divergence (nats)")
    _save(figure, folder / POSITIONS)
    return POSITIONS


def _fewer(means: Sequence[float]) -> list[float]:
    """Of at most `_PARTS` parts: of more there are too few tokens each."""
    size = max(1, len(means) // _PARTS)
    parts = [means[start : start + size] for start in range(0, len(means), size)]
    return [sum(part) / len(part) for part in parts]


Table = tuple[list[str], list[str], list[list[float]]]  # names of rows, of columns, values


def _by_place(tensors: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> Table:
    """A row for each projection, a column for each layer, and one for what belongs to none."""
    matrices = [t for t in tensors if t["name"].endswith(".weight") and t["num_weights"] > 10_000]
    places: dict[tuple[str, str], list[float]] = {}
    for tensor in matrices or tensors:
        match = _LAYER.search(tensor["name"])
        stem = tensor["name"].removesuffix(".weight").rpartition(".")[2]
        place = (match[2], match[1]) if match else (stem, _NONE)
        places.setdefault(place, []).append(value(tensor))
    inside = dict.fromkeys(kind for kind, layer in places if layer != _NONE)
    outside = dict.fromkeys(kind for kind, _ in places if kind not in inside)
    kinds = [*sorted(inside, key=_rank), *outside]
    layers = sorted(
        {layer for _, layer in places}, key=lambda x: math.inf if x == _NONE else int(x)
    )
    nothing = [math.nan]
    rows = [[max(places.get((kind, layer), nothing)) for layer in layers] for kind in kinds]
    return kinds, layers, rows


def _rank(kind: str) -> tuple[int, str, int]:
    """Attention as it is computed, then what else there is by its parts."""
    path, _, last = kind.rpartition(".")
    place = _ORDER.index(last) if last in _ORDER else len(_ORDER)
    return (1 if path else 0), path, place


def plot_sizes(
    path: Path,
    points: Sequence[tuple[str, float, float, str]],
    what: str = "KL divergence (nats)",
) -> None:
    """(label, bits per weight, KL divergence, series) of several recipes."""
    figure, (axes,) = _figure(6, 4)
    for series in dict.fromkeys(point[3] for point in points):
        own = sorted((p for p in points if p[3] == series), key=lambda p: p[1])
        line = "*" if len(own) == 1 else "o-"
        size = 14 if len(own) == 1 else 5
        axes.plot([p[1] for p in own], [p[2] for p in own], line, markersize=size, label=series)
        for label, bits, kl, _ in own:
            axes.annotate(label, (bits, kl), fontsize=7, xytext=(5, 4), textcoords="offset points")
    axes.set(xlabel="bits per weight", ylabel=what, yscale="log")
    axes.margins(x=0.08)
    axes.grid(visible=True, which="major", linewidth=0.4, alpha=0.5)
    axes.legend(loc="upper right")
    _save(figure, path)


def _map_figure(path: Path, title: str, table: Table, form: str) -> None:
    kinds, layers, rows = table
    numbered = len(layers) <= _NUMBERED
    width = 0.55 if numbered else 0.2
    figure, (axes,) = _figure(max(4, 2.2 + width * len(layers)), 1.2 + 0.28 * len(kinds))
    axes.set_facecolor("0.95")
    values = [value for row in rows for value in row if not math.isnan(value)]
    wide = min(values) > 0 and max(values) > 8 * min(values)
    image = axes.imshow(rows, aspect="auto", cmap="viridis", norm="log" if wide else "linear")
    step = max(1, len(layers) // 16)
    shown = [i for i in range(len(layers)) if not i % step or layers[i] == _NONE]
    axes.set(
        title=title, xlabel="layer", xticks=shown, xticklabels=[layers[i] for i in shown],
        yticks=range(len(kinds)), yticklabels=kinds,
    )  # fmt: skip
    if numbered:
        _number(axes, image, rows, form)
    else:
        low, high = min(values), max(values)
        steps = [i / 4 for i in range(5)]
        ticks = [low * (high / low) ** x if wide else low + (high - low) * x for x in steps]
        bar = figure.colorbar(image, ticks=ticks)
        bar.ax.minorticks_off()
        bar.ax.set_yticklabels([form.format(tick) for tick in ticks])
    _save(figure, path)


def _number(axes: Any, image: Any, rows: list[list[float]], form: str) -> None:
    """Write each value into its cell, dark on bright cells."""
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            if not math.isnan(value):
                colour = "black" if image.norm(value) > 0.6 else "white"
                text = form.format(value)
                axes.text(x, y, text, ha="center", va="center", fontsize=7, color=colour)


def _figure(width: float, height: float, *, columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure, and its panels beside each other."""
    import matplotlib

    matplotlib.rcParams.update(_SETTINGS)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False)
    return figure, list(panels[0])


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None})
