"""Draws figures of a conversion as SVG: bits by layer, error by tensor, size against divergence.

Needs matplotlib, which the `plots` extra installs.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BITS, ERRORS, SIZES = "bits.svg", "errors.svg", "sizes.svg"
_LAYER = re.compile(r"layers\.(\d+)\.(?:\w+\.)*?(\w+?)(?:\.weight)?$")
_SETTINGS = {"svg.hashsalt": "mlxinfer", "svg.fonttype": "none", "font.size": 9}


def available() -> bool:
    """Whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def plot_tensors(folder: Path, tensors: Sequence[dict[str, Any]]) -> list[str]:
    """Bits of each layer's matrices, and the error of each tensor; the names of the files."""
    import numpy as np

    places = {t["name"]: found for t in tensors if (found := _LAYER.search(t["name"]))}
    matrices = [t for t in tensors if t["name"] in places and t["num_weights"] > 10_000]
    matrices = matrices or [t for t in tensors if t["name"] in places]
    kinds = list(dict.fromkeys(places[t["name"]][2] for t in matrices))
    layers = 1 + max((int(places[t["name"]][1]) for t in matrices), default=0)
    bits = np.full((len(kinds), layers), np.nan)
    for tensor in matrices:
        match = places[tensor["name"]]
        row, column = kinds.index(match[2]), int(match[1])
        bits[row, column] = tensor["num_bytes"] * 8 / tensor["num_weights"]
    _bits_figure(folder / BITS, bits, kinds)
    _errors_figure(folder / ERRORS, [t for t in tensors if t["relative"] > 0])
    return [BITS, ERRORS]


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


def _bits_figure(path: Path, bits: Any, kinds: list[str]) -> None:
    figure, axes = _figure(7, 1 + 0.3 * len(kinds))
    image = axes.imshow(bits, aspect="auto", cmap="viridis")
    axes.set(xlabel="layer", yticks=range(len(kinds)), yticklabels=kinds)
    figure.colorbar(image, label="bits per weight")
    _save(figure, path)


def _errors_figure(path: Path, tensors: Sequence[dict[str, Any]]) -> None:
    figure, axes = _figure(7, 3)
    axes.plot([t["relative"] for t in tensors], ".", markersize=4)
    axes.set(
        xlabel="tensor, in the order of the files", ylabel="relative rms error", ylim=(0, None)
    )
    _save(figure, path)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.rcParams.update(_SETTINGS)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None})
