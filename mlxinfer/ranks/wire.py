"""Steps as bytes: msgpack of integers and arrays, never objects that could run anything.

A page table is sent once, and after that only its changes. A steady batch of decodes is little more
than its positions. The other side makes a `StepInputs` with the same numbers. Now and then both
sides compare a checksum of them.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import GenericAlias
from typing import Any, TypeVar, get_type_hints
from weakref import ref

import msgspec
import numpy as np

from ..cache.inputs import CacheWork, Ints, Segments, StepMetadata
from ..cache.pages import PageTable
from ..engine.followers import StepInputs

T = TypeVar("T")
CHECK_EVERY = 32  # steps between two checksums


class TableChange(msgspec.Struct, array_like=True):
    """The changes of a page table, or a new one."""

    number: int
    num_kept: int
    first: int
    start: int  # the page number from which on `pages` are new
    pages: bytes


class WorkMessage(msgspec.Struct, array_like=True, tag="work"):
    """Work on the cache without a step."""

    tables: list[TableChange]
    dropped: list[int]  # tables that nothing uses any more
    extents: list[int]  # pages handed out, of each layer group
    body: bytes  # of a `CacheWork`, with table numbers


class StepMessage(WorkMessage, array_like=True, tag="step"):
    """A step; its `body` is a STEP_BODY, with table numbers."""

    number: int
    checked: bool  # a checksum of it is expected


class ShortPart(msgspec.Struct, array_like=True):
    """Segments that attend together; `whole` None: those of the step before, at new positions."""

    starts: Ints
    whole: Segments | None


APART = ("metadata", "work", "short", "long")  # fields that stand beside the others in a message


def _names(kind: type) -> list[str]:
    return [f.name for f in fields(kind) if f.name not in APART]


def _row(part: Any) -> list[Any]:
    return [getattr(part, name) for name in _names(type(part))]


def _row_type(kind: type) -> Any:
    hints = get_type_hints(kind)
    return GenericAlias(tuple, tuple(hints[name] for name in _names(kind)))


def _of_row(kind: type[T], row: Sequence[Any], **apart: Any) -> T:
    return kind(**dict(zip(_names(kind), row, strict=True)), **apart)


STEP_BODY: Any = GenericAlias(
    tuple,
    (
        *(list[ShortPart], list[Segments]),
        *(_row_type(StepMetadata), _row_type(CacheWork), _row_type(StepInputs)),
    ),
)


@dataclass(slots=True)
class _Sent:
    table: "ref[PageTable]"
    number: int
    num_changes: int
    length: int


class StepWriter:
    """Steps to messages, in their order."""

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}  # by id of the table
        self._dropped: list[int] = []
        self._num_tables = 0
        self._changes: list[TableChange] = []
        self._short: list[Segments] = []
        self._encode = msgspec.msgpack.Encoder(enc_hook=self._number_or_bytes).encode
        self.num_steps = 0

    def message(self, step: StepInputs, extents: list[int]) -> StepMessage:
        self.num_steps += 1
        short = [self._short_part(i, part) for i, part in enumerate(step.metadata.short)]
        self._short = step.metadata.short
        long = [replace(part, _memo={}) for part in step.metadata.long]
        work = _row(_without_payloads(step.work))
        body = self._encode((short, long, _row(step.metadata), work, _row(step)))
        checked = self.num_steps % CHECK_EVERY == 1
        return StepMessage(*self._changed(), extents, body, self.num_steps, checked)

    def work(self, work: CacheWork, extents: list[int]) -> WorkMessage:
        body = self._encode(_row(_without_payloads(work)))
        return WorkMessage(*self._changed(), extents, body)

    def _short_part(self, place: int, part: Segments) -> ShortPart:
        before = self._short[place] if place < len(self._short) else None
        if before is None or not part.follows(before):
            return ShortPart(part.starts, replace(part, _memo={}))
        for tables in part.tables:  # which may have changed
            for table in tables:
                self._number(table)
        return ShortPart(part.starts, None)

    def _number_or_bytes(self, value: Any) -> Any:
        return self._number(value) if type(value) is PageTable else _bytes(value)

    def _number(self, table: PageTable) -> int:
        sent = self._sent.get(id(table))
        if sent is None:
            sent = self._new(table)
        elif sent.num_changes != table.num_changes:
            self._note(table, sent, 0 if table.rewritten > sent.num_changes else sent.length)
        return sent.number

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

    def _changed(self) -> tuple[list[TableChange], list[int]]:
        noted = self._changes, self._dropped
        self._changes, self._dropped = [], []
        return noted


class StepReader:
    """Messages to steps, in their order."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._tables: dict[int, PageTable] = {}
        self._short: list[Segments] = []
        self._step = msgspec.msgpack.Decoder(STEP_BODY, dec_hook=self._table_or_array)
        self._work = msgspec.msgpack.Decoder(_row_type(CacheWork), dec_hook=self._table_or_array)

    def step(self, message: StepMessage, held: Mapping[bytes, memoryview]) -> StepInputs:
        """The step of a message; `held`: by key, what was read for its pages."""
        self._change(message)
        short, long, metadata, work, rest = self._step.decode(message.body)
        self._short = [
            self._short[i].at(part.starts) if part.whole is None else part.whole
            for i, part in enumerate(short)
        ]
        metadata = _of_row(StepMetadata, metadata, short=self._short, long=long)
        self._drop(message)
        return _of_row(StepInputs, rest, metadata=metadata, work=_work_of(work, held))

    def work(self, message: WorkMessage, held: Mapping[bytes, memoryview]) -> CacheWork:
        self._change(message)
        work = _work_of(self._work.decode(message.body), held)
        self._drop(message)
        return work

    def _change(self, message: WorkMessage) -> None:
        for change in message.tables:
            table = self._tables.get(change.number)
            if table is None:
                table = self._tables[change.number] = PageTable(self._page_size, change.num_kept)
            table.become(change.first, change.start, change.pages)

    def _drop(self, message: WorkMessage) -> None:
        for number in message.dropped:
            del self._tables[number]

    def _table_or_array(self, kind: Any, value: Any) -> Any:
        if kind is PageTable:
            return self._tables[value]
        count, data = value
        array = np.frombuffer(data, dtype="<i4").astype(np.int32)
        return array.reshape(count, -1) if count else array


def _without_payloads(work: CacheWork) -> CacheWork:
    """The same work without the bytes of loaded pages: each rank has read its own."""
    load = [one._replace(entry=one.filled(b"")) for one in work.load]
    return replace(work, load=load) if load else work


def _work_of(row: Sequence[Any], held: Mapping[bytes, memoryview]) -> CacheWork:
    work = _of_row(CacheWork, row)
    work.load = [one._replace(entry=one.filled(held[one.entry.key])) for one in work.load]
    return work


def checksum(step: StepInputs) -> int:
    """The checksum of everything that decides a step's results, and its work on the cache."""
    metadata = replace(
        step.metadata,
        short=[replace(part, _memo={}) for part in step.metadata.short],
        long=[replace(part, _memo={}) for part in step.metadata.long],
    )
    whole = replace(step, metadata=metadata, work=_without_payloads(step.work))
    return zlib.crc32(msgspec.msgpack.encode(whole, enc_hook=_pages_or_bytes))


def _pages_or_bytes(value: Any) -> Any:
    return value.numbers_from(0).tobytes() if type(value) is PageTable else _bytes(value)


def _bytes(array: Ints) -> tuple[int, bytes]:
    """Rows of an array, 0 of one with a single dimension, and its numbers."""
    data = np.ascontiguousarray(array, dtype="<i4").tobytes()
    return len(array) if array.ndim > 1 else 0, data
