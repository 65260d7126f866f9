"""The page allocator against a naive set, and page tables against arithmetic."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.cache.pages import AttentionWindow, PageAllocator, PageGroup, PageTable

PAGE = 4


def test_extends_a_run_while_it_can() -> None:
    allocator = PageAllocator(100, headroom=8)
    first = allocator.allocate(3)
    other = allocator.allocate(2)
    assert first == [0, 1, 2]
    assert other == [11, 12]  # headroom is left for the first to grow
    assert allocator.allocate(2, after=2) == [3, 4]


def test_fills_what_is_near_before_it_goes_further() -> None:
    allocator = PageAllocator(100, headroom=8)
    allocator.num_present = 24
    assert allocator.allocate(3) == [0, 1, 2]
    assert allocator.allocate(3) == [11, 12, 13]
    assert allocator.allocate(4) == [14, 15, 16, 17]  # with headroom it would end in page 25
    assert allocator.allocate(9) == [26, 27, 28, 29, 30, 31, 32, 33, 34]  # nowhere nearer
    assert allocator.allocate(8) == [3, 4, 5, 6, 7, 8, 9, 10]


def test_pages_that_were_never_handed_out_cost_nothing() -> None:
    allocator = PageAllocator(1 << 50, headroom=8)
    assert allocator.allocate(3) + allocator.allocate(2) == [0, 1, 2, 11, 12]
    allocator.release([1, 11, 12])
    assert allocator.allocate(1 << 10) == list(range(11, 11 + (1 << 10)))
    allocator.resize(1 << 40)
    assert allocator.num_free == (1 << 40) - 2 - (1 << 10)


@given(st.data())
def test_allocator_equals_a_naive_set(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 40))
    allocator = PageAllocator(total, headroom=data.draw(st.integers(0, 4)))
    allocator.num_present = data.draw(st.integers(0, total))
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 40))):
        free = set(range(total)) - {page for pages in held for page in pages}
        if held and data.draw(st.booleans()):
            allocator.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
            continue
        num = data.draw(st.integers(1, total))
        owner = data.draw(st.sampled_from(held)) if held and data.draw(st.booleans()) else None
        after = owner[-1] if owner else None
        if num > len(free):
            assert allocator.num_free < num
            continue
        pages = allocator.allocate(num, after=after)
        if after is None:
            place = lowest_with_headroom(free, num, allocator.headroom)
            if place is not None and place + num <= allocator.num_present:
                assert pages == list(range(place, place + num))
        assert len(pages) == num == len(set(pages))
        assert set(pages) <= free
        if after is not None and after + 1 in free:
            assert pages[0] == after + 1
        if owner is None:
            held.append(pages)
        else:
            owner += pages
    num_held = sum(map(len, held))
    assert allocator.num_held == num_held
    assert allocator.num_free == total - num_held
    assert allocator.extent >= max((page + 1 for pages in held for page in pages), default=0)


def lowest_with_headroom(free: set[int], count: int, headroom: int) -> int | None:
    """Where `count` pages go, the headroom after the owner before them left free."""
    for start in sorted(page for page in free if page - 1 not in free):
        place = start + (headroom if start else 0)
        if free.issuperset(range(start, place + count)):
            return place
    return None


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True), st.data())
def test_runs_cover_exactly_the_positions(pages: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, 5))
    table = PageTable(4, first=first, pages=list(pages))
    start = data.draw(st.integers(first * 4, table.end - 1))
    stop = data.draw(st.integers(start + 1, table.end))
    slots = [slot for run in table.runs(start, stop) for slot in range(*run)]
    assert slots == [pages[p // 4 - first] * 4 + p % 4 for p in range(start, stop)]
    runs = table.runs(start, stop)
    assert all(a[1] != b[0] for a, b in pairwise(runs)), "runs that touch"


def test_kept_pages_stay_while_a_window_moves_on() -> None:
    table = PageTable(4, num_kept=1)
    table.append([9])
    assert table.end == 4
    table.append([7, 8, 3, 4])
    assert table.runs(0, 20) == [(36, 40), (28, 36), (12, 20)]
    assert table.drop_before(3) == [7, 8]
    assert table.drop_before(1) == []
    assert table.runs(0, 4) == [(36, 40)]
    assert table.runs(13, 20) == [(13, 20)]
    assert table.all_pages == [9, 3, 4]
    assert table.end == 20
    assert table.last == 4
    table.drop_before(5)
    assert table.last is None


@given(st.data())
def test_what_a_table_remembers_is_what_it_holds(data: st.DataObject) -> None:
    """Whatever happens between two questions, the second is answered as by a new table."""
    table = PageTable(4, num_kept=data.draw(st.integers(0, 2)))
    fresh = iter(range(1000))
    table.append([next(fresh) for _ in range(4)])
    for _ in range(data.draw(st.integers(1, 12))):
        stop = data.draw(st.integers(0, table.end))
        new = PageTable(4, table.num_kept, table.first, list(table.kept), list(table.pages))
        assert table.numbers_before(stop) == new.numbers_before(stop)
        if not table.first > table.num_kept:
            assert table.runs(0, stop) == new.runs(0, stop)
        match data.draw(st.sampled_from(["append", "drop", "replace", "ask"])):
            case "append":
                table.append([next(fresh) for _ in range(data.draw(st.integers(1, 3)))])
            case "drop":
                table.drop_before(data.draw(st.integers(0, table.end // 4)))
            case "replace":
                held = [*range(table.num_kept), *range(table.first, table.end // 4)]
                if held:
                    table.replace(data.draw(st.sampled_from(held)), next(fresh))


def can_go_on(group: PageGroup, held: list[bool], position: int) -> bool:
    """By definition: the pages are there that the token at `position` sees, and its own."""
    ranges = group.window.ranges(position, position)
    seen = {n // PAGE for low, high in ranges for n in range(low, high)}
    seen |= {*range(min(group.num_kept, -(-position // PAGE)))} if group.recycles else set()
    seen |= {position // PAGE} if position % PAGE else set()
    return all(held[number] for number in seen)


@pytest.mark.parametrize("seed", range(300))
def test_a_group_resumes_at_the_last_position_whose_pages_are_there(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([None, 1, 3, 9, 16])
    window = AttentionWindow(size, sinks=rng.choice([0, 1, 5]) if size else 0)
    if size and not window.sinks and rng.random() < 0.5:
        window = AttentionWindow(size, chunked=True)
    group = PageGroup(window, PageAllocator(1), PAGE, PAGE, 1)
    asked: list[int] = []
    held = [rng.random() < rng.choice([0.5, 0.9]) for _ in range(10)]

    def holds(start: int, stop: int) -> int:
        for number in range(start // PAGE, -(-stop // PAGE)):
            asked.append(number)
            if not held[number]:
                return number * PAGE
        return stop

    longest = rng.randint(0, 10 * PAGE)
    expected = max(n for n in range(longest + 1) if can_go_on(group, held, n))
    assert group.last_resumable(longest, holds) == expected, seed
    assert len(asked) <= 10 + group.num_kept, "each page is looked for once"
