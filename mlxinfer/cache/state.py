"""Memory of whole sequences: states of recurrent layers, or caches that a model manages itself.

B = sequences of a part, L = tokens of each, T = tokens of the step, D = hidden size.

States are values and are never written in place. A step makes new arrays from the old ones, so it
can be launched while the one before it runs. All states that a step makes lie in one `StateBlock`.
The next step of the same sequences takes that block as it is, so a steady decode batch gathers
nothing. A snapshot is a block with one state. It is shared, never copied back.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from ..cache_specs import OwnCacheSpec, StateSpec
from ..config import KVOptions
from ..errors import InvalidRequestError
from ..metal_kernels.state_step import SOURCES, filled, plan_of
from .inputs import CacheWork, Segments, StepMetadata
from .paged import Formats, TailPlace
from .pages import StateGroup

Arrays = list[mx.array]  # (B, ...) as `StateSpec.shapes` says, of one layer
Lengths = mx.array | None  # (B,) tokens of each sequence that count; None: all
Read = Callable[[], tuple[Arrays, Lengths]]  # states before a part, (B, ...) each
InPlace = Callable[[], tuple[mx.array, list[Arrays]]]  # the same where they lie; see `state_step`
# (inputs of a part, read, place) -> outputs, and states after the tokens that count
Advance = Callable[[Arrays, Read, InPlace], tuple[mx.array, Arrays]]


@dataclass(slots=True, eq=False)
class StateBlock:
    """The states of `size` sequences, by layer."""

    layers: list[Arrays]
    size: int

    def row(self, row: int) -> "StateBlock":
        """The state of one sequence: a copy, unless the block has no other."""
        if self.size == 1:
            return self
        layers = [[mx.contiguous(array[row : row + 1]) for array in layer] for layer in self.layers]
        alone = StateBlock(layers, 1)
        mx.async_eval(alone.arrays())  # else the copy would keep all of this block
        return alone

    def arrays(self) -> Arrays:
        return [array for layer in self.layers for array in layer]


Runs = list[tuple[StateBlock | None, list[int]]]  # neighbours that lie in one block; None: zeros


@dataclass(slots=True)
class StatePart:
    """B sequences of one step that go through the recurrences together."""

    slots: list[int]  # (B,)
    rows: mx.array  # (B, L) flat rows of the step; a shorter sequence repeats its last one
    span: slice  # of the flat rows that it covers
    counts: list[int]  # (B,) tokens of each that count
    # (N,) from the padded (B * L) rows back to flat order; None: nothing is padded
    unpad: mx.array | None
    before: Runs  # where the states lie before the step, the same for all layers
    new: StateBlock  # the states after it, filled by the layers
    verified: Sequence[int] = ()  # slots with proposals at the end of their tokens
    # by layer, what goes over the tokens again, and how
    undo: dict[int, tuple[Arrays, Advance]] = field(default_factory=dict)
    lengths: Lengths = field(init=False)
    _first: list[StateBlock] = field(init=False)  # those that a kernel gets as they are
    _plan: mx.array | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        ragged = any(count != self.rows.shape[1] for count in self.counts)
        self.lengths = mx.array(self.counts) if ragged else None

    def take(self, x: mx.array) -> mx.array:
        """(T, D) -> (B, L, D); behind the end of a shorter sequence its last row repeats."""
        if self.unpad is None:
            return mx.unflatten(x[self.span], 0, self.rows.shape)
        return x[self.rows]

    def advance(
        self, advance: Advance, inputs: Arrays, layer: int, spec: StateSpec
    ) -> tuple[mx.array, Arrays]:
        return advance(
            inputs, lambda: (self.read(layer, spec), self.lengths), lambda: self.place(layer, spec)
        )

    def place(self, layer: int, spec: StateSpec) -> tuple[mx.array, list[Arrays]]:
        plan = self._worked_out()
        return plan, self._sources(layer, spec)

    def _worked_out(self) -> mx.array:
        if self._plan is None:
            blocks = list(dict.fromkeys(block for block, _ in self.before if block is not None))
            self._first = blocks if len(blocks) <= SOURCES else blocks[: SOURCES - 1]
            number = {block: i for i, block in enumerate(self._first)}
            places, joined = [], 0
            for block, rows in self.before:
                if block is None:
                    places += [(0, -1)] * len(rows)
                elif block in number:
                    places += [(number[block], row) for row in rows]
                else:
                    places += [(SOURCES - 1, joined + i) for i in range(len(rows))]
                    joined += len(rows)
            self._plan = plan_of(places, self.counts)
        return self._plan

    def _sources(self, layer: int, spec: StateSpec) -> list[Arrays]:
        """For each state of a layer, the arrays that the plan is about.

        If there are more blocks than a kernel takes, sequences have just been brought together.
        Then the rows of the last blocks are gathered.
        """
        arrays = [block.layers[layer] for block in self._first]
        rest = [run for run in self.before if run[0] is not None and run[0] not in self._first]
        if rest:
            arrays.append(_gather(rest, layer, spec))
        if not arrays:
            arrays = [_rows(None, [0], layer, spec)]
        return [
            filled([block_arrays[state] for block_arrays in arrays])
            for state in range(len(spec.shapes))
        ]

    def read(self, layer: int, spec: StateSpec) -> Arrays:
        """The states of one layer, (B, ...) each; zeros where a sequence begins."""
        return _gather(self.before, layer, spec)


class StateLayer:
    """One recurrent layer's cache.

    Attributes:
        state_bytes: that are kept of a sequence, whatever its length.
        token_bytes: that are kept besides of each token: none.
    """

    is_paged = False
    token_bytes = 0

    def __init__(self, spec: StateSpec, formats: Formats) -> None:
        self.spec, self.formats = spec, formats
        self.state_bytes = state_bytes(spec)
        self._parts: list[StatePart] = []
        self._number = 0

    @classmethod
    def of(cls, spec: StateSpec, formats: Formats, dtype: mx.Dtype) -> "StateLayer":
        return cls(spec, formats)

    @staticmethod
    def windowed(spec: StateSpec, options: KVOptions) -> StateSpec:
        return spec

    @staticmethod
    def check(spec: StateSpec, formats: Formats, *, key_bias: bool) -> None:
        """Nothing to check: the formats of keys and values do not change a state."""

    @staticmethod
    def make_group(layers: Sequence[Any], snapshot_bytes: int) -> "RecurrentGroup":
        """The group of these layers on this rank; `snapshot_bytes`: memory for all snapshots."""
        return RecurrentGroup(layers, snapshot_bytes)

    def begin_step(self, parts: list[StatePart], number: int) -> None:
        """Take the parts of a step; `number`: place among the layers of the group.

        Parts cover all rows of the step: single tokens as one batch, tokens under verification as
        one batch, each prefill chunk by itself. No padding goes through a state.
        """
        self._parts, self._number = parts, number

    def recur(self, rows: Sequence[mx.array], advance: Advance) -> mx.array:
        """Let a recurrence go over all tokens of the step, and keep the states behind them.

        Args:
            rows: (T, ...) inputs of the recurrence.
            advance: of inputs (B, L, ...), and called again where proposed tokens are rejected.

        Returns:
            Outputs (T, D).
        """
        flat = []
        for part in self._parts:
            inputs = [part.take(x) for x in rows]
            y, states = part.advance(advance, inputs, self._number, self.spec)
            for state, (shape, dtype) in zip(states, self.spec.shapes, strict=True):
                assert state.shape[1:] == shape, (state.shape, shape)
                assert state.dtype == _dtype(dtype), (state.dtype, dtype)
            part.new.layers[self._number] = states
            if part.rows.shape[1] > 1:
                part.undo[self._number] = inputs, advance
            y = mx.flatten(y, 0, 1)
            flat.append(y if part.unpad is None else y[part.unpad])
        return flat[0] if len(flat) == 1 else mx.concatenate(flat)


class RecurrentGroup(StateGroup):
    """States of running sequences, by slot, and snapshots, by number."""

    def __init__(self, layers: Sequence[StateLayer], snapshot_bytes: int) -> None:
        num_bytes = sum(layer.state_bytes for layer in layers)
        super().__init__(num_bytes, max(snapshot_bytes, 0) // max(num_bytes, 1))
        self.layers = layers
        self.reset()

    def reset(self) -> None:
        self._states: dict[int, tuple[StateBlock, int]] = {}  # slot -> where its state lies
        self._snapshots: dict[int, StateBlock] = {}
        self._undoable: deque[list[StatePart]] = deque()  # of steps with proposals, oldest first
        self._outputs: list[StateBlock] = []  # of the last step

    @property
    def bytes_allocated(self) -> int:
        blocks = {
            id(b): b for b in [*(b for b, _ in self._states.values()), *self._snapshots.values()]
        }
        return sum(array.nbytes for block in blocks.values() for array in block.arrays())

    # -- a step ---------------------------------------------------------------------------------

    def begin_step(self, metadata: StepMetadata, place: TailPlace) -> None:
        groups = [*metadata.short, *metadata.long]
        self._keep_apart({slot for group in groups for slot in group.slots.tolist()})
        plan = [self._part(group) for group in groups]
        num_short = len(metadata.short)
        if metadata.verified:
            parts = [part for part in plan[:num_short] if part.rows.shape[1] > 1]
            for part in parts:
                part.verified = metadata.verified
            self._undoable.append(parts)
        self._outputs = [part.new for part in plan]
        for number, layer in enumerate(self.layers):
            layer.begin_step(plan, number)

    def step_outputs(self) -> Arrays:
        return [array for block in self._outputs for array in block.arrays()]

    def _part(self, group: Segments) -> StatePart:
        slots: list[int] = group.slots.tolist()
        rows, unpad = group.memoised("state rows", lambda: _padded_rows(group))
        new = StateBlock([[] for _ in self.layers], len(slots))
        part = StatePart(
            slots=slots,
            rows=rows,
            span=slice(int(group.rows[0]), int(group.rows[-1] + group.counts[-1])),
            counts=group.counts.tolist(),
            unpad=unpad,
            before=runs_of([self._states.get(slot, (None, 0)) for slot in slots]),
            new=new,
        )
        self._states.update((slot, (new, row)) for row, slot in enumerate(slots))
        return part

    def _keep_apart(self, slots: set[int]) -> None:
        """Copy the states of sequences that are not in the step out of blocks that they share.

        Otherwise one state would keep a whole block. A block stays if none of its sequences is in
        the step, or if a commit may still need it.
        """
        counts = Counter(block for block, _ in self._states.values())
        leaving = {self._states[slot][0] for slot in slots if slot in self._states}
        undoable = {part.new for parts in self._undoable for part in parts}
        for slot, (block, row) in self._states.items():
            is_whole = counts[block] == block.size and block not in leaving
            if slot not in slots and block.size > 1 and not is_whole and block not in undoable:
                self._states[slot] = block.row(row), 0

    def take_back(self, num_kept: Mapping[int, int]) -> None:
        """Go back to fewer tokens of the oldest step that has proposals and was not committed.

        Args:
            num_kept: of slots in short parts, the tokens that count.
        """
        for part in self._undoable.popleft():
            block = self._replayed(part, num_kept)
            for row, slot in enumerate(part.slots):
                if self._states.get(slot) == (part.new, row):
                    self._states[slot] = block, row

    def _replayed(self, part: StatePart, num_kept: Mapping[int, int]) -> StateBlock:
        """The states of a part after fewer of its tokens: the recurrence runs over them again."""
        pairs = zip(part.slots, part.counts, strict=True)
        counts = [num_kept.get(slot, count) for slot, count in pairs]
        if counts == part.counts:
            return part.new
        again = replace(part, counts=counts)
        layers = []
        for i, layer in enumerate(self.layers):
            inputs, advance = part.undo[i]
            layers.append(again.advance(advance, inputs, i, layer.spec)[1])
        return StateBlock(layers, len(counts))

    # -- between steps --------------------------------------------------------------------------

    def before_step(self, work: CacheWork) -> None:
        for slot, snapshot in work.save:
            self._save(slot, snapshot)

    def after_load(self, work: CacheWork, reused: Sequence[int]) -> None:
        for slot in work.leave:  # the next sequences there begin with zeros
            self._states.pop(slot, None)
        for snapshot, slot in work.resume:
            self._states[slot] = self._snapshots[snapshot], 0
        for snapshot in work.drop:
            self._snapshots.pop(snapshot, None)

    def _save(self, slot: int, snapshot: int) -> None:
        """Keep the state of a slot as a snapshot.

        If its proposals are still being verified, the sequence is about to leave: only the first
        token counts.
        """
        block, row = self._states[slot]
        for part in [part for parts in self._undoable for part in parts if part.new is block]:
            block = self._replayed(part, {slot: 1} if slot in part.verified else {})
        self._snapshots[snapshot] = block.row(row)

    def held(self, slot: int) -> tuple[StateBlock, int]:
        """Where the state of a slot lies. It is a value: later steps do not change it."""
        return self._states[slot]

    def put_back(self, slot: int, state: tuple[StateBlock, int]) -> None:
        self._states[slot] = state

    def read_out(self, snapshots: Sequence[int]) -> list[bytes]:
        payloads = []
        for snapshot in snapshots:
            arrays = self._snapshots[snapshot].arrays()
            mx.eval(arrays)
            payloads.append(b"".join(np.array(array.view(mx.uint8)).tobytes() for array in arrays))
        return payloads

    def load(self, snapshots: Sequence[int], payloads: Sequence[bytes | memoryview]) -> None:
        for snapshot, payload in zip(snapshots, payloads, strict=True):
            assert len(payload) == self.num_bytes, "a payload of another format"
            layers, start = [], 0
            for layer in self.layers:
                arrays = []
                for shape, name in layer.spec.shapes:
                    dtype = _dtype(name)
                    stop = start + prod(shape) * dtype.size
                    part = mx.array(np.frombuffer(payload[start:stop], dtype=np.uint8))
                    arrays.append(part.view(dtype).reshape(1, *shape))
                    start = stop
                layers.append(arrays)
            self._snapshots[snapshot] = StateBlock(layers, 1)


def state_bytes(spec: StateSpec) -> int:
    return sum(prod(shape) * _dtype(dtype).size for shape, dtype in spec.shapes)


def _dtype(name: str) -> mx.Dtype:
    dtype: mx.Dtype = getattr(mx, name)
    return dtype


def runs_of(places: Sequence[tuple[StateBlock | None, int]]) -> Runs:
    """Blocks and rows, in the same order, by neighbours that lie in one block together."""
    runs: Runs = []
    for block, row in places:
        if runs and runs[-1][0] is block:
            runs[-1][1].append(row)
        else:
            runs.append((block, [row]))
    return runs


def _gather(sources: Runs, layer: int, spec: StateSpec) -> Arrays:
    """Gather the states of one layer, (B, ...)."""
    parts = [_rows(block, rows, layer, spec) for block, rows in sources]
    if len(parts) == 1:
        return parts[0]
    return [mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True)]


def _rows(block: StateBlock | None, rows: list[int], layer: int, spec: StateSpec) -> Arrays:
    if block is None:
        return [mx.zeros((len(rows), *shape), _dtype(dtype)) for shape, dtype in spec.shapes]
    if rows == list(range(block.size)):
        return block.layers[layer]
    index = mx.array(rows)
    return [array[index] for array in block.layers[layer]]


def _padded_rows(group: Segments) -> tuple[mx.array, mx.array | None]:
    """(B, L) flat rows of segments, the last one of each repeated; and how to undo that."""
    width = np.arange(group.width, dtype=np.int32)
    step = np.minimum(width, group.counts[:, None] - 1)
    real = width < group.counts[:, None]
    rows = mx.array(group.rows[:, None] + step)
    return rows, None if real.all() else mx.array(np.flatnonzero(real))


# -- caches of a model's own ----------------------------------------------------------------------


class OwnCaches(StateGroup):
    """Caches that a model manages itself: one object for each running sequence.

    Only the model knows what the objects hold. A sequence begins without one, and its object goes
    when the sequence leaves its slot. It cannot be shared, and it cannot go back. One `OwnCaches`
    stands for all layers of the model, and is their group too.

    Attributes:
        state_bytes, token_bytes: that are kept of a sequence, and besides of each token.
        caches: by slot; the model puts them here. Each has `num_bytes`, and `unread()`: arrays that
            the last step made and no output of it depends on.
        parts: rows and slot of each sequence of a step, in the order of the flat list, which they
            cover.
    """

    is_paged = False

    def __init__(self, spec: OwnCacheSpec, formats: Formats, dtype: mx.Dtype) -> None:
        super().__init__(spec.num_bytes, max_snapshots=0)
        self.spec, self.formats = spec, formats
        self.token_bytes = spec.numbers * dtype.size
        self.state_bytes = spec.num_bytes
        self.reset()

    @classmethod
    def of(cls, spec: OwnCacheSpec, formats: Formats, dtype: mx.Dtype) -> "OwnCaches":
        """The caches of a model whose activations are of `dtype`."""
        return cls(spec, formats, dtype)

    @staticmethod
    def windowed(spec: OwnCacheSpec, options: KVOptions) -> OwnCacheSpec:
        """Raise InvalidRequestError: a window is asked for."""
        raise _not_paged("kv_window")

    @staticmethod
    def check(spec: OwnCacheSpec, formats: Formats, *, key_bias: bool) -> None:
        """Raise InvalidRequestError: other formats are asked for than the model's own."""
        raise _not_paged("kv_bits")

    @staticmethod
    def make_group(layers: Sequence[Any], snapshot_bytes: int) -> "OwnCaches":
        layer: OwnCaches
        (layer,) = layers
        return layer

    def reset(self) -> None:
        self.caches: dict[int, Any] = {}
        self.parts: list[tuple[slice, int]] = []

    @property
    def bytes_allocated(self) -> int:
        return sum(cache.num_bytes for cache in self.caches.values())

    def begin_step(self, metadata: StepMetadata, place: TailPlace) -> None:
        places = [  # first row, tokens, slot
            place
            for part in (*metadata.short, *metadata.long)
            for place in zip(
                part.rows.tolist(), part.counts.tolist(), part.slots.tolist(), strict=True
            )
        ]
        self.parts = [(slice(row, row + count), slot) for row, count, slot in sorted(places)]

    def step_outputs(self) -> list[mx.array]:
        caches = [self.caches[slot] for _, slot in self.parts if slot in self.caches]
        return [array for cache in caches for array in cache.unread()]

    def take_back(self, num_kept: Mapping[int, int]) -> None:
        """No token can be taken back: such a model verifies no proposals."""
        assert not num_kept, "proposals to a model that keeps caches of its own"

    def before_step(self, work: CacheWork) -> None:
        """Nothing: there are no snapshots."""
        assert not work.save

    def after_load(self, work: CacheWork, reused: Sequence[int]) -> None:
        for slot in work.leave:
            self.caches.pop(slot, None)

    def read_out(self, snapshots: Sequence[int]) -> list[bytes]:
        return []

    def load(self, snapshots: Sequence[int], payloads: Sequence[bytes | memoryview]) -> None:
        """Nothing: there are no snapshots."""

    def held(self, slot: int) -> Any:
        """Never called: such a model drafts for no other."""
        raise AssertionError("the model keeps caches of its own")

    def put_back(self, slot: int, state: Any) -> None:
        """Never called, as `held`."""
        raise AssertionError("the model keeps caches of its own")


def _not_paged(asked: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{asked} is for models with keys and values in pages; this one keeps caches of its own. "
        f"Leave {asked} out.",
        param=asked,
    )


SequenceLayer = StateLayer | OwnCaches
"""A layer, or a whole model, that keeps one thing of each sequence."""
SequenceGroup = RecurrentGroup | OwnCaches
"""All of these that a model has, with their arrays."""
