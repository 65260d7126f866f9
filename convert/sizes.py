"""Sizes and divergences of all ways to quantise one model, predicted from one calibration pass.

What quantising each unit in one format does to the logits was measured; the error of a weight times
the second moment of its input scales that to every other format. Sums of these predict the
divergence of any choice of formats.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from .arrange import ArrangedSource
from .calibration.allocation import choose_formats, least_bytes
from .calibration.measure import Measurements
from .plan import ConversionPlan, make_plan
from .recipes import Recipe, make_recipe

TARGETS = (3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 8.0)  # bits per weight
UNIFORM = ("3bit", "4bit", "4bit-g32", "6bit", "8bit")


@dataclass(frozen=True, slots=True)
class SizePoint:
    """One way to quantise the model."""

    label: str  # the options that make it
    bits_per_weight: float
    num_bytes: int
    kl: float  # predicted mean divergence from the source, nats
    measured_kl: float | None = None  # None: not checked

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def predicted_sizes(
    arranged: ArrangedSource, recipe: Recipe, found: Measurements
) -> Iterator[tuple[ConversionPlan, SizePoint]]:
    """Targets that some choice of formats meets, then uniform formats.

    Args:
        arranged: the source.
        recipe: what is not measured: routers, exceptions, dtype.
        found: of a pass with probes.
    """
    base = make_plan(arranged, recipe)
    least = least_bytes(arranged, recipe, base)
    for bits in TARGETS:
        limit = int(bits * base.num_weights / 8)
        if least <= limit:
            formats = choose_formats(arranged, found.units, base, limit)
            plan = make_plan(arranged, recipe, chosen=formats)
            yield plan, size_of(f"--target-bpw {bits:g}", plan, found)
    for name in UNIFORM:
        own = replace(recipe, name=name, base=make_recipe(name).base, target_bpw=None)
        plan = make_plan(arranged, own)
        yield plan, size_of(f"--recipe {name}", plan, found)


def size_of(label: str, plan: ConversionPlan, found: Measurements) -> SizePoint:
    """A plan's size, and what it should cost."""
    forms = {tensor.output.name: tensor.form for tensor in plan.tensors}
    kl = sum(unit.cost(forms[unit.outputs[0].name]) for unit in found.units)
    return SizePoint(label, plan.bits_per_weight, plan.num_bytes, kl)
