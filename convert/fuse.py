"""A checkpoint with an adapter merged into it, as a Source: converting it writes the fused model.

A matrix W becomes W + B A; with DoRA its rows are then brought to their learned lengths. What is
quantised is dequantised, merged and quantised again, in its own format unless more bits or none
are asked for. A change that is small beside the steps of a format is mostly rounded away: what is
left of it is measured.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from ..layers.adapters import AdapterTarget
from ..memory import human_bytes
from ..models.adapters.folder import AdapterFolder, AdapterModule, in_layer
from ..models.adapters.loaded import oriented
from ..models.config import normalise
from ..models.experts import PackedExperts
from ..models.registry import family
from .arrays import mx_dtype
from .quantise import dequantised
from .read import MLXFormat
from .read.source import Packed, SourceModel, SourceTensor, TensorReader
from .recipes import affine, fitting

LEAST_SHARE, MOST_ERROR = 0.8, 0.5  # of a change that is still the one that was trained
AT_ONCE = 1 << 24  # numbers that are measured together
TABLE = "model.embed_tokens"
_HALVES = ("gate_proj", "up_proj")
Half = tuple[int, PackedExperts]  # gate or up, and where their rows are


@dataclass(frozen=True, slots=True)
class Change:
    """The change that an adapter makes to one matrix (outputs, inputs) of a tensor."""

    module: AdapterModule  # that has the matrices for it
    expert: int  # which of the module's matrices, where it has one for each expert
    half: Half | None  # which of the module's outputs, where it has gate and up in one; None: all
    of_table: bool = False  # the tensor is the token table, whose rows are the module's inputs


@dataclass(frozen=True, slots=True)
class KeptChange:
    """Sums over the numbers of a change D, before and after rounding; those of parts add up."""

    squares: float = 0.0  # of D
    along: float = 0.0  # product of D and what became of it
    errors: float = 0.0  # squares of their differences

    def __add__(self, other: "KeptChange") -> "KeptChange":
        return KeptChange(
            self.squares + other.squares, self.along + other.along, self.errors + other.errors
        )

    @property
    def share(self) -> float:
        """The share of the change that is left: 1 is all of it."""
        return self.along / self.squares if self.squares else 1.0

    @property
    def error(self) -> float:
        """The error of the change, relative to its size: 1 is as bad as no change at all."""
        return float((self.errors / self.squares) ** 0.5) if self.squares else 0.0

    @property
    def enough(self) -> bool:
        return self.share >= LEAST_SHARE and self.error <= MOST_ERROR


def fused(
    source: SourceModel,
    adapter: AdapterFolder,
    *,
    dense: bool,
    bits: int | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> SourceModel:
    """The source with the adapter merged into its tensors.

    Args:
        dense: matrices that were quantised are given as numbers, else as codes.
        bits: of the codes; None: the matrix's own format.
    """
    loaded = mx.load(str(adapter.file))
    assert isinstance(loaded, dict)
    readers, rounded = dict(source.readers), list[_Merging]()
    for name, changes in _changes(source, adapter):
        info = source.tensors[name]
        form = None if dense else info.lossless
        if form is not None and bits is not None:
            form = fitting(finer(form, bits), info.shape)
        info = replace(info, lossless=form)
        merging = _Merging(adapter, loaded, source, info, changes)
        merging.check_shapes()
        codes = None if form is None else merging.codes
        readers[name] = TensorReader(info, source.readers[name].parts, merging.values, codes)
        if form is not None:
            rounded.append(merging)
    notes = [*source.notes, f"The adapter {adapter.folder.name} is merged into it."]
    if rounded:
        notes.append(_what_is_kept(rounded, progress))
    fingerprint = f"{source.fingerprint} {adapter.identity} {dense} {bits}"
    return replace(source, readers=readers, notes=tuple(notes), fingerprint=fingerprint)


def finer(form: MLXFormat, bits: int) -> MLXFormat:
    """An affine format of `bits`; its groups are those of `form`, 32 at least."""
    return affine(bits, max(form.group_size, 32))


def _what_is_kept(rounded: "Sequence[_Merging]", progress: Callable[[int, int], None]) -> str:
    """A sentence on what rounding leaves of a change; if that is little, on what leaves more."""
    kept = KeptChange()
    for number, merging in enumerate(rounded, 1):
        kept += merging.kept(merging.form)
        progress(number, len(rounded))
    said = (
        f"Of what it changes, {len(rounded)} quantised tensors were rounded to their formats "
        f"again: {kept.share:.0%} of the change is left, and the rest differs from it by "
        f"{kept.error:.0%} of its size."
    )
    if kept.enough:
        return said
    better, more, plain = KeptChange(), 0, 0
    for merging in rounded:
        form, count = finer(merging.form, 8), prod(merging.info.shape)
        better += merging.kept(fitting(form, merging.info.shape) or merging.form)
        more += count * max(0, 8 - merging.form.bits) // 8
        plain += count * (16 - merging.form.bits) // 8
    return (
        f"{said} That is too little: serve the adapter apart (--adapter), which loses nothing; or "
        f"merge with --bits 8, which keeps {better.share:.0%} ({better.error:.0%} off) and takes "
        f"{human_bytes(more)} more; or with --dequantize, which takes {human_bytes(plain)} more."
    )


@dataclass(frozen=True, slots=True)
class _Merging:
    adapter: AdapterFolder
    matrices: Mapping[str, mx.array]  # of the adapter
    source: SourceModel
    info: SourceTensor
    changes: Mapping[int | None, Change]  # by expert; None: the tensor is one matrix

    def values(self, rows: slice) -> mx.array:
        """Merged, in the dtype of the tensor; rounded to its format where it has one."""
        merged, form = self._merged(rows), self.info.lossless
        if form is not None:
            packed = self._packed(merged)
            merged = dequantised(packed.weight, packed.scales, packed.biases, form)
        return merged.astype(mx_dtype(self.info.dtype))

    def codes(self, rows: slice) -> Packed:
        return self._packed(self._merged(rows))

    @property
    def form(self) -> MLXFormat:
        assert self.info.lossless is not None
        return self.info.lossless

    def kept(self, form: MLXFormat) -> KeptChange:
        """What rounding to `form` leaves of the change, a part of the first axis at a time."""
        total, count = KeptChange(), self.info.shape[0]
        step = max(1, AT_ONCE // prod(self.info.shape[1:]))
        merging = replace(self, info=replace(self.info, lossless=form))
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            before = self.source.read(self.info.name, rows).astype(mx.float32)
            change = self._merged(rows) - before
            after = merging.values(rows).astype(mx.float32) - before
            products = change * change, change * after, (after - change) ** 2
            sums = mx.stack([product.sum() for product in products])
            total += KeptChange(*np.array(sums, np.float64).tolist())
        return total

    def _packed(self, merged: mx.array) -> Packed:
        form = self.form
        scales_in = mx_dtype(self.info.scales_dtype)
        values = merged.astype(scales_in) if form.mode == "affine" else merged
        weight, scales, *biases = mx.quantize(values, form.group_size, form.bits, form.mode)
        return Packed(weight, scales, biases[0] if biases else None)

    def _merged(self, rows: slice) -> mx.array:
        values = self.source.read(self.info.name, rows).astype(mx.float32)
        if len(self.info.shape) == 2:
            return self._changed(values, self.changes[None], rows)
        experts = zip(range(rows.start, rows.stop), values, strict=True)
        return mx.stack(
            [
                self._changed(one, self.changes[i], slice(None)) if i in self.changes else one
                for i, one in experts
            ]
        )

    def _changed(self, weight: mx.array, change: Change, rows: slice) -> mx.array:
        """Some rows (n, inputs) of a matrix, merged."""
        a, b = self._pair(change, weight.shape[1])
        whole = weight + b.T[rows] @ a.T
        name = change.module.magnitude
        if name is not None:
            lengths = self.matrices[name].reshape(-1).astype(mx.float32)[rows, None]
            whole = whole * lengths / mx.linalg.norm(whole, axis=1, keepdims=True)
        if not bool(mx.isfinite(whole).all()):
            raise CheckpointError(f"{change.module.path!r} of {self.adapter.file} is not finite.")
        return whole

    def _pair(self, change: Change, in_dims: int) -> tuple[mx.array, mx.array]:
        """A (inputs, r) and B (r, outputs) of a change, the scale in B."""
        module = change.module
        count = normalise(self.source.config).num_experts or None
        target = AdapterTarget(None, (), in_dims, count)  # of sizes alone
        left, right = (self.matrices[matrix].astype(mx.float32) for matrix in (module.a, module.b))
        a, b = (matrix[change.expert] for matrix in oriented(left, right, module, target))
        if change.half is not None:
            which, layout = change.half
            b = b[:, layout.half(which, b.shape[1])]
        return (b.T, a.T * module.scale) if change.of_table else (a, b * module.scale)

    def check_shapes(self) -> None:
        outputs, inputs = self.info.shape[-2:]
        for change in self.changes.values():
            a, b = self._pair(change, inputs)
            if (a.shape[0], b.shape[1]) != (inputs, outputs):
                raise CheckpointError(
                    f"The matrices for {change.module.path!r} in {self.adapter.file} are for "
                    f"{a.shape[0]} inputs and {b.shape[1]} outputs; {self.info.name} has "
                    f"{inputs} and {outputs}: the adapter was made for another model."
                )


def _changes(
    source: SourceModel, adapter: AdapterFolder
) -> Iterator[tuple[str, dict[int | None, Change]]]:
    """Name of a tensor -> what is done to each of its matrices, by expert; None: it has one."""
    builder = family(normalise(source.config).model_type)
    names = {builder.tensor_name(name): name for name in source.tensors}
    changes: dict[str, dict[int | None, Change]] = {}
    for module in adapter.modules:
        path = (builder.tensor_name(f"{module.path}.weight") or "").removesuffix(".weight")
        path = path or module.path
        places = list(_places(path, module, names.get, builder.packed_experts))
        if not places:
            raise CheckpointError(
                f"The adapter in {adapter.folder} changes {module.path[:200]!r}, which "
                f"{source.label} does not have: it was made for another model."
            )
        for name, expert, change in places:
            changes.setdefault(name, {})[expert] = change
    _check_complete(source, adapter, names, changes)
    yield from changes.items()


def _check_complete(
    source: SourceModel,
    adapter: AdapterFolder,
    names: Mapping[str | None, str],
    changed: Collection[str],
) -> None:
    """Raise CheckpointError where the adapter should change more of the base than it does.

    That is a matrix of the kind that it changes in other layers: configs that mean all linear
    modules, or say by an expression what they mean, fit norms and biases, too.
    """
    count = normalise(source.config).num_layers
    paths = {ours.removesuffix(".weight"): name for ours, name in names.items() if ours}
    kinds = {in_layer(path) for path, name in paths.items() if name in changed}
    for path, name in paths.items():
        if name not in changed and in_layer(path) in kinds and adapter.wants(path, count):
            raise CheckpointError(
                f"The adapter in {adapter.folder} has no matrices for {name!r} of {source.label}, "
                "though its config names it: it was made for another model."
            )


Find = Callable[[str], Any]  # our name of a tensor -> the source's, or None


def _places(
    path: str, module: AdapterModule, find: Find, layout: PackedExperts
) -> Iterator[tuple[str, int | None, Change]]:
    block, _, last = path.rpartition(".")
    root, _, number = block.rpartition(".")
    if module.layout in ("stack", "parameter"):
        halves = [(leaf, (i, layout)) for i, leaf in enumerate(_HALVES)]
        parts = halves if last == "gate_up_proj" else [(last, None)]
        base = block.removesuffix(".switch_mlp").removesuffix(".experts")
        for name, half in parts:
            yield from _stack(base, name, module, find, half)
    elif name := find(f"{path}.weight"):
        yield name, None, Change(module, 0, None, of_table=path == TABLE)
    elif root.endswith(".experts") and number.isdigit():
        base = root.removesuffix(".experts")
        for stack in (f"{base}.switch_mlp.{last}.weight", f"{root}.{last}.weight"):
            if name := find(stack):
                yield name, int(number), Change(module, 0, None)
                return


def _stack(
    base: str, name: str, module: AdapterModule, find: Find, half: Half | None
) -> Iterator[tuple[str, int | None, Change]]:
    count = module.shapes[0][0] // (module.rank if module.layout == "parameter" else 1)
    for stack in (f"{base}.switch_mlp.{name}.weight", f"{base}.experts.{name}.weight"):
        if tensor := find(stack):
            for i in range(count):
                yield tensor, i, Change(module, i, half)
            return
    for i in range(count):
        if tensor := find(f"{base}.experts.{i}.{name}.weight"):
            yield tensor, None, Change(module, i, half)
