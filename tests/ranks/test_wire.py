"""Steps over the wire: what the other side has is what was sent, whatever became of the tables."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxinfer.cache.inputs import CacheWork, Move, Segments, StepSegments, ints
from mlxinfer.cache.pages import PageTable
from mlxinfer.engine.forward import StepInputs
from mlxinfer.ranks.messages import orders
from mlxinfer.ranks.wire import Reader, Writer, checksum

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
        segments=StepSegments([segments], [], starts),
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
@settings(max_examples=60)
def test_the_other_side_has_the_same_step(data: st.DataObject) -> None:
    writer, reader, messages = Writer(), Reader(PAGE), orders()
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
        segments = step.segments.short[0]
        sent = messages.encode(writer.message(step, [3, 4]))
        received = reader.step(messages.decode(sent), {})
        assert checksum(received) == checksum(step)
        short = received.segments.short[0]
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
    writer, messages = Writer(), orders()
    first = step_of(tables, None, 99_000)
    first.work = CacheWork()
    writer.message(first, [6250])
    second = step_of(tables, first.segments.short[0], 99_001)
    second.work = CacheWork()
    frame = messages.encode(writer.message(second, [6250]))
    assert len(frame) <= 3 * 4 * 64 + 200
