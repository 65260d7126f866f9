"""The report of a conversion: report.json, and the model card (README.md) made from it.

`passed` is the verdict of the logit comparison.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
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
    commands: Sequence[str] = ()  # of the card, that have it answer

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
        del fields["loads"], fields["commands"]
        return fields


def make_report(
    source: SourceModel, plan: ConversionPlan, tensors: list[dict[str, Any]], *, compared: bool
) -> ConversionReport:
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
RUN = f"mlxinfer run -m {FOLDER} 'Why is the sky blue?'"
RUN_MLX_LM = f"mlx_lm.generate --model {FOLDER} --prompt 'Why is the sky blue?'"
_WORST = 5


def write_card(folder: Path, report: ConversionReport, source: SourceModel) -> None:
    text = "\n".join([*_front(source, generates=bool(report.commands)), *_body(report)])
    write_file(folder / "README.md", text.encode())


_OURS = (
    "library_name", "tags", "base_model", "base_model_relation",
    "license", "license_name", "license_link",
)  # fmt: skip


def _front(source: SourceModel, *, generates: bool) -> list[str]:
    """The lines in front of the card, which the hub reads: the source's, made true for this."""
    origin = source.origin
    stated = origin.card.get("tags")
    tags = [str(tag) for tag in stated] if isinstance(stated, list) else []
    tagged = generates and "pipeline_tag" not in origin.card
    lines = [
        "---",
        "library_name: mlx",
        *["pipeline_tag: text-generation"] * tagged,
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
        *(["```sh", *report.commands, "```", ""] if report.commands else []),
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
        lines += [f"| {t['name']} | {t['format']} | {t['relative']:.4f} |" for t in lossy]
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
