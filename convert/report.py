"""The report of a conversion: report.json, and the model card (README.md) made from it.

`passed` is the verdict of the logit comparison. With
matplotlib, which the `plots` extra installs, the card has a figure: bits and error of each matrix
by layer and projection.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..memory import human_bytes
from .calibration.logits import LogitCheck
from .files import write_file
from .plan import ConversionPlan, PlannedTensor
from .read import SourceModel
from .verify import Entry


@dataclass(slots=True)
class ConversionReport:
    """One conversion."""

    source: str
    source_format: str
    recipe: str
    bits_per_weight: float
    num_bytes: int
    num_weights: int
    tensors: list[Entry]
    by_source: list[dict[str, Any]]  # what each storage type of the source became
    tensors_compared: bool = True  # False: errors are those of a sample, as writing found them
    notes: list[str] = field(default_factory=list)
    logits: list[LogitCheck] = field(default_factory=list)
    loads: bool = True  # False: it has a tokenizer that cannot be loaded here

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.logits)

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(tensor["status"] for tensor in self.tensors))

    @property
    def worst(self) -> dict[str, Any] | None:
        return max(self.tensors, key=lambda t: t["relative"], default=None)

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self) | {"passed": self.passed, "counts": self.counts}
        fields["bits_per_weight"] = round(self.bits_per_weight, 4)
        fields["logits"] = [asdict(check) | {"passed": check.passed} for check in self.logits]
        del fields["loads"]
        return fields


def make_report(
    source: SourceModel, plan: ConversionPlan, tensors: list[dict[str, Any]], *, compared: bool
) -> ConversionReport:
    """Without logits, which come last."""
    return ConversionReport(
        source=source.label,
        source_format=source.format,
        recipe=plan.recipe.name,
        bits_per_weight=plan.bits_per_weight,
        num_bytes=plan.num_bytes,
        num_weights=plan.num_weights,
        tensors=tensors,
        by_source=by_source(plan, tensors),
        tensors_compared=compared,
        notes=list(source.notes),
    )


def by_source(plan: ConversionPlan, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each type in the source and format in the output: bits before and after, and the error.

    Returns:
        Rows with `stored`, `format`, `count`, `source_bits` and `bits` per weight, and `relative`,
        the root mean square of the tensors' relative errors, each weighted by its size.
    """
    groups: dict[tuple[str, str], list[PlannedTensor]] = {}
    for tensor in plan.tensors:
        groups.setdefault((tensor.output.stored, tensor.format), []).append(tensor)
    relative = {entry["name"]: entry["relative"] for entry in entries}
    rows = []
    for (stored, form), tensors in groups.items():
        weights = sum(t.output.num_weights for t in tensors)
        squares = sum(t.output.num_weights * relative[t.output.name] ** 2 for t in tensors)
        rows.append(
            {
                "stored": stored,
                "source_bits": round(sum(t.output.stored_bytes for t in tensors) * 8 / weights, 3),
                "format": form,
                "bits": round(sum(t.num_bytes for t in tensors) * 8 / weights, 3),
                "count": len(tensors),
                "relative": float(f"{(squares / weights) ** 0.5:.4g}"),
            }
        )
    return rows


FOLDER = "FOLDER"  # in a card's commands
FIGURE, CAPTION = "conversion.svg", "Bits per weight and relative error by layer and projection"
NO_FIGURE = 'The figure needs matplotlib: pip install -e ".[plots]" in a checkout of mlxinfer'
_WORST = 5


def write_card(folder: Path, report: ConversionReport, source: SourceModel, *, draw: bool) -> None:
    """Write README.md and, with `draw` and matplotlib, its figure."""
    drawn = draw and available()
    if drawn:
        draw_tensors(folder / FIGURE, report.tensors)
    elif draw:
        report.notes.append(NO_FIGURE)
    figure = [f"![{CAPTION}]({FIGURE})\n"] if drawn else []
    text = "\n".join([*_front(report, source), *_body(report), *figure])
    write_file(folder / "README.md", text.encode())


_OURS = (
    "library_name", "tags", "base_model", "base_model_relation",
    "license", "license_name", "license_link",
)  # fmt: skip


def _front(report: ConversionReport, source: SourceModel) -> list[str]:
    """The lines in front of the card, which the hub reads: the source's, made true for this."""
    origin = source.origin
    stated = origin.card.get("tags")
    tags = [str(tag) for tag in stated] if isinstance(stated, list) else []
    task = {} if "pipeline_tag" in origin.card else {"pipeline_tag": "text-generation"}
    lines = [
        "---",
        "library_name: mlx",
        *_yaml(task),
        *_yaml({"tags": list(dict.fromkeys(["mlx", *tags]))}),
    ]
    base = origin.repo or origin.base_model
    if base is not None:
        lines += [f"base_model: {base}", "base_model_relation: quantized"]
    terms = source.config.get("license")
    fields = {
        "license": origin.license or (terms if isinstance(terms, str) else None),
        "license_name": origin.license_name,
        "license_link": origin.license_link,
    }
    lines += [f"{key}: {value}" for key, value in fields.items() if value is not None]
    lines += _yaml({key: value for key, value in origin.card.items() if key not in _OURS})
    return [*lines, "---", ""]


def _yaml(fields: Mapping[str, Any]) -> list[str]:
    import yaml  # type: ignore[import-untyped]

    if not fields:
        return []
    text: str = yaml.safe_dump(dict(fields), sort_keys=False, allow_unicode=True)
    return text.splitlines()


def _body(report: ConversionReport) -> list[str]:
    lines = [
        f"# {Path(report.source).name}, {report.recipe}",
        "",
        f"Converted from {report.source_format} by mlxinfer, for MLX: "
        f"{report.bits_per_weight:.3f} bits per weight, {human_bytes(report.num_bytes)}.",
        "",
        "```sh",
        f"mlxinfer run -m {FOLDER} 'Why is the sky blue?'",
        f"mlx_lm.generate --model {FOLDER} --prompt 'Why is the sky blue?'",
        "```",
        "",
        "| tensors | |",
        "|---|---|",
        *(f"| {status} | {count} |" for status, count in report.counts.items()),
        "",
    ]
    lines += [
        "| in the source | bits | here | bits | tensors | relative error |",
        "|---|---|---|---|---|---|",
        *(
            f"| {r['stored']} | {r['source_bits']:.2f} | {r['format']} | {r['bits']:.2f} "
            f"| {r['count']} | {r['relative']:.4f} |"
            for r in report.by_source
        ),
        "",
    ]
    if report.logits:
        lines += _logits(report.logits)
    lossy = sorted(report.tensors, key=lambda t: -t["relative"])[:_WORST]
    if lossy and lossy[0]["relative"] > 0:
        lines += ["Largest relative errors:", "", "| tensor | format | rms |", "|---|---|---|"]
        lines += [_row(tensor) for tensor in lossy]
        lines.append("")
    return lines + [f"{note}\n" for note in report.notes]


def _logits(checks: list[LogitCheck]) -> list[str]:
    return [
        "Logits against the source's, layer by layer in full precision:",
        "",
        "| context | KL mean | KL p99 | same top-1 | where clear | perplexity | of the source |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {c.context} | {c.kl_mean:.5f} | {c.kl_p99:.5f} | {c.top1:.2%} "
            f"| {c.clear_top1:.2%} | {c.perplexity:.3f} | {c.source_perplexity:.3f} |"
            for c in checks
        ),
        "",
    ]


def _row(tensor: dict[str, Any]) -> str:
    return f"| {tensor['name']} | {tensor['format']} | {tensor['relative']:.4f} |"


# -- the figure ---------------------------------------------------------------------------------

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
_NUMBERED = 12  # layers up to which cells have numbers in them

Place = tuple[str, str]  # projection, layer


def available() -> bool:
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def draw_tensors(path: Path, tensors: list[dict[str, Any]]) -> None:
    """Draw bits and relative error of each matrix, by layer and projection, as SVG."""
    import matplotlib

    matplotlib.rcParams.update(_SETTINGS)
    from matplotlib.figure import Figure

    matrices = [t for t in tensors if t["name"].endswith(".weight") and t["num_weights"] > 10_000]
    placed = [(place_of(tensor["name"]), tensor) for tensor in matrices or tensors]
    inside = {kind for (kind, layer), _ in placed if layer != _NONE}
    kinds = sorted({kind for (kind, _), _ in placed}, key=lambda kind: _rank(kind, kind in inside))
    layers = sorted(
        {layer for (_, layer), _ in placed}, key=lambda x: math.inf if x == _NONE else int(x)
    )
    width = 2.2 + (0.55 if len(layers) <= _NUMBERED else 0.2) * len(layers)
    figure = Figure(figsize=(2 * max(4, width), 1.2 + 0.28 * len(kinds)), layout="constrained")
    panels = figure.subplots(1, 2, squeeze=False)[0]
    bits = {place: t["num_bytes"] * 8 / t["num_weights"] for place, t in placed}
    errors = {place: t["relative"] for place, t in placed}
    _map(figure, panels[0], "bits per weight", bits, (kinds, layers), "{:.2f}")
    _map(figure, panels[1], "relative error", errors, (kinds, layers), "{:.2g}")
    figure.savefig(path, format="svg", metadata={"Date": None})


def place_of(name: str) -> Place:
    match = _LAYER.search(name)
    stem = name.removesuffix(".weight").rpartition(".")[2]
    return (match[2], match[1]) if match else (stem, _NONE)


def _rank(kind: str, inside: bool) -> tuple[bool, bool, str, int]:
    """Attention as it is computed, then what else a layer has by its parts, then the ends."""
    path, _, last = kind.rpartition(".")
    place = _ORDER.index(last) if last in _ORDER else len(_ORDER)
    return not inside, bool(path), path, place


def _map(
    figure: Any,
    axes: Any,
    title: str,
    values: dict[Place, float],
    names: tuple[list[str], list[str]],
    form: str,
) -> None:
    """A row for each projection, a column for each layer, and one for what belongs to none."""
    kinds, layers = names
    rows = [[values.get((kind, layer), math.nan) for layer in layers] for kind in kinds]
    low, high = min(values.values()), max(values.values())
    wide = low > 0 and high > 8 * low
    axes.set_facecolor("0.95")
    image = axes.imshow(rows, aspect="auto", cmap="viridis", norm="log" if wide else "linear")
    step = max(1, len(layers) // 16)
    shown = [i for i in range(len(layers)) if not i % step or layers[i] == _NONE]
    axes.set(
        title=title, xlabel="layer", xticks=shown, xticklabels=[layers[i] for i in shown],
        yticks=range(len(kinds)), yticklabels=kinds,
    )  # fmt: skip
    if len(layers) > _NUMBERED:
        steps = [i / 4 for i in range(5)]
        ticks = [low * (high / low) ** x if wide else low + (high - low) * x for x in steps]
        bar = figure.colorbar(image, ax=axes, ticks=ticks)
        bar.ax.minorticks_off()
        bar.ax.set_yticklabels([form.format(tick) for tick in ticks])
        return
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            if not math.isnan(value):
                colour = "black" if image.norm(value) > 0.6 else "white"
                text = form.format(value)
                axes.text(x, y, text, ha="center", va="center", fontsize=7, color=colour)
