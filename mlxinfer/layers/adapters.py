"""Adapters on projections: low-rank matrices that some rows of a step have beside the model's own.

LoRA (arXiv 2106.09685): y = W x + B A x, with the scale in B. DoRA (arXiv 2402.09353): the rows of
W + B A have learned lengths, so that y = g (W x + B A x) with g = length / |W + B A|, row by row.

T = tokens of the step, n = those of them that have an adapter here, S = adapters of a stack, R =
its rank, P = parts of a projection that is several matrices of a checkpoint side by side, D =
outputs of the smallest piece that all parts consist of, M = pieces of all outputs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .linear import Projection
from .moe import ExpertProjection, Routed, row_indices
from .step import Rows

# From this many rows of each adapter on, these are multiplied adapter by adapter, as matrices;
# below, each row meets its adapter's matrices in one operation for all rows.
LONG_RUN = 32
MAX_PIECES = 32  # of more pieces, B is one matrix with zeros between the parts


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Outputs of a layer, side by side, that come from one matrix of the checkpoint."""

    path: str  # of that matrix, as the decoder has it
    num_rows: int  # outputs, here
    total: int  # outputs of that matrix
    rows: NDArray[np.int32] | None = None  # which outputs of that matrix; None: all, in order
    factor: mx.array | None = None  # () or (num_rows,), what the matrix is multiplied with here

    def chosen(self, rows: NDArray[np.int32]) -> "SourceRows":
        """The same with some of the outputs, in the order of `rows`."""
        factor = self.factor
        if factor is not None and factor.ndim:
            factor = factor[mx.array(rows)]
        rows = rows if self.rows is None else self.rows[rows]
        return SourceRows(self.path, len(rows), self.total, rows, factor)

    def scaled(self, factor: mx.array) -> "SourceRows":
        whole = factor if self.factor is None else self.factor * factor
        return SourceRows(self.path, self.num_rows, self.total, self.rows, whole)


@dataclass(frozen=True, slots=True)
class InputSlice:
    """The inputs of a checkpoint's matrix that one rank has, side by side."""

    start: int
    total: int


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A projection of a model, and the checkpoint's matrices that it was made of."""

    projection: Projection | ExpertProjection | None  # None: another rank has its layer
    sources: tuple[SourceRows, ...]  # of its outputs, side by side
    in_dims: int
    num_experts: int | None  # None: it is no projection of experts
    inputs: InputSlice | None = None  # where its outputs are summed over ranks; None: it has all

    @property
    def all_inputs(self) -> int:
        return self.in_dims if self.inputs is None else self.inputs.total


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The rows of a step that have an adapter of a stack, those of one adapter side by side."""

    rows: mx.array | None  # (n,) int32 among the T rows; None: all of them, as they are
    places: mx.array  # (n,) uint32 the adapter's place in the stack
    runs: tuple[tuple[int, int, int], ...]  # first of the n rows, one past the last, place
    host_rows: Rows  # (n,) as `rows`

    @property
    def is_long(self) -> bool:
        return len(self.host_rows) >= LONG_RUN * len(self.runs)


class ActiveAdapters:
    """The adapters of the step that is being built, as all adapted layers of a model see them.

    Rows are sorted once for all layers that have the same adapters.

    Attributes:
        last_number: that an adapter of the model ever had; no two have the same.
    """

    __slots__ = ("_numbers", "_plans", "last_number")

    def __init__(self) -> None:
        self.last_number = 0
        self._numbers: dict[int, Rows] = {}  # by rows of a layer's input
        self._plans: dict[tuple[tuple[int, ...], int, int], AdapterPlan | None] = {}

    def begin(self, numbers: Rows | None, read_rows: Rows | None = None) -> None:
        """Set the adapter of each row (T,), 0 for none, for the layers called next.

        Args:
            numbers: None: no row has one.
            read_rows: fewer than T rows, which the last layers get alone; None: all get all.
        """
        self._numbers, self._plans = {}, {}
        if numbers is not None and read_rows is not None:
            self._numbers[len(read_rows)] = numbers[read_rows]
        if numbers is not None:
            self._numbers[len(numbers)] = numbers

    def plan(
        self, members: tuple[int, ...], num_rows: int, rows_per_token: int = 1
    ) -> AdapterPlan | None:
        """The rows with one of `members` as their adapter; None: there are none.

        Args:
            members: numbers of the adapters of a stack, in their order.
            rows_per_token: of these for each row of the step.
        """
        if not self._numbers:
            return None
        key = members, num_rows, rows_per_token
        if key not in self._plans:
            numbers = self._numbers[num_rows // rows_per_token]
            numbers = numbers if rows_per_token == 1 else np.repeat(numbers, rows_per_token)
            self._plans[key] = _planned(numbers, members)
        return self._plans[key]


def _planned(numbers: Rows, members: tuple[int, ...]) -> AdapterPlan | None:
    place_of = {number: place for place, number in enumerate(members)}
    places = np.array([place_of.get(number, -1) for number in numbers.tolist()], np.int32)
    order = np.argsort(places, kind="stable")
    rows = order[int((places < 0).sum()) :].astype(np.int32)
    if not len(rows):
        return None
    sorted_places = places[rows]
    starts = [0, *(np.flatnonzero(np.diff(sorted_places)) + 1).tolist()]
    ends = [*starts[1:], len(rows)]
    runs = tuple((a, b, int(sorted_places[a])) for a, b in zip(starts, ends, strict=True))
    same = len(rows) == len(numbers) and bool((rows == np.arange(len(rows))).all())
    return AdapterPlan(
        None if same else mx.array(rows), mx.array(sorted_places.astype(np.uint32)), runs, rows
    )


@dataclass(frozen=True, slots=True)
class Outputs:
    """How the outputs of a projection are made up of parts, in pieces of one size."""

    widths: tuple[int, ...]  # (P,) outputs of each part
    joined: bool  # B is one matrix (P R, outputs), with zeros between the parts
    piece: int  # D; all outputs where there is one part, or where parts are joined
    part_of_piece: tuple[int, ...]  # (M,)

    @classmethod
    def of(cls, widths: Sequence[int]) -> "Outputs":
        piece, total = math.gcd(*widths), sum(widths)
        if len(widths) == 1 or total // piece > MAX_PIECES:
            return cls(tuple(widths), True, total, (0,))
        parts = [p for p, width in enumerate(widths) for _ in range(width // piece)]
        return cls(tuple(widths), False, piece, tuple(parts))

    def pieces(self, matrices: Sequence[mx.array | None], rank: int) -> mx.array:
        """B of each part, (E, r, width) or None for zeros, as the stack keeps them.

        Returns:
            (E, M, R, D), or (E, 1, P R, outputs) where parts are joined.
        """
        count = next(m.shape[0] for m in matrices if m is not None)
        whole = []
        for part, (matrix, width) in enumerate(zip(matrices, self.widths, strict=True)):
            if matrix is None:
                matrix = mx.zeros((count, rank, width))
            below = rank - matrix.shape[1]
            if self.joined:
                above = part * rank
                below = len(self.widths) * rank - above - matrix.shape[1]
                whole.append(mx.pad(matrix, [(0, 0), (above, below), (0, 0)]))
                continue
            padded = mx.pad(matrix, [(0, 0), (0, below), (0, 0)])
            whole.append(mx.unflatten(padded, -1, (-1, self.piece)).swapaxes(1, 2))
        if self.joined:
            return mx.concatenate(whole, axis=-1)[:, None]
        return mx.concatenate(whole, axis=1)


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank matrices of one adapter for one projection of E matrices (experts, or one).

    float32, padded to the rank of the stack that it goes to.
    """

    a: mx.array  # (E, in_dims, P R)
    b: mx.array  # (E, M, R, D), see Outputs.pieces; of DoRA, times the gain
    gain: mx.array | None = None  # (outputs,) of DoRA, by which the product is multiplied, less 1

    @property
    def kind(self) -> tuple[int, bool]:
        """Adapters of one kind share a stack: the rank, and whether there are gains."""
        return self.a.shape[2], self.gain is not None

    @property
    def is_finite(self) -> bool:
        arrays = [x for x in (self.a, self.b, self.gain) if x is not None]
        return bool(mx.stack([mx.isfinite(x).all() for x in arrays]).all())


class Stack:
    """The matrices of several adapters of one kind, for one projection. Never changed.

    Args:
        members: (S,) numbers of the adapters.
        a: (S E, in_dims, P R).
        b: (S E M, R, D).
        gains: (S, outputs) of DoRA, less 1; None: LoRA.
        bias: (outputs,) of the projection, which gains leave as it is; None: it has none.
    """

    __slots__ = ("_part_of_piece", "a", "b", "bias", "gains", "members", "outputs")

    def __init__(
        self,
        members: tuple[int, ...],
        outputs: Outputs,
        a: mx.array,
        b: mx.array,
        gains: mx.array | None,
        bias: mx.array | None,
    ) -> None:
        self.members = members
        self.outputs = outputs
        self.a = a
        self.b = b
        self.gains = gains
        self.bias = bias
        self._part_of_piece = mx.array(outputs.part_of_piece, mx.uint32)

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + (0 if self.gains is None else self.gains.nbytes)

    def added(self, number: int, new: LowRank) -> "Stack":
        a = mx.concatenate([self.a, new.a.astype(self.a.dtype)])
        b = mx.concatenate([self.b, new.b.flatten(0, 1).astype(self.b.dtype)])
        gains = self.gains
        if gains is not None and new.gain is not None:
            gains = mx.concatenate([gains, new.gain[None].astype(gains.dtype)])
        return self._evaluated((*self.members, number), a, b, gains)

    def without(self, number: int) -> "Stack | None":
        """This stack without an adapter; None: it was the only one."""
        if self.members == (number,):
            return None
        keep = [place for place, member in enumerate(self.members) if member != number]
        members = tuple(self.members[place] for place in keep)

        def kept(array: mx.array) -> mx.array:
            by_member = mx.unflatten(array, 0, (len(self.members), -1))
            return by_member[mx.array(keep)].flatten(0, 1)

        gains = None if self.gains is None else kept(self.gains)
        return self._evaluated(members, kept(self.a), kept(self.b), gains)

    def _evaluated(
        self, members: tuple[int, ...], a: mx.array, b: mx.array, gains: mx.array | None
    ) -> "Stack":
        mx.eval([array for array in (a, b, gains) if array is not None])
        return Stack(members, self.outputs, a, b, gains, self.bias)

    @staticmethod
    def of(
        number: int, outputs: Outputs, new: LowRank, bias: mx.array | None, dtype: mx.Dtype
    ) -> "Stack":
        a, b = new.a.astype(dtype), new.b.flatten(0, 1).astype(dtype)
        gains = None if new.gain is None else new.gain[None].astype(dtype)
        mx.eval([array for array in (a, b, gains, bias) if array is not None])
        return Stack((number,), outputs, a, b, gains, bias)

    # -- products -------------------------------------------------------------------------------

    def add_to(self, y: mx.array, x: mx.array, plan: AdapterPlan) -> mx.array:
        """Outputs y (T, outputs) of inputs x (T, in_dims), with the change of the adapters."""
        if plan.rows is None:
            return y + self.change(y, x, plan)
        change = self.change(None if self.gains is None else y[plan.rows], x[plan.rows], plan)
        return y.at[plan.rows].add(change)

    def change(self, y: mx.array | None, x: mx.array, plan: AdapterPlan) -> mx.array:
        """The change of outputs y (n, outputs) for inputs x (n, in_dims). Only gains read y.

        Returns:
            (n, outputs) in the dtype of x.
        """
        wide = x.astype(self.a.dtype)
        product = (
            self._by_runs(wide, plan)
            if plan.is_long
            else self.gathered(wide, plan.places, in_order=True)
        )
        if self.gains is not None and y is not None:
            plain = y if self.bias is None else y - self.bias
            product = product + plain.astype(wide.dtype) * self.gains[plan.places]
        return product.astype(x.dtype)

    def gathered(self, x: mx.array, index: mx.array, *, in_order: bool) -> mx.array:
        """Each row of x (n, in_dims) with the matrices of its own index (n,): (n, outputs)."""
        rows = x[:, None]
        indices = row_indices(rows)
        low = mx.gather_mm(rows, self.a, indices, index, sorted_indices=in_order)
        if self.outputs.joined:
            return mx.gather_mm(low, self.b, indices, index, sorted_indices=in_order)[:, 0]
        pieces, parts = self._part_of_piece, len(self.outputs.widths)
        low = mx.unflatten(low[:, 0], -1, (parts, 1, -1)).flatten(0, 1)  # (n P, 1, R)
        left = _of_parts(x.shape[0], parts, self.outputs.part_of_piece)
        right = index[:, None] * pieces.size + mx.arange(pieces.size, dtype=mx.uint32)  # (n, M)
        return mx.gather_mm(low, self.b, left, right).flatten(1)

    def _by_runs(self, x: mx.array, plan: AdapterPlan) -> mx.array:
        """`gathered`, adapter by adapter: (n, outputs)."""
        products = [self._product(x[a:b], place) for a, b, place in plan.runs]
        return products[0] if len(products) == 1 else mx.concatenate(products)

    def _product(self, x: mx.array, place: int) -> mx.array:
        """Rows x (m, in_dims) of one adapter: (m, outputs)."""
        low = x @ self.a[place]
        if self.outputs.joined:
            return low @ self.b[place]
        count = len(self.outputs.part_of_piece)
        # (P, m, R)
        by_output = mx.unflatten(low, -1, (len(self.outputs.widths), -1)).swapaxes(0, 1)
        pieces = by_output[self._part_of_piece] @ self.b[place * count : (place + 1) * count]
        return pieces.swapaxes(0, 1).flatten(1)  # of (M, m, D)


def _of_parts(num_rows: int, num_parts: int, part_of_piece: Sequence[int]) -> mx.array:
    """(n, M) where the product of row i with A of a piece's part stands, among n P."""
    rows = np.arange(num_rows, dtype=np.uint32)[:, None] * np.uint32(num_parts)
    return mx.array(rows + np.array(part_of_piece, np.uint32))


class Adapted:
    """The adapters of one projection; it replaces that projection.

    Args:
        widths: outputs of each part.
        bias: (outputs,) that the projection adds; None: it adds none.
    """

    __slots__ = ("_active", "_dtype", "bias", "outputs", "stacks")

    def __init__(
        self, active: ActiveAdapters, widths: Sequence[int], bias: mx.array | None, dtype: mx.Dtype
    ) -> None:
        self._active = active
        self.bias = bias
        self._dtype = dtype
        self.outputs = Outputs.of(widths)
        self.stacks: tuple[Stack, ...] = ()

    def add(self, number: int, new: LowRank) -> None:
        for at, stack in enumerate(self.stacks):
            if stack.a.shape[2] == new.a.shape[2] and (stack.gains is None) == (new.gain is None):
                self.stacks = (*self.stacks[:at], stack.added(number, new), *self.stacks[at + 1 :])
                return
        made = Stack.of(number, self.outputs, new, self.bias, self._dtype)
        self.stacks = (*self.stacks, made)

    def remove(self, number: int) -> None:
        stacks = [s.without(number) if number in s.members else s for s in self.stacks]
        self.stacks = tuple(stack for stack in stacks if stack is not None)

    def bytes_of(self, number: int) -> int:
        having = [stack for stack in self.stacks if number in stack.members]
        return sum(stack.num_bytes // len(stack.members) for stack in having)

    def used(self, *rows: int) -> list[tuple[Stack, AdapterPlan]]:
        """The stacks that rows of the layer's input need; `rows`: see `ActiveAdapters.plan`."""
        plans = [(stack, self._active.plan(stack.members, *rows)) for stack in self.stacks]
        return [(stack, plan) for stack, plan in plans if plan is not None]


class AdaptedLinear(Adapted, Projection):
    """A projection of rows that have adapters.

    Args:
        others: see `Adapted`.
    """

    __slots__ = ("base",)

    def __init__(
        self,
        base: Projection,
        active: ActiveAdapters,
        widths: Sequence[int],
        bias: mx.array | None,
        dtype: mx.Dtype,
    ) -> None:
        super().__init__(active, widths, bias, dtype)
        self.base = base

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, in_dims) -> (T, out_dims), plus the residual."""
        used = self.used(len(x))
        if not used:
            return self.base(x, residual)
        stack, plan = used[0]
        if plan.rows is None and stack.gains is None:  # all rows: it is added within the product
            change = stack.change(None, x, plan)
            return self.base(x, change if residual is None else residual + change)
        gained = any(stack.gains is not None for stack, _ in used)
        y = self.base(x, None if gained else residual)
        for stack, plan in used:
            y = stack.add_to(y, x, plan)
        return residual + y if gained and residual is not None else y


class AdaptedExperts(Adapted):
    """Projections of experts, each with a matrix of its own in every adapter.

    Args:
        others: see `Adapted`.
    """

    __slots__ = ("base", "num_experts")

    def __init__(
        self,
        base: ExpertProjection,
        num_experts: int,
        active: ActiveAdapters,
        widths: Sequence[int],
        dtype: mx.Dtype,
    ) -> None:
        super().__init__(active, widths, None, dtype)
        self.base = base
        self.num_experts = num_experts

    def __call__(self, x: mx.array, routed: Routed) -> mx.array:
        """x (..., 1, in_dims), with its experts (...) -> (..., 1, out_dims)."""
        y = self.base(x, routed)
        num_rows = routed.experts.size // routed.per_row
        for stack, plan in self.used(num_rows, routed.rows_per_token):
            y = self._add_to_pairs(y, x, routed, stack, plan)
        return y

    def _add_to_pairs(
        self, y: mx.array, x: mx.array, routed: Routed, stack: Stack, plan: AdapterPlan
    ) -> mx.array:
        k = routed.per_row
        pairs = (plan.host_rows[:, None] * k + np.arange(k, dtype=np.int32)).reshape(-1)
        where = mx.array(pairs)  # (n k,) of all pairs, row by row
        experts = routed.experts.reshape(-1)
        inputs = x.reshape(-1, x.shape[-1])
        if routed.places is not None:  # pairs stand sorted by expert
            where = routed.places[where]
            taken = inputs[where]
        elif inputs.shape[0] == experts.size:
            taken = inputs[where]
        else:  # all experts of a row read the same
            taken = inputs[mx.array(np.repeat(plan.host_rows, k))]
        index = mx.repeat(plan.places, k) * self.num_experts + experts[where].astype(mx.uint32)
        wide = taken.astype(stack.a.dtype)
        change = stack.gathered(wide, index, in_order=False).astype(y.dtype)
        flat = y.reshape(-1, y.shape[-1]).at[where].add(change)
        return flat.reshape(y.shape)
