"""The plan of a conversion: format, bytes and file of every output tensor, before any is read.

With --split-experts all matrices of an expert lie side by side in a file, in the order of the
experts. A model that is larger than memory then reads an expert at once. From stacks that would be
nine reads (gate, up and down, each with words, scales and biases). The parts have the hub's names
of single experts, `experts.7.gate_proj.weight`, and as many bytes as before. Biases of outputs stay
together: they are few numbers, which stay in memory.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from ..errors import InvalidRequestError
from .arrange import ArrangedSource, OutputTensor
from .calibration.texts import CALIBRATION_LENGTH, SEQUENCES, checked_positions
from .read import MLXFormat
from .read.stored import PLAIN
from .recipes import (
    ITEM_BYTES,
    SHARD_BYTES,
    ConversionOptions,
    Recipe,
    fitting,
    name_of,
    stays_float32,
)

SAFETENSORS = {ours: theirs for theirs, ours in PLAIN.items()}


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
        return sum(array.num_bytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """All tensors of the output, in order."""

    recipe: Recipe
    tensors: tuple[PlannedTensor, ...]
    shard_bytes: int = SHARD_BYTES
    split_experts: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def num_weights(self) -> int:
        return sum(tensor.output.num_weights for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        return self.num_bytes * 8 / self.num_weights

    def limit_bytes(self, options: ConversionOptions) -> int | None:
        """The target in bytes, if there is one; bits per weight are those of the language model."""
        if options.goal_bpw is None:
            return options.target_bytes
        text = [tensor for tensor in self.tensors if not tensor.output.seeing]
        seeing = self.num_bytes - sum(tensor.num_bytes for tensor in text)
        count = sum(tensor.output.num_weights for tensor in text)
        return int(options.goal_bpw * count / 8) + seeing

    @property
    def stacks_for_mlx(self) -> bool:
        """Whether experts lie in stacks that only MLX reads, though nothing is quantised."""
        stacked = any(STACK.fullmatch(a.name) for tensor in self.tensors for a in tensor.arrays)
        return stacked and not self.split_experts and self.quantization() is None

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

    def pieces(self, tensors: Iterable[PlannedTensor]) -> dict[str, list[PlannedArray]]:
        """The arrays of a file in their order, by name; of one that is split a piece an expert.

        The order of the pieces is that of `laid_out`.
        """
        pieces: dict[str, list[PlannedArray]] = {}
        for array in (array for tensor in tensors for array in tensor.arrays):
            count = array.shape[0] if self.split_experts and STACK.fullmatch(array.name) else 0
            size = array.num_bytes // max(count, 1)
            pieces[array.name] = [
                PlannedArray(single_name(array.name, i) or "", array.dtype, array.shape[1:], size)
                for i in range(count)
            ] or [array]
        return pieces

    def quantization(self) -> dict[str, object] | None:
        formats = {t.output.path: t.form for t in self.tensors if t.form is not None}
        if not formats:
            return None
        base = self.recipe.base
        if base is None or base not in formats.values():
            base = Counter(formats.values()).most_common(1)[0][0]
        exceptions = {path: as_json(form) for path, form in formats.items() if form != base}
        return {**as_json(base), **exceptions}


def as_json(form: MLXFormat) -> dict[str, object]:
    return {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}


def make_plan(
    arranged: ArrangedSource,
    recipe: Recipe,
    *,
    chosen: Mapping[str, MLXFormat | None] | None = None,
    shard_bytes: int = SHARD_BYTES,
    by_layer: bool = False,
    split_experts: bool = False,
) -> ConversionPlan:
    """Formats by `recipe`, or as `chosen` by name.

    Args:
        chosen: formats of some tensors, instead of the recipe's.
        shard_bytes: of a file, at most.
        by_layer: tensors in the order of their layers, then those of none; else as in the source.
        split_experts: all matrices of an expert lie side by side.
    """
    _check_overrides(arranged, recipe)
    tensors = list(_planned(arranged, recipe, chosen or {}))
    if by_layer:
        last = arranged.config.num_layers
        tensors.sort(key=lambda t: last if t.output.layer is None else t.output.layer)
    plan = ConversionPlan(recipe, tuple(tensors), shard_bytes, split_experts)
    if split_experts and not any(STACK.fullmatch(a.name) for t in tensors for a in t.arrays):
        raise InvalidRequestError(
            "This model has no mixtures of experts; leave --split-experts out.",
            param="split_experts",
        )
    return plan


def dense_dtype(output: OutputTensor, recipe: Recipe, model_dtype: str) -> str:
    """The dtype of a dense tensor: the model's instead of float32, except in a few small tensors.

    Float32 norms, as GGUF files have them, would turn all activations into float32.
    """
    if output.dtype == "int64" or (output.dtype == "float32" and stays_float32(output.path)):
        return output.dtype
    if recipe.dtype is not None:
        return recipe.dtype
    return model_dtype if output.dtype == "float32" else output.dtype


def _planned(
    arranged: ArrangedSource, recipe: Recipe, chosen: Mapping[str, MLXFormat | None]
) -> Iterator[PlannedTensor]:
    source = arranged.source
    model_dtype = (recipe.is_exact and source.exact_dtype) or source.dtype
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
            f"{output.path} has {output.shape[-1]} inputs. Groups of {form.group_size} do not "
            f"divide them, so it cannot be {name_of(form)}.",
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
    if recipe.tower is not None and not any(output.seeing for output in arranged.outputs):
        raise InvalidRequestError(
            f"{arranged.source.label} has no tower that is supported here; leave --quantize-tower "
            "out.",
            param="quantize_tower",
        )
    used = {recipe.given(output) for output in arranged.outputs}
    for override in recipe.overrides:
        alone = Recipe(name="", base=None, overrides=(override,))
        if override not in used and not any(alone.given(o) for o in arranged.outputs):
            raise InvalidRequestError(
                f"No matrix of {arranged.source.label} matches {override.pattern!r}.", param="set"
            )


# -- experts side by side -----------------------------------------------------------------------

STACK = re.compile(
    r"(.+?)\.(?:switch_mlp|experts\.switch_glu|experts)"
    r"\.((?:gate|up|gate_up|down)_proj|fc1|fc2)\.(weight|scales|biases)"
)
_OF_ONE = {"fc1": "up_proj", "fc2": "down_proj"}  # Nemotron's names of stacks, and of one's


def single_name(stack: str, expert: int) -> str | None:
    """The name of an expert's part of a stack by itself; None: the name is none of a stack."""
    match = STACK.fullmatch(stack)
    if match is None:
        return None
    mixture, matrix, field = match.groups()
    return f"{mixture}.experts.{expert}.{_OF_ONE.get(matrix, matrix)}.{field}"


def laid_out(pieces: Mapping[str, list[PlannedArray]]) -> list[PlannedArray]:
    """All pieces in the order of a file; a mixture stands where its first stack stands."""
    mixtures: dict[str, list[list[PlannedArray]]] = {}
    for name, parts in pieces.items():
        stack = STACK.fullmatch(name) if parts[0].name != name else None
        mixtures.setdefault(stack[1] if stack else name, []).append(parts)
    return [
        piece
        for stacks in mixtures.values()
        for together in zip(*stacks, strict=True)
        for piece in together
    ]


# -- memory and disk ----------------------------------------------------------------------------

MAX_WORKERS = 8
BYTES_PER_WEIGHT = 14  # of a block in flight: as read, in float32, codes, and what is written
LAYER_COPIES = 3  # of a layer in float32 while it is run: as read, joined, one changed
MIN_BLOCK, MAX_BLOCK = 1 << 16, 1 << 21  # numbers
BASE_BYTES = 100 << 20  # Python, MLX and numpy, before anything is read
TOKEN_BYTES = 1500  # of each token while the tokenizer is made and tried: names, merges, and both
CACHED_BYTES = 32 << 20  # that MLX may keep of what was freed
INPUTS = (4096, 2048, 1024, 512, 256, 128)  # inputs with moments held together
INVERSION_BYTES = 16  # of each moment of the block that is inverted
PROBE_LENGTH, PROBES = 64, (4, 2, 1)  # tokens of a sequence for probes, sequences


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory, as sizes of the data that is held at once."""

    inputs: int  # whose second moments error feedback holds together; 0: no feedback
    probes: int  # sequences that are carried to the end for each unit that is measured
    block: int  # numbers that are quantised at once by a thread
    workers: int  # threads
    peak_bytes: int  # at most, about


def make_budget(
    arranged: ArrangedSource, plan: ConversionPlan, options: ConversionOptions, *, comparing: bool
) -> MemoryBudget:
    """As much as `options.max_memory` allows, and no more than is useful."""
    limit, calibrates = options.max_memory, options.calibration is not None
    base = BASE_BYTES + CACHED_BYTES + TOKEN_BYTES * arranged.config.vocab_size
    room = None if limit is None else max(0, limit - base)
    hidden = arranged.config.hidden_size * 4
    checked = 2 * checked_positions(arranged.config.vocab_size) * hidden if comparing else 0
    inputs, moments = 0, 0
    if options.feeds_back:
        inputs, moments = _largest(INPUTS, lambda n: _moments_bytes(arranged, n), room, 3)
    units = sum(len(output.shape) > 1 and not output.seeing for output in arranged.outputs)
    probes, probed = _largest(PROBES, lambda n: n * units * PROBE_LENGTH * hidden, room, 3)
    states = (SEQUENCES * CALIBRATION_LENGTH * hidden if calibrates else 0) + checked
    workers = min(os.cpu_count() or 1, MAX_WORKERS)
    block = MAX_BLOCK
    if room is not None:
        left = max(0, room - moments - states)
        workers = max(1, min(workers, left // (MIN_BLOCK * BYTES_PER_WEIGHT) - 1))
        block = min(max(left // (BYTES_PER_WEIGHT * (workers + 1)), MIN_BLOCK), MAX_BLOCK)
    in_flight = block * BYTES_PER_WEIGHT * (workers + 1)
    layer = _largest_layer(arranged) * 4
    parts = [moments + states + in_flight + _largest_piece(arranged, plan)]
    if comparing or calibrates:
        parts.append(moments + states + LAYER_COPIES * layer)
    if options.targeted:
        parts.append(states + probed + LAYER_COPIES * layer)
    peak = base + max(parts)
    return MemoryBudget(inputs, probes, block, workers, peak)


def _largest(
    choices: tuple[int, ...], size_of: Callable[[int], int], room: int | None, share: int
) -> tuple[int, int]:
    """The first choice that takes at most a share of the room, or the last; and its bytes."""
    fitting = (n for n in choices if room is None or size_of(n) * share <= room)
    chosen = next(fitting, choices[-1])
    return chosen, size_of(chosen)


_SIBLINGS = re.compile(r"[.](?:[qkv]|gate|up)_proj$")  # which share their inputs


def shared_inputs(matrices: Iterable[OutputTensor]) -> Iterator[OutputTensor]:
    first = {(_SIBLINGS.sub("", matrix.path), matrix.shape[-1]): matrix for matrix in matrices}
    yield from first.values()


def _moments_bytes(arranged: ArrangedSource, inputs: int) -> int:
    layers: Counter[int | None] = Counter()
    widest = 0
    for output in shared_inputs(o for o in arranged.outputs if len(o.shape) > 1 and not o.seeing):
        in_dims = output.shape[-1]
        experts = output.shape[0] if len(output.shape) == 3 else 1
        layers[output.layer] += in_dims * min(inputs, in_dims) * 4 * experts
        widest = max(widest, in_dims)
    return max(layers.values()) + INVERSION_BYTES * min(inputs, widest) ** 2


def disk_bytes(
    arranged: ArrangedSource, plan: ConversionPlan, options: ConversionOptions, *, comparing: bool
) -> int:
    """The output, and logits: the source's, those of weights rounded to the nearest, its own."""
    size = plan.limit_bytes(options) or plan.num_bytes
    vocab = arranged.config.vocab_size
    return size + (3 * checked_positions(vocab) * vocab * 4 if comparing else 0)


def _largest_layer(arranged: ArrangedSource) -> int:
    """Weights of it; 0 for a definition of mlx-lm with other names, which never runs by layers."""
    sizes: Counter[int | None] = Counter()
    for output in arranged.outputs:
        if output.layer is not None and not output.in_files:
            sizes[output.layer] += output.num_weights
    return max(sizes.values(), default=0)


def _largest_piece(arranged: ArrangedSource, plan: ConversionPlan) -> int:
    """Bytes that are read at once: one expert of a stack, or a tensor that is always whole."""
    sizes = [0]
    for tensor in plan.tensors:
        info = arranged.source.tensors[tensor.output.sources[0]]
        if arranged.source.reads_whole:
            sizes.append(2 * info.stored_bytes)  # the parts that it is made of, and itself
        elif len(info.shape) > 2:
            sizes.append(tensor.output.num_weights // tensor.output.shape[0] * 4)
    return max(sizes)
