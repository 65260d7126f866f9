"""Units that get one format together, and the formats each may get. Knows no values."""

import re
from dataclasses import dataclass, field, replace

from .allocate import Choice, Unit
from .arrange import Arranged, Output
from .formats import BITS, GROUPS, affine, fits
from .plan import Plan, Planned, dense_dtype
from .read import MLXFormat
from .recipes import Recipe
from .rules import ROUTERS, fitting, floor_bits, quantisable

PROBE = affine(4)
LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(slots=True)
class MeasuredUnit:
    """Tensors of one format, what the probe format does to the logits, and errors by format."""

    outputs: tuple[Output, ...]
    layer: int | None  # None: the embedding or the output projection
    probe: MLXFormat
    kl: float = 0.0  # nats, of the probe format
    errors: dict[MLXFormat, float] = field(default_factory=dict)  # weighted squares

    def cost(self, form: MLXFormat | None) -> float:
        """KL divergence that a format should cost: it grows as the squared error does."""
        if form is None:
            return 0.0
        return self.kl * self.errors[form] / max(self.errors[self.probe], 1e-30)


def units_of(arranged: Arranged, recipe: Recipe) -> list[MeasuredUnit]:
    """What may be chosen freely: not routers, not what the user or the source has decided.

    Gate and up projections go together: they are one matrix where the model runs.
    """
    groups: dict[str, list[Output]] = {}
    for output in arranged.outputs:
        fixed = recipe.given(output) is not None or (recipe.keep and output.lossless is not None)
        if fixed or not quantisable(output) or ROUTERS.search(output.path):
            continue
        key = re.sub(r"\b(gate|up)_proj$", "gate_up_proj", output.path)
        groups.setdefault(key, []).append(output)
    found = []
    for outputs in groups.values():
        layer = LAYER.search(outputs[0].path)
        probe = fitting(PROBE, outputs[0].shape)
        assert probe is not None
        found.append(MeasuredUnit(tuple(outputs), int(layer[1]) if layer else None, probe))
    return found


def candidates_of(output: Output, unit: MeasuredUnit) -> list[MLXFormat]:
    """Affine formats that fit and are allowed; the probe's always."""
    least = floor_bits(output.path)
    formats = [affine(bits, group) for bits in BITS for group in GROUPS]
    found = [form for form in formats if form.bits >= least and fits(form, output.shape)]
    return found if unit.probe in found else [*found, unit.probe]


def least_bytes(arranged: Arranged, recipe: Recipe, plan: Plan) -> int:
    """Of the whole output, where all that may be chosen is as small as it may be."""
    size = plan.num_bytes
    planned = {tensor.output.name: tensor.num_bytes for tensor in plan.tensors}
    for unit in units_of(arranged, recipe):
        forms = candidates_of(unit.outputs[0], unit)
        priced = choices(
            replace(unit, errors=dict.fromkeys(forms, 0.0)), recipe, arranged.source.dtype
        )
        size += min(choice.num_bytes for choice in priced.choices)
        size -= sum(planned[name] for name in priced.names)
    return size


def choices(unit: MeasuredUnit, recipe: Recipe, model_dtype: str) -> Unit:
    """The unit with bytes and costs, for allocate()."""
    found = []
    least = max(floor_bits(output.path) for output in unit.outputs)
    for form in [*unit.errors, None]:
        if form is not None and form.bits < least:
            continue
        planned = [
            Planned(
                output,
                form,
                dense_dtype(output, recipe, model_dtype)
                if form is None
                else recipe.dtype or model_dtype,
            )
            for output in unit.outputs
        ]
        size = sum(tensor.num_bytes for tensor in planned)
        found.append(Choice(form, size, unit.cost(form)))
    return Unit(tuple(output.name for output in unit.outputs), tuple(found))
