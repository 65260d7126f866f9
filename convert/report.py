"""What a conversion did and whether it passed: report.json and its parts. Knows no plots."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConversionError
from ..models.jsonfields import read_json
from .logitcheck import LogitCheck
from .plan import Plan
from .read import Source


@dataclass(slots=True)
class Report:
    """One conversion."""

    source: str
    source_format: str
    recipe: str
    bits_per_weight: float
    num_bytes: int
    num_weights: int
    tensors: list[dict[str, Any]]  # Checked.as_dict()
    compared: bool = True  # False: errors are those of a sample, as writing found them
    notes: list[str] = field(default_factory=list)
    logits: list[LogitCheck] = field(default_factory=list)

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
            "notes": self.notes,
            "logits": [asdict(check) | {"passed": check.passed} for check in self.logits],
            "tensors": self.tensors,
        }


def make_report(
    source: Source, plan: Plan, tensors: list[dict[str, Any]], *, compared: bool
) -> Report:
    """Without logits, which come last."""
    return Report(
        source=source.label,
        source_format=source.format,
        recipe=plan.recipe.name,
        bits_per_weight=plan.bits_per_weight,
        num_bytes=plan.num_bytes,
        num_weights=plan.num_weights,
        tensors=tensors,
        compared=compared,
        notes=list(source.notes),
    )


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
