"""The plan of a conversion: format, bytes and file of every output tensor, before any is read."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from ..errors import InvalidRequestError
from .arrange import ArrangedSource, OutputTensor
from .formats import ITEM_BYTES, fitting, name_of, stays_float32
from .read import MLXFormat
from .recipes import SHARD_BYTES, Recipe

SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class PlannedArray:
    """One array in a file."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor and how it will be stored."""

    output: OutputTensor
    form: MLXFormat | None  # None: dense
    dtype: str  # of dense values, or of affine scales and biases
    packed: bool = False  # the source's own codes are copied

    @property
    def arrays(self) -> tuple[PlannedArray, ...]:
        """The weight; where it is quantised its scales, and biases if affine."""
        *rows, in_dims = self.output.shape or (1,)
        if self.form is None:
            count = self.output.num_weights * ITEM_BYTES[self.dtype]
            return (
                PlannedArray(self.output.name, SAFETENSORS[self.dtype], self.output.shape, count),
            )
        path, num_rows = self.output.path, prod(rows)
        words = in_dims * self.form.bits // 32
        groups = in_dims // self.form.group_size
        weight = PlannedArray(f"{path}.weight", "U32", (*rows, words), num_rows * words * 4)
        if self.form.mode != "affine":
            return weight, PlannedArray(f"{path}.scales", "U8", (*rows, groups), num_rows * groups)
        size = num_rows * groups * ITEM_BYTES[self.dtype]
        of = SAFETENSORS[self.dtype], (*rows, groups), size
        return weight, PlannedArray(f"{path}.scales", *of), PlannedArray(f"{path}.biases", *of)

    @property
    def format(self) -> str:
        """For people: `4bit-g64`, `mxfp4`, or the dtype of dense values."""
        return name_of(self.form) if self.form else self.dtype

    @property
    def num_bytes(self) -> int:
        """On disk."""
        return sum(array.num_bytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """All tensors of the output, in order."""

    recipe: Recipe
    tensors: tuple[PlannedTensor, ...]
    shard_bytes: int = SHARD_BYTES

    @property
    def num_bytes(self) -> int:
        """Of all weights on disk."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def num_weights(self) -> int:
        """Of the model."""
        return sum(tensor.output.num_weights for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Over all tensors, as mlx-lm counts them."""
        return self.num_bytes * 8 / self.num_weights

    @property
    def quantised_anew(self) -> list[PlannedTensor]:
        """Tensors that the source has quantised in one format and the output in another."""
        return [t for t in self.tensors if t.form and not t.packed and t.output.quantised]

    def shards(self) -> list[tuple[str, list[PlannedTensor]]]:
        """File names and what goes into each, at most `shard_bytes` unless one tensor is larger."""
        groups: list[list[PlannedTensor]] = [[]]
        size = 0
        for tensor in self.tensors:
            if groups[-1] and size + tensor.num_bytes > self.shard_bytes:
                groups.append([])
                size = 0
            groups[-1].append(tensor)
            size += tensor.num_bytes
        if len(groups) == 1:
            return [("model.safetensors", groups[0])]
        return [
            (f"model-{i:05d}-of-{len(groups):05d}.safetensors", group)
            for i, group in enumerate(groups, 1)
        ]

    def quantization(self) -> dict[str, object] | None:
        """What config.json says: the commonest format, and the layers that differ."""
        formats = {t.output.path: t.form for t in self.tensors if t.form is not None}
        if not formats:
            return None
        base = self.recipe.base
        if base is None or base not in formats.values():
            base = Counter(formats.values()).most_common(1)[0][0]
        exceptions = {path: as_json(form) for path, form in formats.items() if form != base}
        return {**as_json(base), **exceptions}


def as_json(form: MLXFormat) -> dict[str, object]:
    """As mlx-lm writes it into config.json."""
    return {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}


def make_plan(
    arranged: ArrangedSource,
    recipe: Recipe,
    *,
    chosen: Mapping[str, MLXFormat | None] | None = None,
    shard_bytes: int = SHARD_BYTES,
    by_layer: bool = False,
) -> ConversionPlan:
    """Formats by `recipe`, or as `chosen` by name.

    Args:
        arranged: the source.
        recipe: what the user asks for.
        chosen: formats of some tensors, instead of the recipe's.
        shard_bytes: of a file, at most.
        by_layer: tensors in the order of their layers, then those of none; else as in the source.

    Raises:
        InvalidRequestError: an exception that matches no tensor, or a format of groups that do not
            fill a tensor's rows.
    """
    _check_overrides(arranged, recipe)
    tensors = list(_planned(arranged, recipe, chosen or {}))
    if by_layer:
        last = arranged.config.num_layers
        tensors.sort(key=lambda t: last if t.output.layer is None else t.output.layer)
    return ConversionPlan(recipe, tuple(tensors), shard_bytes)


def dense_dtype(output: OutputTensor, recipe: Recipe, model_dtype: str) -> str:
    """What is float32 becomes what the model computes in, but for a few small tensors.

    Float32 norms, as GGUF files have them, would turn all activations into float32.
    """
    if output.dtype == "float32" and stays_float32(output.path):
        return output.dtype
    if recipe.dtype is not None:
        return recipe.dtype
    return model_dtype if output.dtype == "float32" else output.dtype


def _planned(
    arranged: ArrangedSource, recipe: Recipe, chosen: Mapping[str, MLXFormat | None]
) -> Iterator[PlannedTensor]:
    model_dtype = arranged.source.dtype
    for output in arranged.outputs:
        form = chosen[output.name] if output.name in chosen else _fitted(output, recipe)
        if form is None:
            yield PlannedTensor(output, None, dense_dtype(output, recipe, model_dtype))
            continue
        packed = form == output.lossless
        yield PlannedTensor(
            output, form, _scales_dtype(output, recipe, model_dtype, packed), packed
        )


def _fitted(output: OutputTensor, recipe: Recipe) -> MLXFormat | None:
    form = recipe.choose(output)
    if form is None or form == output.lossless:
        return form
    fitted, given = fitting(form, output.shape), recipe.given(output)
    if given is not None and (fitted is None or (given.exact and fitted != form)):
        raise InvalidRequestError(
            f"{output.path} has {output.shape[-1]} inputs, which groups of {form.group_size} do "
            f"not divide: it cannot be {name_of(form)}.",
            param="set",
        )
    return fitted


def _scales_dtype(output: OutputTensor, recipe: Recipe, model_dtype: str, packed: bool) -> str:
    """Codes are exact only with the scales that belong to them: bfloat16 would round float16."""
    if not packed:
        return recipe.dtype or model_dtype
    if output.scales_dtype == "float32" and model_dtype != "float32":
        return "float16"
    return output.scales_dtype


def _check_overrides(arranged: ArrangedSource, recipe: Recipe) -> None:
    used = {recipe.given(output) for output in arranged.outputs}
    for override in recipe.overrides:
        alone = Recipe(name="", base=None, overrides=(override,))
        if override not in used and not any(alone.given(o) for o in arranged.outputs):
            raise InvalidRequestError(
                f"No matrix of {arranged.source.label} matches {override.pattern!r}.", param="set"
            )


def dumped(plan: ConversionPlan) -> str:
    """The plan as text that is the same for the same plan, for the journal."""
    rows = [
        [array.name, array.dtype, list(array.shape), name_of(tensor.form), tensor.packed]
        for tensor in plan.tensors
        for array in tensor.arrays
    ]
    return json.dumps([plan.recipe.name, plan.shard_bytes, rows])
