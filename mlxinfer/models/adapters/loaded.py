"""The adapters of a loaded model: their matrices in memory, on the projections that they change.

All methods are called from the thread that owns MLX.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from ...layers.adapters import (
    Adapted,
    AdaptedExperts,
    AdaptedLinear,
    AdapterTarget,
    LowRank,
    SourceRows,
)
from ..decoder import Model
from ..jsonfields import Fields
from ..language import LanguageModel
from ..stage import StageModel
from ..weights.tensors import FileTensor, file_tensors
from .folder import PEFT_FILE, AdapterFolder, AdapterModule, find_file, layer_of, read_mlx_lm
from .peft import read_peft
from .targets import Placement, Targets, by_target

LEAST_RANK = 8  # of a stack: its rank is a power of two
_BLOCK = 256  # inputs by which a matrix is read off its product


def read_adapter(folder: str | Path) -> AdapterFolder:
    """Read an adapter's config and headers, in PEFT's layout or mlx-lm's. Reads no matrices."""
    file, config = find_file(Path(folder).expanduser())
    reader = read_peft if is_peft(file, config) else read_mlx_lm
    return reader(file, config)


def is_peft(file: Path, config: Fields) -> bool:
    """Whether a folder has PEFT's layout; raises CheckpointError where its files disagree."""
    peft = config.get("peft_type") is not None
    if peft != (file.name == PEFT_FILE):
        written = "PEFT" if peft else "mlx-lm"
        raise CheckpointError(f"{config.where} is {written}'s, and {file.name} is not.")
    return peft


class ModelAdapters:
    """Adapters by their numbers, on one model.

    A projection gets its place taken by an `Adapted` one when the first adapter names it, and back
    when the last one has gone: a model without adapters is as it was.
    """

    def __init__(self, model: LanguageModel) -> None:
        part = model.part if isinstance(model, StageModel) else model
        self._model = part if isinstance(part, Model) else None
        self._why_not = model.lacks.get("adapters")
        self._targets: Targets | None = None
        self._adapted: dict[int, Adapted] = {} if self._model is None else self._model.adapted
        self._norms: dict[int, mx.array] = {}  # (outputs,) squares of rows of the matrix, by target

    def check(self, adapter: AdapterFolder) -> list[Placement]:
        """Where an adapter's matrices go. Raises as `Targets.placements`, or for a zoo model."""
        if self._model is None or self._why_not is not None:
            raise UnsupportedModelError(f"This model takes no adapters: {self._why_not}.")
        if self._targets is None:
            self._targets = Targets(self._model)
        return self._targets.placements(adapter)

    def estimate(self, placements: Sequence[Placement]) -> int:
        """Bytes that the matrices will take, with the padding of stacks and DoRA's gains."""
        assert self._model is not None
        size, total = _dtype_of(self._model).size, 0
        for index, placed in self._on_this_rank(placements).items():
            target = self._model.adapter_targets[index]
            rank, parts = _rank_of(placed), len(target.sources)
            outputs = sum(source.num_rows for source in target.sources)
            total += (target.num_experts or 1) * rank * (parts * target.in_dims + outputs) * size
            if any(placement.module.magnitude is not None for placement in placed):
                total += outputs * size
        return total

    def _on_this_rank(self, placements: Sequence[Placement]) -> dict[int, list[Placement]]:
        assert self._model is not None
        targets = self._model.adapter_targets
        placed = [
            placement
            for placement in placements
            if targets[placement.target].projection is not None
        ]
        return by_target(placed)

    def new_number(self) -> int:
        assert self._model is not None
        self._model.active_adapters.last_number += 1
        return self._model.active_adapters.last_number

    def load(
        self, number: int, adapter: AdapterFolder, placements: Sequence[Placement]
    ) -> Iterator[None]:
        """Put an adapter on the model, yielding after each layer: other work may go on meanwhile.

        No row of a step may have its number before the end. Where it is not carried through, the
        number is to be removed. All ranks that have a part of each layer do the same pieces at the
        same time: lengths of DoRA are sums over them. The file is open from this call on, so it may
        be deleted; the call itself needs no MLX.
        """
        tensors = file_tensors(adapter.file)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        for module in adapter.modules:
            same = (shapes.get(module.a), shapes.get(module.b)) == module.shapes
            if not same or module.magnitude not in (None, *shapes):
                raise CheckpointError(f"{adapter.file} changed while it was being loaded.")
        return self._load(number, adapter, placements, tensors)

    def _load(
        self,
        number: int,
        adapter: AdapterFolder,
        placements: Sequence[Placement],
        tensors: Mapping[str, FileTensor],
    ) -> Iterator[None]:
        assert self._model is not None
        self._model.active_adapters.last_number = max(
            number, self._model.active_adapters.last_number
        )
        wanted, layer, broken = self._on_this_rank(placements), None, list[str]()
        self._make_room(wanted)
        for index, placed in wanted.items():
            target = self._model.adapter_targets[index]
            if layer not in (None, layer := layer_of(target.sources[0].path)):
                _require_finite(broken, adapter)
                yield
                self._make_room(wanted)  # `remove` of another takes away those that are empty
            made = self._low_rank(index, target, placed, tensors)
            if not made.is_finite:
                broken += [placement.module.path for placement in placed]
            self._adapted[index].add(number, made)
        _require_finite(broken, adapter)  # of a layer at its end: until then, ranks go together

    def remove(self, number: int) -> None:
        """Take an adapter off the model, even if it is loaded in part."""
        empty: dict[int, object] = {}
        for index, adapted in list(self._adapted.items()):
            adapted.remove(number)
            if not adapted.stacks:
                assert isinstance(adapted, AdaptedLinear | AdaptedExperts)
                empty[id(adapted)] = adapted.base
                del self._adapted[index]
        if empty:
            self._replace(empty)
            self._norms.clear()

    def bytes_of(self, number: int) -> int:
        return sum(adapted.bytes_of(number) for adapted in self._adapted.values())

    # -- targets -------------------------------------------------------------------------------

    def _make_room(self, places: Iterable[int]) -> None:
        assert self._model is not None
        taken: dict[int, object] = {}
        for index in places:
            if index not in self._adapted:
                made = self._adapt(self._model.adapter_targets[index])
                taken[id(self._model.adapter_targets[index].projection)] = made
                self._adapted[index] = made
        if taken:
            self._replace(taken)

    def _adapt(self, target: AdapterTarget) -> AdaptedLinear | AdaptedExperts:
        assert self._model is not None
        active, dtype = self._model.active_adapters, _dtype_of(self._model)
        widths = [source.num_rows for source in target.sources]
        base = target.projection
        assert base is not None, "another rank's"
        if target.num_experts is not None:
            return AdaptedExperts(base, target.num_experts, active, widths, dtype)  # type: ignore[arg-type]  # of experts, as the target says
        zeros = mx.zeros((1, target.in_dims), self._model.activation_dtype)
        return AdaptedLinear(base, active, widths, base(zeros)[0], dtype)  # type: ignore[arg-type,call-arg]  # of one matrix

    def _replace(self, parts: Mapping[int, object]) -> None:
        model = self._model
        assert model is not None
        roots = [model.layers, model.entry, model.lm_head]
        model.layers, model.entry, model.lm_head = replace_parts(roots, parts)  # type: ignore[misc]  # as many, of the same kinds

    # -- matrices -------------------------------------------------------------------------------

    def _low_rank(
        self,
        index: int,
        target: AdapterTarget,
        placed: Sequence[Placement],
        tensors: Mapping[str, FileTensor],
    ) -> LowRank:
        rank, count = _rank_of(placed), target.num_experts or 1
        sides: list[mx.array] = []
        matrices: list[mx.array | None] = []
        gain: list[mx.array] = []
        for part, source in enumerate(target.sources):
            pairs = [
                _pair(placement, source, tensors, target)
                for placement in placed
                if placement.part == part
            ]
            a, b = _joined(pairs, count, target.in_dims, source.num_rows)
            sides.append(mx.pad(a, [(0, 0), (0, 0), (0, rank - a.shape[2])]))
            gain.append(self._gain(index, part, placed, (a, b), tensors))
            matrices.append(b * (1 + gain[-1]) if pairs else None)
        b = self._adapted[index].outputs.pieces(matrices, rank)
        has_gain = any(placement.module.magnitude is not None for placement in placed)
        return LowRank(mx.concatenate(sides, axis=2), b, mx.concatenate(gain) if has_gain else None)

    def _gain(
        self,
        index: int,
        part: int,
        placed: Sequence[Placement],
        matrices: tuple[mx.array, mx.array],
        tensors: Mapping[str, FileTensor],
    ) -> mx.array:
        """(outputs of the part,) DoRA's length over the length of the changed row, less 1.

        |W + B A|^2 = |W|^2 + 2 B (W A^T) + B (A A^T) B^T, row by row: W itself is never made.
        """
        assert self._model is not None
        target = self._model.adapter_targets[index]
        source = target.sources[part]
        lengths = [
            (placement, placement.module.magnitude)
            for placement in placed
            if placement.part == part and placement.module.magnitude is not None
        ]
        if not lengths:
            return mx.zeros((source.num_rows,))
        ((placement, name),) = lengths
        start = sum(earlier.num_rows for earlier in target.sources[:part])
        rows = slice(start, start + source.num_rows)
        a, b = matrices[0][0], matrices[1][0]  # (in_dims, r), (r, outputs)
        bias = self._adapted[index].bias
        product = self._base(index)(a.T.astype(self._model.activation_dtype)).astype(mx.float32)
        if bias is not None:
            product = product - bias
        square = self._squares(index)[rows] + 2 * (b * product[:, rows]).sum(axis=0)
        square = square + (b * ((a.T @ a) @ b)).sum(axis=0)
        if target.inputs is not None and self._model.link is not None:  # of some of the inputs
            square = self._model.link.sum(square, "adapters")
            mx.eval(square)  # now: all ranks do their sums in one order
        length = tensors[name].read().reshape(-1).astype(mx.float32)
        length = _outputs(length, placement, source, axis=0)
        return length / mx.sqrt(mx.maximum(square, 1e-30)) - 1

    def _base(self, index: int) -> AdaptedLinear:
        adapted = self._adapted[index]
        assert isinstance(adapted, AdaptedLinear)
        assert self._model is not None
        self._model.active_adapters.begin(None)
        return adapted

    def _squares(self, index: int) -> mx.array:
        """(outputs,) float32, the squared lengths of the rows of a projection's matrix."""
        if index not in self._norms:
            assert self._model is not None
            target, dtype = self._model.adapter_targets[index], self._model.activation_dtype
            base, bias = self._base(index), self._adapted[index].bias
            total = mx.zeros(())
            for start in range(0, target.in_dims, _BLOCK):
                inputs = mx.arange(start, min(start + _BLOCK, target.in_dims))
                ones = (mx.arange(target.in_dims)[None] == inputs[:, None]).astype(dtype)
                columns = base(ones).astype(mx.float32)
                columns = columns if bias is None else columns - bias
                total = total + mx.square(columns).sum(axis=0)
                mx.eval(total)
            self._norms[index] = total
        return self._norms[index]


def _require_finite(broken: Sequence[str], adapter: AdapterFolder) -> None:
    """Raise CheckpointError where matrices of some modules hold NaN or infinity."""
    if broken:
        names = ", ".join(broken[:3])
        raise CheckpointError(f"{adapter.file} holds NaN or infinity for {names}.")


def _dtype_of(model: Model) -> mx.Dtype:
    """The dtype of adapters' matrices: MLX's CPU backend gathers products of float32 only."""
    return model.activation_dtype if mx.metal.is_available() else mx.float32


def _rank_of(placed: Sequence[Placement]) -> int:
    parts: dict[int, int] = {}
    experts: set[tuple[int, str]] = set()
    for placement in placed:
        key = placement.part, placement.module.path.rpartition(".")[2]
        if placement.expert is not None:
            if key in experts:
                continue
            experts.add(key)
        parts[placement.part] = parts.get(placement.part, 0) + placement.module.rank
    rank = LEAST_RANK
    while rank < max(parts.values()):
        rank *= 2
    return rank


_Pair = tuple[mx.array, mx.array, int | None]
"""A (E, in_dims, r) and B (E, r, outputs) in float32, and the expert that they are for."""


def _pair(
    placement: Placement,
    source: SourceRows,
    tensors: Mapping[str, FileTensor],
    target: AdapterTarget,
) -> _Pair:
    module = placement.module
    a, b = (tensors[name].read().astype(mx.float32) for name in (module.a, module.b))
    a, b = oriented(a, b, module, target)
    if target.inputs is not None:
        a = a[:, target.inputs.start : target.inputs.start + target.in_dims]
    b = _outputs(b * module.scale, placement, source, axis=2)
    return a, b, placement.expert


def oriented(
    a: mx.array, b: mx.array, module: AdapterModule, target: AdapterTarget
) -> tuple[mx.array, mx.array]:
    """A (E, in_dims, r) and B (E, r, outputs) of either layout."""
    if module.layout == "mlx":
        return a[None], b[None]
    if module.layout == "peft":
        return a.T[None], b.T[None]
    if module.layout == "stack":
        return a.swapaxes(1, 2), b.swapaxes(1, 2)
    count = target.num_experts or 1
    first = mx.unflatten(a, 0, (count, -1))  # (E, r, ...)
    second = mx.unflatten(b, 1, (-1, count)).transpose(2, 0, 1)  # (E, ..., r)
    if first.shape[2] == target.all_inputs:
        return first.swapaxes(1, 2), second.swapaxes(1, 2)
    return second, first  # PEFT before 0.18 took the outputs of such stacks for inputs


def _outputs(values: mx.array, placement: Placement, source: SourceRows, *, axis: int) -> mx.array:
    if placement.taken is not None:
        values = mx.take(values, mx.array(placement.taken), axis=axis)
    if placement.put is not None:
        index = np.full(placement.total, values.shape[axis], np.int32)
        index[placement.put] = np.arange(len(placement.put))
        pads = [(0, 0)] * axis + [(0, 1)] + [(0, 0)] * (values.ndim - axis - 1)
        values = mx.take(mx.pad(values, pads), mx.array(index), axis=axis)
    if source.rows is not None:
        values = mx.take(values, mx.array(source.rows), axis=axis)
    return values if source.factor is None else values * source.factor


def _joined(
    pairs: Sequence[_Pair], count: int, in_dims: int, outputs: int
) -> tuple[mx.array, mx.array]:
    """All pairs of one part as one: A (E, in_dims, r) and B (E, r, outputs)."""
    whole = [(a, b) for a, b, expert in pairs if expert is None]
    single = {(expert, i): (a, b) for i, (a, b, expert) in enumerate(pairs) if expert is not None}
    if single:
        experts: dict[int, list[tuple[mx.array, mx.array]]] = {}
        for (expert, _), pair in single.items():
            experts.setdefault(expert, []).append(pair)
        whole.append(_stacked(experts, count, in_dims, outputs))
    if not whole:
        return mx.zeros((count, in_dims, 0)), mx.zeros((count, 0, outputs))
    sides, matrices = [a for a, _ in whole], [b for _, b in whole]
    return mx.concatenate(sides, axis=2), mx.concatenate(matrices, axis=1)


def _stacked(
    experts: Mapping[int, Sequence[tuple[mx.array, mx.array]]],
    count: int,
    in_dims: int,
    outputs: int,
) -> tuple[mx.array, mx.array]:
    """The matrices of single experts, stacked; zeros for those that have none."""
    joined = {
        expert: (
            mx.concatenate([a[0] for a, _ in placed], axis=1),
            mx.concatenate([b[0] for _, b in placed], axis=0),
        )
        for expert, placed in experts.items()
    }
    rank = max(a.shape[1] for a, _ in joined.values())
    none = mx.zeros((in_dims, rank)), mx.zeros((rank, outputs))
    pairs = [joined.get(expert, none) for expert in range(count)]
    return (
        mx.stack([mx.pad(a, [(0, 0), (0, rank - a.shape[1])]) for a, _ in pairs]),
        mx.stack([mx.pad(b, [(0, rank - b.shape[0]), (0, 0)]) for _, b in pairs]),
    )


Replacement = Mapping[int, object]
"""id of an object -> what takes its place."""


def replace_parts(root: object, replacement: Replacement) -> object:
    """`root` with parts replaced, wherever slots, lists and tuples of this package lead to them.

    Objects are changed in place; a tuple is made anew.
    """
    return _replaced(root, replacement, set())


def _replaced(item: object, replacement: Replacement, seen: set[int]) -> object:
    if id(item) in replacement:
        return replacement[id(item)]
    if isinstance(item, list | tuple):
        made = [_replaced(part, replacement, seen) for part in item]
        if all(new is old for new, old in zip(made, item, strict=True)):
            return item
        return made if isinstance(item, list) else tuple(made)
    if id(item) in seen or not type(item).__module__.startswith("mlxinfer."):
        return item
    seen.add(id(item))
    for name in (n for kind in type(item).__mro__ for n in getattr(kind, "__slots__", ())):
        value = getattr(item, name)
        new = _replaced(value, replacement, seen)
        if new is not value:
            setattr(item, name, new)
    return item
