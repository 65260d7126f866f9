"""The prefix tree by example: what is found, shared, protected, evicted first, and at what cost."""

from collections.abc import Sequence
from itertools import count

import pytest

from mlxinfer.cache.pages import PageAllocator, PageTable
from mlxinfer.cache.prefix import Duplicate, Lease, PrefixTree, StoredPage
from mlxinfer.cache.prefix.store import EvictionQueue

SIZE = 4


def make_tree(*windows: int | None, num_pages: int = 200, **options: object) -> PrefixTree:
    allocators = [PageAllocator(num_pages, headroom=0) for _ in windows]
    tree = PrefixTree(allocators, windows=windows, page_size=SIZE, **options)
    tree.allocators = allocators
    return tree


def tables_for(
    tree: PrefixTree, num_tokens: int, first: Sequence[int] | None = None
) -> list[PageTable]:
    """Own pages for a sequence of `num_tokens`; group g has them from number `first[g]` on."""
    number = -(-num_tokens // SIZE)
    return [
        PageTable(SIZE, first=at, pages=allocator.allocate(number - at))
        for allocator, at in zip(tree.allocators, first or [0] * 9, strict=False)
    ]


def put(tree: PrefixTree, token_ids: list[int], *, priority: int = 0, partial: bool = True) -> None:
    """A sequence that came, was computed and went."""
    lease = tree.lock(tree.probe("", token_ids, limit=0), priority=priority)
    tables = tables_for(tree, len(token_ids))
    for duplicate in tree.extend(lease, token_ids, tables, num_tokens=len(token_ids)):
        tree.allocators[duplicate.group].release([duplicate.own])
    taken = partial and tree.add_partial(lease, token_ids, tables, num_tokens=len(token_ids))
    if len(token_ids) % SIZE and not taken:
        for table, allocator in zip(tables, tree.allocators, strict=True):
            allocator.release(table.pages[-1:])
    tree.unlock(lease)


def reused(tree: PrefixTree, token_ids: list[int], namespace: str = "") -> int:
    return tree.probe(namespace, token_ids, limit=len(token_ids)).num_tokens


def pass_by(tree: PrefixTree, lease: Lease, token_ids: list[int]) -> None:
    """A sequence with windows computes and moves on, page by page."""
    tables = [PageTable(SIZE) for _ in tree.allocators]
    for stop in range(SIZE, len(token_ids) + 1, SIZE):
        for table, allocator in zip(tables, tree.allocators, strict=True):
            table.append(allocator.allocate(1))
        tree.extend(lease, token_ids, tables, num_tokens=stop)
        tables[1].drop_before((stop - SIZE + 1) // SIZE)  # as a window of SIZE does
        tree.trim(lease, 1, tables[1].first)


# -- matching -----------------------------------------------------------------------------------


def test_finds_whole_pages_and_part_of_the_next() -> None:
    tree = make_tree(None)
    put(tree, list(range(10)))
    match = tree.probe("", [*range(7), 99, 98, 97])
    assert match.num_tokens == 7
    assert match.tables()[0].pages == [0]
    assert (match.cut_pages, match.cut_tokens) == ([1], 3)
    assert reused(tree, list(range(12))) == 10  # the partial leaf too
    assert reused(tree, list(range(10)), "adapter") == 0
    assert tree.counters.hits == 0  # looking is not using


def test_leaves_the_last_token_to_compute() -> None:
    tree = make_tree(None)
    put(tree, list(range(8)))
    match = tree.probe("", list(range(8)))
    assert (match.num_tokens, match.cut_tokens) == (7, 3)
    assert tree.probe("", []).num_tokens == tree.probe("", [0]).num_tokens == 0


def test_a_longer_page_takes_the_place_of_a_partial_leaf() -> None:
    tree = make_tree(None)
    put(tree, [1, 2])
    put(tree, [1, 2, 3])
    put(tree, [1, 2])
    assert tree.num_nodes == tree.num_pages(0) == tree.allocators[0].num_held == 1
    held = tree.lock(tree.probe("", [1, 2, 3, 9]))
    put(tree, [1, 2, 3, 4])
    assert tree.num_nodes == 2, "the partial one is being copied"
    tree.unlock(held)
    put(tree, [1, 2, 3, 5])
    assert tree.num_nodes == 2
    tree.check()


def test_a_window_resumes_only_where_its_pages_are() -> None:
    tree = make_tree(None, 6)
    tokens = list(range(24))
    assert tree.insert("", tokens, tables_for(tree, 24, first=[0, 3])) == []
    assert reused(tree, tokens) == 24
    assert reused(tree, tokens[:17]) == 17  # sees 12 to 16
    assert reused(tree, tokens[:16]) == 0  # would see 11
    assert tree.probe("", tokens).tables()[1] == PageTable(SIZE, first=4, pages=[1])
    tree.insert("", tokens[:16], filling := tables_for(tree, 16))  # what was missing comes
    assert reused(tree, tokens[:9]) == 9
    tree.allocators[0].release(filling[0].pages)
    tree.allocators[1].release(filling[1].pages[3:])
    tree.check()
    assert [a.num_held for a in tree.allocators] == [6, 6]


def test_sinks_are_needed_wherever_one_resumes() -> None:
    tree = make_tree(5, num_kept=[1])
    table = PageTable(SIZE, num_kept=1, first=3, kept=[7], pages=[9, 8])
    tree.allocators[0].allocate(12)
    tree.insert("", list(range(20)), [table])
    assert reused(tree, list(range(20))) == 20
    assert tree.probe("", list(range(30))).tables() == [
        PageTable(SIZE, num_kept=1, first=4, kept=[7], pages=[8])
    ]
    unheld = PageTable(SIZE, num_kept=0, first=1, pages=[1, 2, 3, 4])
    other = make_tree(5, num_kept=[1])
    other.allocators[0].allocate(5)
    lease = other.lock(other.probe("", [0], limit=0))
    other.extend(lease, list(range(20)), [unheld], num_tokens=20)
    assert reused(other, list(range(20))) == 0


# -- sharing ------------------------------------------------------------------------------------


def test_a_prompt_is_found_while_it_is_being_computed() -> None:
    tree = make_tree(None)
    tokens = list(range(20))
    tables = tables_for(tree, 20)
    first = tree.lock(tree.probe("", tokens))
    tree.extend(first, tokens, tables, num_tokens=9)
    assert first.num_pages == 2
    second = tree.lock(tree.probe("", tokens))
    tree.extend(first, tokens, tables, num_tokens=20)
    assert reused(tree, tokens) == 20
    own = tables_for(tree, 20)
    for number in range(2):
        own[0].replace(number, tables[0].pages[number])
    duplicates = tree.extend(second, tokens, own, num_tokens=16)
    assert duplicates == [
        Duplicate(0, number, own[0].pages[number], tables[0].pages[number]) for number in (2, 3)
    ]
    tree.unlock(first)
    assert tree.evict(0, 9) == 1, "the second still needs four"


def test_leases_protect_exactly_what_is_in_use() -> None:
    tree = make_tree(None, SIZE)
    lease = tree.lock(tree.probe("", [0], limit=0))
    pass_by(tree, lease, list(range(40)))
    assert [tree.num_evictable(g) for g in (0, 1)] == [0, 9], "the window needs its last page only"
    assert tree.evict(1, 5) == 5
    assert tree.counters.windows_dropped == 5
    tree.unlock(lease)
    assert [tree.num_evictable(g) for g in (0, 1)] == [10, 5]
    with pytest.raises(AssertionError):
        tree.unlock(lease)


def test_clearing_keeps_what_is_in_use_until_it_is_not() -> None:
    tree = make_tree(None, SIZE)
    put(tree, [7] * 8)
    tokens = list(range(20))
    lease = tree.lock(tree.probe("", tokens))
    pass_by(tree, lease, tokens[:16])
    tree.clear()
    assert (tree.num_nodes, reused(tree, tokens)) == (0, 0)
    assert [a.num_held for a in tree.allocators] == [4, 1]
    tables = tables_for(tree, 20)
    assert tree.extend(lease, tokens, tables, num_tokens=20) == []
    assert not tree.add_partial(lease, tokens, tables, num_tokens=20)
    for table, allocator in zip(tables, tree.allocators, strict=True):
        allocator.release(table.pages)
    tree.unlock(lease)
    assert [a.num_held for a in tree.allocators] == [0, 0]
    tree.check()


def test_what_two_share_lasts_until_the_last_of_them_ends() -> None:
    tree = make_tree(SIZE)
    put(tree, list(range(8)))
    leases = [tree.lock(tree.probe("", list(range(9)))) for _ in range(2)]
    assert tree.evict(0, 9) == 1
    tree.clear()
    tree.trim(leases[0], 0, 5)
    tree.unlock(leases[0])
    assert tree.allocators[0].num_held == 1
    tree.unlock(leases[1])
    assert tree.allocators[0].num_held == 0


def test_a_table_tells_how_far_its_window_is() -> None:
    tree = make_tree(SIZE)
    tokens = list(range(12))
    lease = tree.lock(tree.probe("", tokens, limit=0))
    table = tables_for(tree, 8)[0]
    tree.extend(lease, tokens, [table], num_tokens=8)
    table.drop_before(1)
    table.append(tree.allocators[0].allocate(1))
    tree.extend(lease, tokens, [table], num_tokens=12)
    assert tree.evict(0, 9) == 1


# -- eviction -----------------------------------------------------------------------------------


def test_the_longest_unused_goes_first_from_its_end() -> None:
    tree = make_tree(None)
    put(tree, [1, 1, 1, 1, 2, 2, 2, 2])
    put(tree, [3, 3, 3, 3, 4, 4, 4, 4])
    tree.unlock(tree.lock(tree.probe("", [1, 1, 1, 1, 2, 2, 2, 2, 5])))
    assert tree.evict(0, 1) == 1
    assert (reused(tree, [1, 1, 1, 1, 2, 2, 2, 2]), reused(tree, [3, 3, 3, 3, 4])) == (8, 4)
    assert tree.evict(0, 9) == 3
    assert tree.num_nodes == 0


def test_low_priority_goes_first_and_pins_never() -> None:
    tree = make_tree(None)
    put(tree, [1] * 8)
    pinned = tree.lock(tree.probe("", [1] * 8, limit=8))
    put(tree, [2] * 8, priority=1)
    put(tree, [3] * 8)
    tree.evict(0, 2)
    assert [reused(tree, [token] * 8) for token in (1, 2, 3)] == [8, 8, 0]
    assert tree.evict(0, 9) == 2
    assert reused(tree, [1] * 8) == 8
    tree.unlock(pinned)
    assert tree.evict(0, 9) == 2


def test_windows_lose_pages_passed_by_before_those_where_a_sequence_ended() -> None:
    tree = make_tree(None, SIZE)
    old = tree.lock(tree.probe("", [0], limit=0))
    pass_by(tree, old, list(range(12)))
    tree.unlock(old)
    new = tree.lock(tree.probe("", [0], limit=0))
    pass_by(tree, new, list(range(100, 140)))
    tree.unlock(new)
    tree.evict(1, 11)
    assert (reused(tree, list(range(12))), reused(tree, list(range(100, 140)))) == (12, 40)
    assert tree.num_pages(1) == 2
    tree.evict(1, 1)
    assert (reused(tree, list(range(12))), reused(tree, list(range(100, 140)))) == (0, 40)


def test_tells_what_goes_while_the_pages_are_still_there() -> None:
    reported: list[tuple[list[int], tuple[int | None, ...], int]] = []

    def note(gone: list[StoredPage]) -> None:
        reported.extend(
            (page.token_ids(), page.pages, tree.allocators[0].num_held) for page in gone
        )

    tree = make_tree(None, on_evict=note)
    put(tree, list(range(10)))
    tree.evict(0, 2)
    assert reported == [(list(range(10)), (2,), 3), (list(range(8)), (1,), 3)]
    assert [page.tokens for page in tree.stored()] == [(0, 1, 2, 3)]


def test_pages_are_given_back_even_if_the_listener_fails() -> None:
    def fail(gone: list[StoredPage]) -> None:
        raise RuntimeError(len(gone))

    tree = make_tree(None, on_evict=fail)
    put(tree, list(range(8)))
    with pytest.raises(RuntimeError, match="2"):
        tree.evict(0, 5)
    assert tree.allocators[0].num_held == 0
    tree.check()


def test_keys_of_a_path_are_made_once() -> None:
    calls = []

    def next_key(parent: bytes, tokens: Sequence[int]) -> bytes:
        calls.append(tokens)
        return parent + bytes(tokens)

    tree = make_tree(None)
    put(tree, list(range(12)))
    keys = [page.chain_keys(b"", next_key) for page in reversed(list(tree.stored()))]
    assert keys == [(bytes(range(n - SIZE)), bytes(range(n))) for n in (12, 8, 4)]
    assert len(calls) == 3


def test_queue_drops_stale_entries() -> None:
    queue: EvictionQueue[str] = EvictionQueue()
    for number in range(1000):
        queue.push("a", (1000 - number,))
        queue.push("b", (number,))
    assert len(queue) == 2
    assert len(queue._heap) < 100
    assert [queue.pop(), queue.pop(), queue.pop()] == ["a", "b", None]


# -- costs --------------------------------------------------------------------------------------


class Counted(int):
    """A token that counts how often it is looked at."""

    looked = 0

    def __eq__(self, other: object) -> bool:
        Counted.looked += 1
        return int(self) == other

    def __lt__(self, other: int) -> bool:
        Counted.looked += 1
        return int(self) < other

    def __hash__(self) -> int:
        Counted.looked += 1
        return int.__hash__(self)


@pytest.mark.parametrize("window", [None, 9])
def test_matching_costs_the_prompt_and_not_the_tree(window: int | None) -> None:
    def cost(num_tokens: int, num_others: int) -> int:
        tree = make_tree(window, num_pages=num_others + num_tokens)
        for other in range(num_others):  # all begin alike, and differ in the first page
            put(tree, [1, 1, 1, other])
        tokens = [Counted(7)] * num_tokens
        put(tree, tokens)
        Counted.looked = 0
        assert reused(tree, tokens) == num_tokens
        return Counted.looked

    assert cost(400, 1) <= 2.2 * cost(200, 1)
    assert cost(200, 500) - cost(200, 1) < 100


def test_holes_in_several_windows_cost_no_more_than_the_path() -> None:
    looked = count()

    class Pages(list):
        def __getitem__(self, group: int) -> int | None:
            next(looked)
            return super().__getitem__(group)

    def cost(num_pages: int) -> int:
        tree = make_tree(None, 60, 61, 62, num_pages=num_pages)
        tokens = list(range(num_pages * SIZE))
        tree.insert("", tokens, tables_for(tree, len(tokens)))
        for page in tree.stored():
            page.node.pages = Pages(page.node.pages)
            if page.page_number % 3:
                page.node.pages[page.page_number % 3] = None  # no two groups resume together
        before = next(looked)
        assert reused(tree, tokens) < 8
        return next(looked) - before

    assert cost(400) <= 2.2 * cost(200)


def test_growing_costs_what_is_new() -> None:
    tree = make_tree(None, 9)
    tokens = [Counted(token) for token in range(400)]
    tables = tables_for(tree, 400)
    lease = tree.lock(tree.probe("", tokens, limit=0))
    costs = []
    for stop in range(40, 401, 40):
        Counted.looked = 0
        tree.extend(lease, tokens, tables, num_tokens=stop)
        costs.append(Counted.looked)
    assert max(costs) <= min(costs) + 2


def test_a_pin_holds_windowed_pages_that_were_there_before() -> None:
    """Its priority counts for what an earlier sequence left, too."""
    tree = make_tree(None, 4 * SIZE)
    pinned, other = list(range(100, 116)), list(range(300, 316))
    put(tree, [*pinned, 1])
    put(tree, [*pinned, 1], priority=1)
    put(tree, [*other, 1])  # used later
    tree.evict(1, 5)
    assert reused(tree, pinned) == len(pinned)
    assert reused(tree, other) < len(other)
