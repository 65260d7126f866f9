"""The report of a conversion: report.json, and the model card (README.md) made from it.

`passed` is the verdict of the logit comparison. Tensor entries are those of verify.py.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConversionError
from ..memory import human_bytes
from ..models.jsonfields import read_json
from .calibration.logits import LogitCheck
from .files import write_file
from .plan import ConversionPlan, PlannedTensor
from .plots import CAPTIONS, available, plot_positions, plot_predicted, plot_tensors
from .read import Source
from .sizes import SizePoint


@dataclass(slots=True)
class ConversionReport:
    """One conversion."""

    source: str
    source_format: str
    recipe: str
    bits_per_weight: float
    num_bytes: int
    num_weights: int
    tensors: list[dict[str, Any]]  # CheckedTensor.as_dict()
    by_source: list[dict[str, Any]]  # what each storage type of the source became
    compared: bool = True  # False: errors are those of a sample, as writing found them
    notes: list[str] = field(default_factory=list)
    logits: list[LogitCheck] = field(default_factory=list)
    loads: bool = True  # False: it has a tokenizer that cannot be loaded here

    @property
    def passed(self) -> bool:
        """Whether all that was checked is within its limits."""
        return all(check.passed for check in self.logits)

    @property
    def counts(self) -> dict[str, int]:
        """Tensors by status."""
        return dict(Counter(tensor["status"] for tensor in self.tensors))

    @property
    def worst(self) -> dict[str, Any] | None:
        """The tensor with the largest relative error."""
        return max(self.tensors, key=lambda t: t["relative"], default=None)

    def as_dict(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "source": self.source,
            "source_format": self.source_format,
            "recipe": self.recipe,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "num_bytes": self.num_bytes,
            "num_weights": self.num_weights,
            "passed": self.passed,
            "tensors_compared": self.compared,
            "counts": self.counts,
            "by_source": self.by_source,
            "notes": self.notes,
            "logits": [asdict(check) | {"passed": check.passed} for check in self.logits],
            "tensors": self.tensors,
        }


def make_report(
    source: Source, plan: ConversionPlan, tensors: list[dict[str, Any]], *, compared: bool
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
        compared=compared,
        notes=list(source.notes),
    )


def by_source(plan: ConversionPlan, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each type in the source and format in the output: bits before and after, and the error.

    Args:
        entries: CheckedTensor.as_dict() of the plan's tensors.

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


def read_report(folder: Path) -> dict[str, Any]:
    """report.json of a folder that was converted.

    Raises:
        ConversionError: it has none, or one that is damaged.
    """
    path = folder / "report.json"
    if not path.is_file():
        raise ConversionError(f"{folder} has no report.json: it was not converted by mlxinfer.")
    report = read_json(path)
    tensors = report.get("tensors")
    sound = isinstance(tensors, list) and all(map(_is_entry, tensors))
    if not sound or not isinstance(report.get("tensors_compared"), bool):
        raise ConversionError(
            f"{path} does not say what is in the tensors: it is damaged, or not of mlxinfer. "
            "Convert the source anew."
        )
    return report


def _is_entry(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    kinds: dict[str, type | tuple[type, ...]] = {
        "name": str,
        "checksums": list,
        "relative": (int, float),
    }
    return all(isinstance(value.get(key), kind) for key, kind in kinds.items())


FOLDER = "FOLDER"  # in a card's commands, until there is a repository
NO_PLOTS = 'Figures need matplotlib: pip install "mlxinfer[plots]"'
_WORST = 5


def write_card(
    folder: Path,
    report: ConversionReport,
    source: Source,
    sizes: Sequence[SizePoint],
    *,
    draw: bool,
) -> None:
    """Write README.md and, with `draw` and matplotlib, its figures.

    Args:
        sizes: of other ways to convert, this one last; (): they were not measured.
    """
    figures: list[str] = []
    if draw and available():
        figures = plot_tensors(folder, report.tensors)
        if sizes:
            figures.append(plot_predicted(folder, sizes))
        if any(len(check.kl_by_position) > 1 for check in report.logits):
            figures.append(plot_positions(folder, report.logits))
    elif draw:
        report.notes.append(NO_PLOTS)
    text = "\n".join([*_front(report, source), *_body(report), *_figures(figures)])
    write_file(folder / "README.md", text.encode())


def _front(report: ConversionReport, source: Source) -> list[str]:
    """What the hub reads."""
    origin = source.origin
    lines = ["---", "library_name: mlx", "pipeline_tag: text-generation", "tags:", "- mlx"]
    base = origin.repo or origin.base_model
    if base is not None:
        lines += [f"base_model: {base}", "base_model_relation: quantized"]
    stated = source.config.get("license")
    found = {
        "license": origin.license or (stated if isinstance(stated, str) else None),
        "license_name": origin.license_name,
        "license_link": origin.license_link,
    }
    lines += [f"{key}: {value}" for key, value in found.items() if value is not None]
    return [*lines, "---", ""]


def name_in_card(folder: Path, repo: str) -> None:
    """Put the repository into the commands of a folder's card, where they have none yet."""
    card = folder / "README.md"
    if card.is_file():
        text = card.read_text(encoding="utf-8")
        for option in ("-m", "--model"):
            text = text.replace(f" {option} {FOLDER} ", f" {option} {repo} ")
        write_file(card, text.encode())


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


def _figures(names: list[str]) -> list[str]:
    return [f"![{CAPTIONS[name]}]({name})\n" for name in names]
