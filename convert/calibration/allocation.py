"""Chooses a format for each group of tensors so that a size is met at the least cost.

Costs add up, so this is a knapsack with one choice per unit. Only the choices of a unit on the
lower convex hull of (bytes, cost) can be best at some price per byte. Every unit begins with its
smallest choice. Then the step that reduces the cost most per byte is taken, as long as it fits.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..arrange import ArrangedSource, OutputTensor
from ..plan import ConversionPlan, PlannedTensor, dense_dtype
from ..read import MLXFormat
from ..recipes import BITS, GROUPS, ROUTERS, Recipe, affine, fits, fitting, floor_bits, quantisable


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """One way to store a unit."""

    form: MLXFormat | None
    num_bytes: int
    cost: float


def allocate(units: Sequence[Sequence[FormatChoice]], max_bytes: int) -> list[FormatChoice]:
    """One of the choices of each unit, together at most `max_bytes`, which the smallest meet."""
    hulls = [lower_hull(choices) for choices in units]
    taken = [0] * len(units)
    left = max_bytes - sum(hull[0].num_bytes for hull in hulls)
    assert left >= 0, "a target that nothing meets is refused before measuring"
    steps = [
        (_gain(hull[i], hull[i + 1]), unit, i + 1)
        for unit, hull in enumerate(hulls)
        for i in range(len(hull) - 1)
    ]
    for _, unit, step in sorted(steps, key=lambda s: (-s[0], s[1], s[2])):
        price = hulls[unit][step].num_bytes - hulls[unit][taken[unit]].num_bytes
        if price <= left:
            taken[unit], left = step, left - price
    return [hull[index] for hull, index in zip(hulls, taken, strict=True)]


def lower_hull(choices: Sequence[FormatChoice]) -> list[FormatChoice]:
    """The choices that are best at some price, by rising size and falling cost."""
    hull: list[FormatChoice] = []
    for choice in sorted(choices, key=lambda c: (c.num_bytes, c.cost)):
        if hull and choice.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _gain(smaller: FormatChoice, larger: FormatChoice) -> float:
    return (smaller.cost - larger.cost) / max(1, larger.num_bytes - smaller.num_bytes)


PROBE = affine(4)


@dataclass(slots=True)
class MeasuredUnit:
    """Tensors of one format: the effect of the probe on the logits, the error of each format."""

    outputs: tuple[OutputTensor, ...]
    layer: int | None  # None: the embedding or the output projection
    probe: MLXFormat
    kl: float = 0.0  # nats, of the probe format
    errors: dict[MLXFormat, float] = field(default_factory=dict)  # weighted squares

    def cost(self, form: MLXFormat | None) -> float:
        """KL divergence that a format should cost: it grows as the squared error does."""
        if form is None:
            return 0.0
        return self.kl * self.errors[form] / max(self.errors[self.probe], 1e-30)


def units_of(arranged: ArrangedSource, recipe: Recipe) -> list[MeasuredUnit]:
    """Tensors with a free choice of format: no routers, nothing that the user or the source fixed.

    Gate and up projections go together: they are one matrix where the model runs.
    """
    groups: dict[str, list[OutputTensor]] = {}
    for output in arranged.outputs:
        if recipe.fixes(output) or not quantisable(output) or not _free(output):
            continue
        key = re.sub(r"\b(gate|up)_proj$", "gate_up_proj", output.path)
        groups.setdefault(key, []).append(output)
    units = []
    for outputs in groups.values():
        probe = fitting(PROBE, outputs[0].shape)
        assert probe is not None
        units.append(MeasuredUnit(tuple(outputs), outputs[0].layer, probe))
    return units


def _free(output: OutputTensor) -> bool:
    """Routers decide too much, what predicts has no share in the logits, tables stay in files."""
    return not (output.ahead or output.in_files or ROUTERS.search(output.path))


def candidates_of(output: OutputTensor, unit: MeasuredUnit) -> list[MLXFormat]:
    """Affine formats that fit and are allowed; the probe's always."""
    least = floor_bits(output.path)
    formats = [affine(bits, group) for bits in BITS for group in GROUPS]
    fitting = [form for form in formats if form.bits >= least and fits(form, output.shape)]
    return fitting if unit.probe in fitting else [*fitting, unit.probe]


def least_bytes(arranged: ArrangedSource, recipe: Recipe, plan: ConversionPlan) -> int:
    size = plan.num_bytes
    planned = {tensor.output.name: tensor.num_bytes for tensor in plan.tensors}
    for unit in units_of(arranged, recipe):
        forms = candidates_of(unit.outputs[0], unit)
        priced = replace(unit, errors=dict.fromkeys(forms, 0.0))
        size += min(c.num_bytes for c in choices_of(priced, recipe, arranged.source.dtype))
        size -= sum(planned[output.name] for output in unit.outputs)
    return size


def choose_formats(
    arranged: ArrangedSource, units: Sequence[MeasuredUnit], base: ConversionPlan, max_bytes: int
) -> dict[str, MLXFormat | None]:
    """The format of each tensor of `units`, by name, so that all tensors take `max_bytes` at most.

    Args:
        base: a plan of the whole; what belongs to no unit keeps its format.
        max_bytes: of all tensors of `base`; what least_bytes() says, or more.
    """
    priced = [choices_of(unit, base.recipe, arranged.source.dtype) for unit in units]
    free = {output.name for unit in units for output in unit.outputs}
    fixed = sum(t.num_bytes for t in base.tensors if t.output.name not in free)
    pairs = zip(units, allocate(priced, max_bytes - fixed), strict=True)
    return {output.name: choice.form for unit, choice in pairs for output in unit.outputs}


def choices_of(unit: MeasuredUnit, recipe: Recipe, model_dtype: str) -> list[FormatChoice]:
    choices = []
    least = max(floor_bits(output.path) for output in unit.outputs)
    for form in [*unit.errors, None]:
        if form is not None and form.bits < least:
            continue
        size = 0
        for output in unit.outputs:
            dense = dense_dtype(output, recipe, model_dtype)
            dtype = dense if form is None else recipe.dtype or model_dtype
            size += PlannedTensor(output, form, dtype).num_bytes
        choices.append(FormatChoice(form, size, unit.cost(form)))
    return choices
