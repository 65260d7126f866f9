"""Steps as bytes: msgpack of integers and arrays, never objects that could run anything.

Page tables go over once; afterwards only what changed of them does. A steady batch of decodes is
its positions alone. The other side makes a `StepInputs` with the same numbers. Now and then both
sides compare a checksum of them.
"""

import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import ref

import msgspec
import numpy as np

from ..cache.inputs import (
    CacheWork,
    Ints,
    Load,
    Move,
    PartialCopy,
    Segments,
    Spill,
    StepMetadata,
)
from ..cache.pages import PageTable
from ..engine.runner import StepInputs

CHECK_EVERY = 32  # steps between two checksums
_ENCODER = msgspec.msgpack.Encoder()


class TableChange(msgspec.Struct, array_like=True):
    """The changes of a page table, or a new one."""

    number: int
    num_kept: int
    first: int
    start: int  # the page number from which on `pages` are new
    pages: bytes


class ShortPart(msgspec.Struct, array_like=True):
    """Segments that attend together; `rest` None: those of the step before, at new positions."""

    starts: bytes
    rest: tuple[list[list[int]], bytes, bytes, bytes, bytes, int] | None


SpillPart = tuple[int, int, bytes, bytes, bytes]
"""A `Spill`: group, page, key, parent and tokens."""


class WorkPart(msgspec.Struct, array_like=True):
    """Work on the cache, see `CacheWork`."""

    seal: list[tuple[list[int], int, int, int]]
    spill: list[SpillPart]
    load: list[tuple[int, int, bytes]]  # group, page, key of what each rank has read for it
    copies: list[tuple[list[int], int, int, int, list[int | None]]]
    states: tuple[list[tuple[int, int]], list[int], list[tuple[int, int]], list[int]]


class WorkMessage(msgspec.Struct, array_like=True, tag="work"):
    """Work on the cache without a step."""

    tables: list[TableChange]
    dropped: list[int]
    extents: list[int]
    work: WorkPart


class StepMessage(msgspec.Struct, array_like=True, tag="step"):
    """A step."""

    number: int
    tables: list[TableChange]
    dropped: list[int]  # tables that nothing uses any more
    extents: list[int]  # pages handed out, of each layer group
    short: list[ShortPart]
    long: list[tuple[list[int], int, int, int, int, int]]
    positions: bytes
    verified: list[int]
    spans: list[bytes] | None
    rope_positions: list[bytes] | None
    follows: bool
    known_ids: bytes | None
    pending: bytes | None
    work: WorkPart
    num_slots: int
    new_slots: list[int]
    is_barrier: bool
    rows: bytes | None
    num_rows: int
    prompt_rows: list[tuple[int, int]]
    rope_variants: bytes | None
    adapters: bytes | None
    checked: bool  # a checksum of it is expected


@dataclass(slots=True)
class LongSegment:
    """A prefill chunk; see `cache.inputs.QuerySegment`."""

    tables: list[PageTable]
    row: int
    start: int
    num_tokens: int
    sealed: int
    slot: int

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.num_tokens


@dataclass(slots=True)
class _Sent:
    """A page table that the other side has."""

    table: "ref[PageTable]"
    number: int
    num_changes: int
    length: int


class Writer:
    """Steps to messages, in their order."""

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}  # by id of the table
        self._dropped: list[int] = []
        self._num_tables = 0
        self._changes: list[TableChange] = []
        self._short: list[Segments] = []
        self.num_steps = 0

    def message(self, step: StepInputs, extents: list[int]) -> StepMessage:
        """The message of a step, given the extents of the layer groups' pages."""
        self._changes = []
        self.num_steps += 1
        segments = step.segments
        short = [self._short_part(i, part) for i, part in enumerate(segments.short)]
        self._short = segments.short
        long = [
            (self._numbers(s.tables), s.row, s.start, s.num_tokens, s.sealed, s.slot)
            for s in segments.long
        ]
        work = self._work(step.work)
        dropped, self._dropped = self._dropped, []
        return StepMessage(
            self.num_steps,
            self._changes,
            dropped,
            extents,
            short,
            long,
            _bytes(segments.positions),
            [*segments.verified],
            _lines(segments.spans),
            _lines(segments.rope_positions),
            step.follows,
            None if step.known_ids is None else _bytes(step.known_ids),
            None if step.pending is None else _bytes(step.pending),
            work,
            step.num_slots,
            step.new_slots,
            step.is_barrier,
            None if step.rows is None else _bytes(step.rows),
            step.num_rows,
            step.prompt_rows,
            None if step.rope_variants is None else _bytes(step.rope_variants),
            None if step.adapters is None else _bytes(step.adapters),
            self.num_steps % CHECK_EVERY == 1,
        )

    def work(self, work: CacheWork, extents: list[int]) -> WorkMessage:
        """The message of work without a step."""
        self._changes = []
        part = self._work(work)
        dropped, self._dropped = self._dropped, []
        return WorkMessage(self._changes, dropped, extents, part)

    def _work(self, work: CacheWork) -> WorkPart:
        return WorkPart(
            [(self._numbers(m.tables), m.slot, m.start, m.stop) for m in work.seal],
            [spill_part(spill) for spill in work.spill],
            [(load.group, load.page, load.key) for load in work.load],
            [(self._numbers(c.tables), c.slot, c.start, c.stop, c.pages) for c in work.copies],
            (work.save, work.leave, work.resume, work.drop),
        )

    def _short_part(self, place: int, part: Segments) -> ShortPart:
        numbers = [self._numbers(tables) for tables in part.tables]
        before = self._short[place] if place < len(self._short) else None
        if before is not None and part.follows(before):
            return ShortPart(_bytes(part.starts), None)
        arrays = (part.rows, part.counts, part.sealed, part.slots)
        rows, counts, sealed, slots = (_bytes(array) for array in arrays)
        return ShortPart(_bytes(part.starts), (numbers, rows, counts, sealed, slots, part.width))

    def _numbers(self, tables: Iterable[PageTable]) -> list[int]:
        """The numbers of tables on the other side, after what changed of them was noted."""
        found = []
        for table in tables:
            sent = self._sent.get(id(table))
            if sent is None:
                sent = self._new(table)
            elif sent.num_changes != table.num_changes:
                self._note(table, sent, 0 if table.rewritten > sent.num_changes else sent.length)
            found.append(sent.number)
        return found

    def _new(self, table: PageTable) -> _Sent:
        self._num_tables += 1
        number, key = self._num_tables, id(table)

        def forget(_: object) -> None:
            del self._sent[key]
            self._dropped.append(number)

        sent = self._sent[key] = _Sent(ref(table, forget), number, 0, 0)
        self._note(table, sent, 0)
        return sent

    def _note(self, table: PageTable, sent: _Sent, start: int) -> None:
        pages = table.numbers_from(start)
        self._changes.append(
            TableChange(sent.number, table.num_kept, table.first, start, pages.tobytes())
        )
        sent.num_changes, sent.length = table.num_changes, start + len(pages)


class Reader:
    """Messages to steps, in their order.

    Args:
        page_size: tokens a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._tables: dict[int, PageTable] = {}
        self._short: list[Segments] = []

    def step(self, message: StepMessage, held: Mapping[bytes, memoryview]) -> StepInputs:
        """The step of a message; `held`: by key, what was read for its pages."""
        for change in message.tables:
            self._change(change)
        short = [self._short_part(i, part) for i, part in enumerate(message.short)]
        self._short = short
        long = [LongSegment(self._of(numbers), *rest) for numbers, *rest in message.long]
        step = StepInputs(
            segments=StepMetadata(
                short,
                long,
                _ints(message.positions),
                message.verified,
                _table(message.spans),
                _table(message.rope_positions),
            ),
            follows=message.follows,
            known_ids=None if message.known_ids is None else _ints(message.known_ids),
            pending=None if message.pending is None else _ints(message.pending),
            work=self._work(message.work, held),
            num_slots=message.num_slots,
            new_slots=message.new_slots,
            is_barrier=message.is_barrier,
            rows=None if message.rows is None else _ints(message.rows),
            num_rows=message.num_rows,
            prompt_rows=message.prompt_rows,
            rope_variants=None if message.rope_variants is None else _ints(message.rope_variants),
            adapters=None if message.adapters is None else _ints(message.adapters),
        )
        for number in message.dropped:
            del self._tables[number]
        return step

    def work(self, message: WorkMessage, held: Mapping[bytes, memoryview]) -> CacheWork:
        """The work of a message without a step."""
        for change in message.tables:
            self._change(change)
        work = self._work(message.work, held)
        for number in message.dropped:
            del self._tables[number]
        return work

    def _work(self, part: WorkPart, held: Mapping[bytes, memoryview]) -> CacheWork:
        save, leave, resume, drop = part.states
        return CacheWork(
            seal=[Move(self._of(numbers), *rest) for numbers, *rest in part.seal],
            spill=[spill_of(spill) for spill in part.spill],
            load=[Load(group, page, held[key], key) for group, page, key in part.load],
            copies=[PartialCopy(self._of(copy[0]), *copy[1:]) for copy in part.copies],
            save=save,
            leave=leave,
            resume=resume,
            drop=drop,
        )

    def _change(self, change: TableChange) -> None:
        table = self._tables.get(change.number)
        if table is None:
            table = self._tables[change.number] = PageTable(self._page_size, change.num_kept)
        table.become(change.first, change.start, change.pages)

    def _short_part(self, place: int, part: ShortPart) -> Segments:
        starts = _ints(part.starts)
        if part.rest is None:
            return self._short[place].at(starts)
        numbers, rows, counts, sealed, slots, width = part.rest
        return Segments(
            [self._of(some) for some in numbers],
            _ints(rows),
            starts,
            _ints(counts),
            _ints(sealed),
            _ints(slots),
            width,
        )

    def _of(self, numbers: Sequence[int]) -> list[PageTable]:
        return [self._tables[number] for number in numbers]


def spill_part(spill: Spill) -> SpillPart:
    """A page that is to be stored, as it is sent."""
    tokens = np.array(spill.token_ids, dtype="<i4").tobytes()
    return spill.group, spill.page, spill.key, spill.parent, tokens


def spill_of(part: SpillPart) -> Spill:
    """Arrays from bytes that were sent."""
    group, page, key, parent, tokens = part
    return Spill(group, page, key, parent, tuple(_ints(tokens).tolist()))


def checksum(step: StepInputs) -> int:
    """Of all that decides what a step computes, and what it reads and writes of the cache."""
    total = 0

    def add(data: bytes) -> None:
        nonlocal total
        total = zlib.crc32(data, total)

    segments, work = step.segments, step.work
    arrays = [step.known_ids, step.pending, step.rows, step.rope_variants, step.adapters]
    add(_ENCODER.encode([_scalars(step), [one is None for one in arrays]]))
    for part in segments.short:
        arrays += [part.rows, part.starts, part.counts, part.sealed, part.slots]
    for one in [segments.positions, *arrays]:
        add(b"" if one is None else _bytes(one))
    tables = [tables for part in segments.short for tables in part.tables]
    tables += [each.tables for each in segments.long]
    tables += [each.tables for each in work.seal] + [each.tables for each in work.copies]
    for table in itertools.chain.from_iterable(tables):
        add(table.numbers_from(0).tobytes())
    return total


def _scalars(step: StepInputs) -> list[object]:
    """The values that are no array and no page table."""
    work = step.work
    return [
        [step.follows, step.is_barrier, step.num_slots, step.num_rows],
        [*step.segments.verified],
        [_lines(step.segments.spans), _lines(step.segments.rope_positions)],
        [step.new_slots, step.prompt_rows],
        [(s.row, s.start, s.num_tokens, s.sealed, s.slot) for s in step.segments.long],
        [part.width for part in step.segments.short],
        [move[1:] for move in work.seal],
        [spill_part(spill) for spill in work.spill],
        [(load.group, load.page, load.key) for load in work.load],
        [copy[1:] for copy in work.copies],
        [work.save, work.leave, work.resume, work.drop],
    ]


def _bytes(array: Ints) -> bytes:
    return np.ascontiguousarray(array, dtype="<i4").tobytes()


def _lines(array: Ints | None) -> list[bytes] | None:
    """An array (T,) or (n, T), row by row."""
    return None if array is None else [_bytes(row) for row in np.atleast_2d(array)]


def _table(lines: list[bytes] | None) -> Ints | None:
    """The array of `_lines`."""
    if lines is None:
        return None
    rows = np.stack([_ints(line) for line in lines])
    return rows[0] if len(rows) == 1 else rows


def _ints(data: bytes) -> Ints:
    return np.frombuffer(data, dtype="<i4").astype(np.int32)
