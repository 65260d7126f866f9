"""Steps over the wire: what the other side has is what was sent, whatever became of the tables."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.cache.disk import Entry
from mlxinfer.cache.inputs import CacheWork, Move, PageTransfer, Segments, StepMetadata, ints
from mlxinfer.cache.pages import PageTable
from mlxinfer.engine.followers import StepInputs
from mlxinfer.ranks import messages
from mlxinfer.ranks.wire import StepReader, StepWriter, checksum

PAGE = 16


def change(draw: st.DrawFn, table: PageTable) -> None:
    """As an engine does: pages are added, recycled at the front, or replaced by equal ones."""
    kind = draw(st.sampled_from(["append", "append", "drop", "replace", "nothing"]))
    held = [n for n in range(table.end // PAGE) if table.page_at(n) is not None]
    if kind == "append":
        table.append(draw(st.lists(st.integers(0, 99), min_size=1, max_size=3)))
    elif kind == "drop" and held:
        table.drop_before(draw(st.sampled_from(held)))
    elif kind == "replace" and held:
        table.replace(draw(st.sampled_from(held)), draw(st.integers(100, 199)))


def step_of(tables: list[list[PageTable]], segments: Segments | None, start: int) -> StepInputs:
    count = len(tables)
    rows, ones = np.arange(count, dtype=np.int32), np.ones(count, dtype=np.int32)
    starts = ints([start + i for i in range(count)])
    if segments is None or segments.tables is not tables:
        segments = Segments(tables, rows, starts, ones, ones * 0, rows, width=1)
    else:
        segments = segments.at(starts)
    return StepInputs(
        metadata=StepMetadata([segments], [], starts),
        follows=False,
        known_ids=starts + 7,
        pending=None,
        work=CacheWork(seal=[Move(tables[0], 0, 0, PAGE)]),
        num_slots=count,
        new_slots=[],
        is_barrier=True,
        rows=None,
        num_rows=count,
        prompt_rows=[],
    )


@given(data=st.data())
def test_the_other_side_has_the_same_step(data: st.DataObject) -> None:
    writer, reader = StepWriter(), StepReader(PAGE)
    tables = [[PageTable(PAGE, kept) for kept in (0, 2)] for _ in range(3)]
    segments = None
    for start in range(data.draw(st.integers(1, 12))):
        if data.draw(st.integers(0, 4)) == 0:  # one sequence ends, another one comes
            tables = [*tables[1:], [PageTable(PAGE, kept) for kept in (0, 2)]]
            segments = None
        for both in tables:
            for table in both:
                change(data.draw, table)
        step = step_of(tables, segments, start)
        segments = step.metadata.short[0]
        sent = messages.encode(writer.message(step, [3, 4]))
        received = reader.step(messages.ORDERS.decode(sent), {})
        assert checksum(received) == checksum(step)
        short = received.metadata.short[0]
        assert [[t._says() for t in both] for both in short.tables] == [
            [t._says() for t in both] for both in tables
        ]
        assert (received.known_ids == step.known_ids).all()
        assert received.work.seal[0][1:] == step.work.seal[0][1:]
    assert len(reader._tables) <= 2 * len(tables) + 2, "tables that ended are forgotten"


def test_a_steady_batch_is_its_positions() -> None:
    """64 sequences of 100,000 tokens each: a step is a few hundred bytes beside positions."""
    pages = list(range(6250))
    tables = [[PageTable(PAGE, pages=pages)] for _ in range(64)]
    writer = StepWriter()
    first = step_of(tables, None, 99_000)
    first.work = CacheWork()
    writer.message(first, [6250])
    second = step_of(tables, first.metadata.short[0], 99_001)
    second.work = CacheWork()
    frame = messages.encode(writer.message(second, [6250]))
    assert len(frame) <= 3 * 4 * 64 + 200


def full_step() -> StepInputs:
    """One in which everything occurs that a step may have."""
    tables = [[PageTable(PAGE, pages=[7 + i])] for i in range(4)]
    one = np.array([1, 2], dtype=np.int32)
    return StepInputs(
        metadata=StepMetadata(
            [Segments(tables[:2], one, one + 1, one + 2, one + 3, one + 4, width=4)],
            [Segments(tables[2:3], *[ints([n]) for n in (9, 16, 6, 0, 3)], width=6)],
            ints([3, 4, 5, 16]),
            spans=np.arange(8, dtype=np.int32).reshape(2, 4),
            moved_rope_positions=np.arange(12, dtype=np.int32).reshape(3, 4),
        ),
        follows=False,
        known_ids=ints([5, 6, 7, 8]),
        pending=ints([-1, 0, -1, -1]),
        work=CacheWork(
            seal=[Move(tables[0], 1, 0, 16)],
            spill=[PageTransfer(0, 5, Entry(b"key", b"parent", (1, 2)))],
            load=[PageTransfer(0, 6, Entry(b"other", b"key", (3,), memoryview(b"read")))],
            copies=[Move(tables[3], 2, 16, 20, (4, None))],
            save=[(1, 2)],
            leave=[3],
            resume=[(4, 5)],
            drop=[6],
        ),
        num_slots=4,
        new_slots=[2],
        is_barrier=True,
        rows=ints([0, 3]),
        num_rows=2,
        prompt_rows=[(1, 3)],
        rope_variants=ints([0, 1, 0, 0]),
        adapters=ints([0, 0, 2, 0]),
        feature_rows=ints([3]),
        num_deep=1,
    )


CHANGED: dict[type, dict[str, Any]] = {
    StepInputs: {
        "follows": True,
        "known_ids": ints([5, 6, 7, 9]),
        "pending": None,
        "num_slots": 5,
        "new_slots": [3],
        "is_barrier": False,
        "rows": ints([0, 2]),
        "num_rows": 3,
        "prompt_rows": [(1, 2)],
        "rope_variants": ints([0, 0, 1, 0]),
        "adapters": None,
        "feature_rows": ints([2]),
        "num_deep": 2,
    },
    CacheWork: {
        "seal": [Move([PageTable(PAGE, pages=[7])], 1, 0, 15)],
        "spill": [PageTransfer(0, 5, Entry(b"key", b"parent", (1, 3)))],
        "load": [PageTransfer(0, 6, Entry(b"key", b"key", (3,), memoryview(b"read")))],
        "copies": [Move([PageTable(PAGE, pages=[10])], 2, 16, 20, (5, None))],
        "save": [(1, 3)],
        "leave": [],
        "resume": [(4, 6)],
        "drop": [7],
    },
    StepMetadata: {
        **{"positions": ints([3, 4, 5, 17]), "short": [], "long": [], "verified": [2]},
        **{"spans": np.ones((2, 4), np.int32), "moved_rope_positions": np.ones((3, 4), np.int32)},
    },
    Segments: {
        **{name: ints([1, 9]) for name in ("rows", "starts", "counts", "sealed", "slots")},
        "tables": [[PageTable(PAGE, pages=[i])] for i in (7, 9)],
        "width": 5,
    },
}


@pytest.mark.parametrize("kind", CHANGED)
def test_the_checksum_takes_in_everything(kind: type) -> None:
    """Whatever a rank has otherwise than rank 0 is found by the next comparison."""
    names = {f.name for f in fields(kind) if not f.name.startswith("_")}
    assert set(CHANGED[kind]) == names - {"metadata", "work"}, "these have fields of their own"
    whole = checksum(full_step())
    assert checksum(full_step()) == whole
    for name, value in CHANGED[kind].items():
        step = full_step()
        parts = [step, step.work, step.metadata, step.metadata.short[0]]
        (part,) = [part for part in parts if type(part) is kind]
        object.__setattr__(part, name, value)
        assert checksum(step) != whole, name
    for name, value in CHANGED[Segments].items():
        step = full_step()
        object.__setattr__(step.metadata.long[0], name, value)
        assert checksum(step) != whole, name


def test_a_step_with_everything_has_one_checksum_on_both_sides() -> None:
    writer, reader = StepWriter(), StepReader(PAGE)
    sent = messages.ORDERS.decode(messages.encode(writer.message(full_step(), [3])))
    assert checksum(reader.step(sent, {b"other": memoryview(b"")})) == checksum(full_step())
