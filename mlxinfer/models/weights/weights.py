"""Strictly checked arrays of a checkpoint, and matrices made of them.

A family takes each tensor by name and shape. A tensor that is missing, has another shape or is left
over at the end is an error that names it. Matrices that read the same input are fused, outputs side
by side: fewer operations a token.

`Weights` is composed: a source says which tensors there are (a checkpoint, or a rank's part of it),
a placing says where they go (memory, slots for experts, or nowhere), and a stage says which layers
are built at all. Families see none of that.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from ...layers.adapters import AdapterTarget, InputSlice, SourceRows
from ...layers.linear import (
    DenseEmbedding,
    Embedding,
    Projection,
    QuantizedEmbedding,
    QuantizedLinear,
    RotatedEmbedding,
    Rotation,
)
from ...layers.mlp import FeedForward
from ...layers.moe import MoE
from ...layers.ranks import AbsentLayer, AbsentTable, Link, SplitEmbedding, SplitHead, Summed, Sums
from ...layers.step import Layer
from ..language import arrays
from ..quantization import QuantFormat, Quantization, format_of_shapes
from .matrix import StoredMatrix, combined, fused
from .placing import IN_MEMORY, NOWHERE, InMemory
from .row_table import FileRows
from .source import Checkpoint
from .tensors import FLOATS, Tensor, choose_dtype, loaded, side_by_side, stacked

_PARTS = ("weight", "scales", "biases")
Watch = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class StagePart:
    """The part of a model that a pipeline stage has."""

    layers: range
    has_tables: bool  # and all else that is in no layer

    def has(self, path: str) -> bool:
        """Whether the stage has the layer that a path is in, or the tables if it is in none."""
        index = layer_of(path)
        return self.has_tables if index is None else index in self.layers


def layer_of(name: str) -> int | None:
    """The layer that a tensor or a path of the decoder is in; None: in none."""
    front, _, rest = name.partition("model.layers.")
    number = rest.partition(".")[0]
    return int(number) if not front and number.isdecimal() else None


class Weights:
    """The tensors of one checkpoint, taken one by one.

    Args:
        quantization: of the checkpoint; None: nothing is quantised.
        dtype: of activations, see `choose_dtype`.
        fits_float16: whether activations stay below 65,504.
        watch: is called with the bytes that are placed so far, and all bytes.
        adaptable: note which projections adapters may change.
        link: to the other ranks, where the source has a rank's part of each tensor.
        stage: the layers to build; None: all of them.
        wrap: is given each projection with the paths it is made of, and returns what to use.
        table: makes the table of some paths, in a dtype; None: it stays in the checkpoint's files.

    Attributes:
        adapter_targets: projections that adapters may change; None: not noted.
        bytes_read: bytes of the tensors that were placed.
    """

    def __init__(
        self,
        source: Checkpoint,
        placing: InMemory = IN_MEMORY,
        *,
        quantization: Quantization | None = None,
        dtype: str = "auto",
        fits_float16: bool = True,
        watch: Watch | None = None,
        adaptable: bool = False,
        link: Link | None = None,
        stage: StagePart | None = None,
        wrap: Callable[[Projection, Sequence[str]], Projection] | None = None,
        table: Callable[[Sequence[str], mx.Dtype], Any] | None = None,
    ) -> None:
        self.adapter_targets: list[AdapterTarget] | None = [] if adaptable else None
        self.share = source.share
        self.dtype = choose_dtype(source.tensors, dtype, fits_float16=fits_float16)
        self.bytes_read = 0
        self._source = source
        self._given = placing
        self._placing = NOWHERE if stage and not stage.has_tables else placing
        self._quantization = quantization
        self._watch, self._taken_bytes = watch, 0
        self._link = link
        self._sums = None if link is None else Sums(link)
        self._stage = stage
        self._wrap, self._table = wrap, table

    # -- tensors --------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def has_shape(self, name: str, shape: Sequence[int]) -> bool:
        return self._source.has_shape(name, shape)

    def evaluate(self, arrays: Sequence[mx.array]) -> None:
        """Compute arrays now, so that the arrays they were made of can be dropped."""
        self._placing.compute(arrays)
        if self._watch is not None:
            self._watch(self._taken_bytes, self._source.num_bytes)

    def raw(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dtype: mx.Dtype | None = None,
        parts: Sequence[int] | None = None,
    ) -> mx.array:
        """The tensor as it is stored; it must have this shape, and this dtype if one is given.

        Args:
            dtype: expected; None: any.
            parts: how many outputs of each kind stand side by side; None: they are of one kind.
        """
        return loaded(self._found(name, shape, [dtype] if dtype else None, parts))

    def take(
        self,
        name: str,
        shape: Sequence[int],
        *,
        offset: float = 0.0,
        parts: Sequence[int] | None = None,
    ) -> mx.array:
        """`raw` in the activations' dtype, `offset` added before it is rounded to that."""
        array = loaded(self._found(name, shape, FLOATS, parts))
        if offset:
            array = array.astype(mx.float32) + offset
        return array.astype(self.dtype)

    def _found(
        self,
        name: str,
        shape: Sequence[int],
        dtypes: Collection[mx.Dtype] | None = None,
        parts: Sequence[int] | None = None,
    ) -> Tensor:
        """As `raw`, but not read yet, and with a choice of dtypes."""
        tensor = self._source.take(name, shape, parts)
        self._taken_bytes += tensor.nbytes
        if self._placing is not NOWHERE:
            self.bytes_read += tensor.nbytes
        if dtypes is not None and tensor.dtype not in dtypes:
            expected = ", ".join(str(dtype).removeprefix("mlx.core.") for dtype in dtypes)
            raise CheckpointError(
                f"Tensor {self._source.original(name)!r} is {tensor.dtype}; expected one of "
                f"{expected}."
            )
        return self._placing.tensor(tensor)

    def same_matrix(self, path: str, other: str) -> bool:
        """Whether a matrix at `path` exists and equals another bit for bit."""
        parts = [part for part in _PARTS if f"{path}.{part}" in self]
        return all(f"{other}.{part}" in self for part in parts) and all(
            self._placing.same(*(self._source.rows(f"{matrix}.{part}") for matrix in (path, other)))
            for part in parts
        )

    def drop_below(self, fronts: Sequence[str]) -> None:
        if fronts:
            self.drop(*[name for name in self._source.tensors if name.startswith(tuple(fronts))])

    def drop(self, *names: str) -> None:
        self._source.drop(*names)

    def finish(self) -> None:
        """Raise CheckpointError if a tensor was not taken."""
        names = sorted(self._source.original(name) for name in self._source.tensors)
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(
                f"The checkpoint has tensors that this architecture does not: "
                f"{', '.join(map(repr, names[:3]))}{more}."
            )
        for i, target in enumerate(targets := self.adapter_targets or []):
            if self._stage is not None and not self._stage.has(target.sources[0].path):
                targets[i] = replace(target, projection=None)

    # -- matrices -------------------------------------------------------------------------------

    def linear(
        self,
        path: str,
        out_dims: int,
        in_dims: int,
        *,
        bias: bool = False,
        order: Sequence[int] | None = None,
        parts: Sequence[int] | None = None,
    ) -> Projection:
        """The projection at `path`, dense or quantised as the checkpoint has it.

        Args:
            order: (out_dims,) the checkpoint's index of each output; None: as it is.
            parts: how many outputs of each kind stand side by side; None: they are of one kind.
        """
        stored = self.matrix(path, (out_dims, in_dims), bias=bias, parts=parts)
        made = (stored if order is None else stored.reordered(order)).projection()
        if self._gives_summands(path):
            assert self._sums is not None
            made = Summed(made, self._sums)
        return made if self._wrap is None else self._wrap(made, [path])

    def fused(
        self,
        paths: Sequence[str],
        out_dims: Sequence[int],
        in_dims: int,
        *,
        bias: bool = False,
        orders: Sequence[Sequence[int] | None] | None = None,
    ) -> Projection:
        """Projections of one input as one matrix, outputs in the order of `paths`.

        Args:
            orders: of each one's outputs, as in `linear`; None: all as they are.
        """
        parts = []
        for path, rows, order in zip(paths, out_dims, orders or [None] * len(paths), strict=True):
            stored = self.matrix(path, (rows, in_dims), bias=bias)
            parts.append(stored if order is None else stored.reordered(order))
        made = fused(parts)
        return made if self._wrap is None else self._wrap(made, paths)

    def matrix(
        self,
        path: str,
        shape: tuple[int, ...],
        *,
        bias: bool = False,
        parts: Sequence[int] | None = None,
    ) -> StoredMatrix:
        """One matrix (out_dims, in_dims), or (E, out_dims, in_dims); `parts`: see `linear`."""
        stored = self._matrix(path, shape, bias, parts, of_experts=len(shape) > 2)
        return stored if len(shape) < 3 else self._placing.experts(stored)

    def experts(
        self,
        stack: str,
        single: str,
        shape: tuple[int, int, int],
        *,
        bias: bool = False,
        parts: Sequence[int] | None = None,
    ) -> StoredMatrix:
        """One matrix per expert (num_experts, out_dims, in_dims).

        Matrices that are stored one by one are stacked where they are read to.

        Args:
            stack: path of one tensor of all, as MLX checkpoints have it.
            each: path of one expert's, "{}" in place of its number, as hub checkpoints have it.
            bias: whether there is one; those of all experts are one tensor.
            parts: see `linear`.
        """
        count, rows, in_dims = shape
        if not self._source.stored_apart(stack, single, shape):
            return self.matrix(stack, shape, bias=bias, parts=parts)
        matrices = [
            self._matrix(single.format(i), (rows, in_dims), False, parts, of_experts=True)
            for i in range(count)
        ]
        if len({one.form for one in matrices}) > 1:
            raise CheckpointError(f"Experts of {single!r} have different formats; expected one.")
        (rows_of,) = matrices[0].sources
        added = self.take(f"{stack}.bias", (count, rows), parts=parts) if bias else None
        if added is not None and self._gives_summands(single.format(0)):
            added = self.once(added)
        return self._placing.experts(
            replace(
                combined(matrices, lambda arrays, _: stacked(arrays)),
                bias=added,
                sources=(replace(rows_of, path=stack),),
            )
        )

    def rows_in_files(self, paths: Sequence[str], width: int) -> FileRows:
        """A table that stays in its files, (rows, width), dense or quantised.

        Args:
            paths: of its parts, one behind the other.
            width: numbers of a row.
        """
        tables = [self._fields_in_files(path, width) for path in paths]
        if self._table is not None:
            return self._table(paths, self.dtype)
        forms = {form for form, _ in tables}
        by_field = list(zip(*[fields for _, fields in tables], strict=len(forms) == 1))
        if len(forms) > 1 or any(len({field.dtype for field in parts}) > 1 for parts in by_field):
            raise CheckpointError(f"Parts of {paths[0]!r} have different formats; expected one.")
        fields = [side_by_side(parts, -2) for parts in by_field]
        return FileRows(fields, next(iter(forms)), self.dtype)

    def _fields_in_files(self, path: str, width: int) -> tuple[QuantFormat | None, list[Tensor]]:
        shape = self.shape(f"{path}.weight")[0], width
        if f"{path}.scales" not in self:
            return None, [self._found(f"{path}.weight", shape, FLOATS)]
        form, words, groups = self._packing(path, shape)
        affine = form.mode == "affine"
        kinds = FLOATS if affine else [mx.uint8]
        fields = [self._found(f"{path}.weight", words, [mx.uint32])]
        names = ("scales", "biases") if affine else ("scales",)
        return form, [*fields, *[self._found(f"{path}.{n}", groups, kinds) for n in names]]

    def _matrix(
        self,
        path: str,
        shape: tuple[int, ...],
        bias: bool,
        parts: Sequence[int] | None,
        *,
        of_experts: bool,
    ) -> StoredMatrix:
        """As `matrix`; `of_experts`: all of them, or one."""

        def floats(name: str, shape: Sequence[int]) -> Tensor:
            tensor = self._found(f"{path}.{name}", shape, FLOATS, parts)
            return self._placing.rounded(name, tensor, self.dtype, of_experts=of_experts)

        offset = self.take(f"{path}.bias", shape[:-1], parts=parts) if bias else None
        if f"{path}.scales" not in self:
            stored = StoredMatrix(floats("weight", shape), offset)
        else:
            form, words, groups = self._packing(path, shape)
            weight = self._found(f"{path}.weight", words, [mx.uint32], parts)
            if form.mode == "affine":
                scales, biases = (floats(name, groups) for name in ("scales", "biases"))
                stored = StoredMatrix(weight, offset, scales, biases, form)
            else:
                scales = self._found(f"{path}.scales", groups, [mx.uint8], parts)
                stored = StoredMatrix(weight, offset, scales, None, form)
        stored = replace(stored, rotation=self._rotation(path, shape[-1]))
        if offset is not None and self._gives_summands(path):
            stored = replace(stored, bias=self.once(offset))
        return self.named(stored, path, f"{path}.weight")

    def _rotation(self, path: str, in_dims: int) -> Rotation | None:
        """The basis in which a matrix reads its inputs; None: as they are."""
        block = 0 if self._quantization is None else self._quantization.blocks.get(path, 0)
        if not block:
            return None
        signs = self.raw(f"{path}.signs", (in_dims,), dtype=mx.float32)
        if in_dims % block:
            raise CheckpointError(
                f"{path} has {in_dims} inputs, which blocks of {block} do not divide."
            )
        if self._placing is not NOWHERE and not bool((mx.abs(signs) == 1).all()):
            raise CheckpointError(f"Tensor {path + '.signs'!r} holds other numbers than 1 and -1.")
        return Rotation(signs, block)

    def named(
        self, stored: StoredMatrix, path: str, tensor: str, *, outputs_axis: int = -2
    ) -> StoredMatrix:
        """A matrix with its name in the checkpoint, for adapters.

        Args:
            outputs_axis: of that tensor, counted from the end.
        """
        stored = replace(stored, targets=self.adapter_targets)
        slices, num_rows = self._source.slices(tensor), stored.weight.shape[-2]
        if slices is None:
            return replace(stored, sources=(SourceRows(path, num_rows, num_rows),))
        if slices.axis == outputs_axis:
            rows = np.concatenate([np.arange(*span, dtype=np.int32) for span in slices.spans])
            return replace(stored, sources=(SourceRows(path, len(rows), slices.stored, rows),))
        ((start, stop),) = slices.spans
        inputs_each = stored.in_dims // (stop - start)  # inputs of a word, or of a group
        return replace(
            stored,
            sources=(SourceRows(path, num_rows, num_rows),),
            inputs=InputSlice(start * inputs_each, slices.stored * inputs_each),
        )

    def norm(self, path: str, dims: int, *, offset: float = 0.0) -> mx.array:
        """The weights of a norm over all of `dims` numbers; `offset`: see `take`."""
        weight = self.take(f"{path}.weight", (dims,), offset=offset)
        if self._source.slices(f"{path}.weight") is not None:
            raise UnsupportedModelError(
                f"{path} is one norm over what several ranks would have: divide this model by "
                "layers (pipeline), or run it with ranks=1."
            )
        return weight

    def _gives_summands(self, path: str) -> bool:
        """Whether this rank's matrix has only some of the inputs, so that ranks add up outputs."""
        slices = [self._source.slices(f"{path}.{part}") for part in _PARTS]
        return any(one is not None and one.axis == -1 for one in slices)

    def _packing(
        self, path: str, shape: tuple[int, ...]
    ) -> tuple[QuantFormat, tuple[int, ...], tuple[int, ...]]:
        *rows, in_dims = shape
        form = self._format_of(path, in_dims)
        if in_dims % form.group_size:
            ranks = "" if self.share is None else f" on one of {self.share.size} ranks (use fewer)"
            raise CheckpointError(
                f"{path} has {in_dims} inputs{ranks}, which groups of {form.group_size} do not "
                "divide."
            )
        words = (*rows, in_dims * form.bits // 32)
        return form, words, (*rows, in_dims // form.group_size)

    def _format_of(self, path: str, in_dims: int) -> QuantFormat:
        """The format of a layer that has scales: as the config states it, if its shapes allow that.

        A rank has `in_dims` of the inputs, and stored shapes are those of the whole matrix, for
        which there may be several widths.
        """
        original = self._source.original(f"{path}.scales").removesuffix(".scales")
        if self._quantization is None:
            raise CheckpointError(
                f"Tensor {original + '.scales'!r} belongs to a quantised layer, but config.json "
                "has no quantization."
            )
        tensors = self._source.tensors
        scales, words = tensors[f"{path}.scales"], tensors.get(f"{path}.weight")
        fitting: set[QuantFormat] = set()
        if words is not None and words.ndim and scales.ndim:
            widths = {in_dims} if self.share is None else {*self.share.wholes(in_dims), in_dims}
            integers = scales.dtype == mx.uint8
            sizes = words.shape[-1], scales.shape[-1]
            forms = [format_of_shapes(w, *sizes, integer_scales=integers) for w in widths - {0}]
            fitting = {form for form in forms if form}
        stated = self._quantization.of(original)
        if self.share is not None and stated in fitting:
            return stated
        if len(fitting) > 1:
            assert self.share is not None
            raise CheckpointError(
                f"The format of {original!r} cannot be told from its tensors on one of "
                f"{self.share.size} ranks; state it in config.json."
            )
        return self._quantization.of(original, next(iter(fitting), None))

    # -- parts of a model -----------------------------------------------------------------------

    def layer(self, index: int, build: Callable[[int], Layer]) -> Layer:
        """Layer `index` of a decoder, built and computed, or its stand-in on another stage."""
        before = self._placing
        is_here = self._stage is None or index in self._stage.layers
        self._placing = self._given if is_here else NOWHERE
        try:
            layer = build(index)
            if not is_here:
                return AbsentLayer(layer.mixers)
            self.evaluate(list(arrays(layer)))
            return layer
        finally:
            self._placing = before

    def moe(self, **parts: Any) -> MoE:
        return self._placing.mixture(**parts)

    def block(self, block: FeedForward) -> FeedForward:
        """A block of several summands, made of matrices from here: one sum over the ranks."""
        return block if self._sums is None else Summed(block, self._sums)

    def once(self, bias: mx.array) -> mx.array:
        """A bias that one rank adds to a sum over the ranks, and the others do not."""
        return bias if self.share is None or self.share.rank == 0 else mx.zeros_like(bias)

    def head(self, path: str, shape: tuple[int, int]) -> Projection:
        """The output projection (vocab_size, hidden_size)."""
        if self._stage is not None and not self._stage.has_tables:
            self.drop_below([f"{path}."])
            if self.adapter_targets is not None:
                named = SourceRows(path, shape[0], shape[0])
                self.adapter_targets.append(AdapterTarget(None, (named,), shape[1], None))
            return AbsentTable()
        if self._link is None:
            return self.linear(path, *shape)
        table = self._rows(path, shape)
        count = table.weight.shape[0]
        rows = np.arange(count, dtype=np.int32) + self._link.rank * count
        rows = rows.clip(max=shape[0] - 1)  # more than these are padding
        source = SourceRows(path, count, shape[0], rows)
        table = replace(table, sources=(source,), targets=self.adapter_targets)
        return SplitHead(table.projection(), shape[0], self._link)

    def embedding(self, path: str, shape: tuple[int, int]) -> Embedding:
        """The token table (vocab_size, hidden_size)."""
        if self._stage is not None and not self._stage.has_tables:
            self.drop_below([f"{path}."])
            return AbsentTable()
        if self._link is None:
            return self._embedding(self.matrix(path, shape))
        table = self._rows(path, shape)
        part = self._embedding(table)
        return SplitEmbedding(part, table.weight.shape[0], shape[0], self._link)

    def _embedding(self, table: StoredMatrix) -> Embedding:
        made: Embedding
        if table.form is None:
            made = DenseEmbedding(loaded(table.weight))
        else:
            packed = QuantizedLinear(*table.packed(), **asdict(table.form))
            made = QuantizedEmbedding(packed, self.dtype)
        return made if table.rotation is None else RotatedEmbedding(made, table.rotation)

    def _rows(self, path: str, shape: tuple[int, int]) -> StoredMatrix:
        """A rank's rows of a table, zeros behind the last one."""
        assert self.share is not None
        count = -(-shape[0] // self.share.size)
        form: QuantFormat | None = None
        words: tuple[int, ...] = shape
        groups: tuple[int, ...] = ()
        if f"{path}.scales" in self:
            form, words, groups = self._packing(path, shape)

        def rows(name: str, expected: tuple[int, ...]) -> mx.array:
            full = f"{path}.{name}"
            part = self._source.rows(full) if full in self else None
            self._source.take(full, expected)  # raises if it is not there, or has another shape
            assert part is not None
            self._taken_bytes += part.nbytes
            self.bytes_read += part.nbytes
            array = loaded(part)
            if array.dtype in FLOATS:
                array = array.astype(self.dtype)
            return mx.pad(array, [(0, count - len(array)), (0, 0)])

        weight = rows("weight", words)
        if form is None:
            return StoredMatrix(weight)
        biases = rows("biases", groups) if form.mode == "affine" else None
        return StoredMatrix(weight, None, rows("scales", groups), biases, form)
