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
_LAYER = re.compile(r"layers\.(\d+)\.(?:\w+\.)*?(\w+?)(?:\.weight)?$")
_SETTINGS = {"svg.hashsalt": "mlxinfer", "svg.fonttype": "none", "font.size": 9}


def available() -> bool:
    """Whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def plot_tensors(folder: Path, tensors: Sequence[dict[str, Any]]) -> list[str]:
    """Bits and error of each matrix, by layer and projection; the names of the files."""
    for name, label, value in (
        (BITS, "bits per weight", lambda t: t["num_bytes"] * 8 / t["num_weights"]),
        (ERRORS, "relative rms error", lambda t: t["relative"]),
    ):
        _map_figure(folder / name, label, _by_place(tensors, value))
    return [BITS, ERRORS]


def plot_predicted(folder: Path, points: Sequence[SizePoint]) -> str:
    """Targets, uniform formats, and the last point, which is the model itself."""
    series = ["targets" if "target" in p.label else "uniform" for p in points[:-1]] + ["this one"]
    labels = (p.label.rpartition(" ")[2] if p is not points[-1] else "" for p in points)
    shown = [
        (label, p.bits_per_weight, p.kl, own)
        for label, p, own in zip(labels, points, series, strict=True)
    ]
    plot_sizes(folder / SIZES, shown)
    return SIZES


def plot_positions(folder: Path, checks: Sequence[LogitCheck]) -> str:
    """Means over parts of the contexts."""
    figure, axes = _figure(6, 3)
    for check in checks:
        means = check.kl_by_position
        places = [check.context * (i + 0.5) / len(means) for i in range(len(means))]
        axes.plot(places, means, "o-", markersize=3, label=f"contexts of {check.context}")
    axes.set(xlabel="position", ylabel="KL divergence (nats)", ylim=(0, None))
    axes.legend()
    _save(figure, folder / POSITIONS)
    return POSITIONS


Table = tuple[list[str], list[str], list[list[float]]]  # names of rows, of columns, values


def _by_place(tensors: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> Table:
    """A row for each projection, a column for each layer, and one for what belongs to none."""
    matrices = [t for t in tensors if t["name"].endswith(".weight") and t["num_weights"] > 10_000]
    places: dict[tuple[str, str], list[float]] = {}
    for tensor in matrices or tensors:
        match = _LAYER.search(tensor["name"])
        stem = tensor["name"].removesuffix(".weight").rpartition(".")[2]
        place = (match[2], match[1]) if match else (stem, "-")
        places.setdefault(place, []).append(value(tensor))
    kinds = list(dict.fromkeys(kind for kind, _ in places))
    layers = sorted(
        {layer for _, layer in places}, key=lambda x: (x == "-", int(x) if x != "-" else 0)
    )
    nothing = [math.nan]
    rows = [[max(places.get((kind, layer), nothing)) for layer in layers] for kind in kinds]
    return kinds, layers, rows


def plot_sizes(path: Path, points: Sequence[tuple[str, float, float, str]]) -> None:
    """(label, bits per weight, KL divergence, series) of several recipes."""
    figure, axes = _figure(6, 4)
    for series in dict.fromkeys(point[3] for point in points):
        own = sorted((p for p in points if p[3] == series), key=lambda p: p[1])
        axes.plot([p[1] for p in own], [p[2] for p in own], "o-", label=series)
        for label, size, kl, _ in own:
            axes.annotate(label, (size, kl), fontsize=7, xytext=(4, 4), textcoords="offset points")
    axes.set(xlabel="bits per weight", ylabel="KL divergence (nats)", yscale="log")
    axes.legend(loc="upper right")
    _save(figure, path)


def _map_figure(path: Path, label: str, table: Table) -> None:
    kinds, layers, rows = table
    figure, axes = _figure(max(5, 2.5 + 0.22 * len(layers)), 1.2 + 0.3 * len(kinds))
    image = axes.imshow(rows, aspect="auto", cmap="viridis")
    step = max(1, len(layers) // 16)
    shown = [i for i in range(len(layers)) if not i % step or layers[i] == "-"]
    axes.set(
        xlabel="layer", xticks=shown, xticklabels=[layers[i] for i in shown],
        yticks=range(len(kinds)), yticklabels=kinds,
    )  # fmt: skip
    figure.colorbar(image, label=label)
    _save(figure, path)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.rcParams.update(_SETTINGS)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None})
