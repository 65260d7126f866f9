"""The prefix tree by example, where the stateful test has no model: windows, failures, costs."""

from collections.abc import Sequence
from itertools import count

import pytest
from cache.prefix_invariants import check, groups_of

from mlxinfer.cache.pages import PageAllocator, PageTable
from mlxinfer.cache.prefix import Lease, Node, PrefixTree, Snapshot
from mlxinfer.cache.prefix.store import EvictionQueue

SIZE = 4


def make_tree(*windows: int | None, num_pages: int = 200, **options: object) -> PrefixTree:
    allocators = [PageAllocator(num_pages, headroom=0) for _ in windows]
    tree = PrefixTree(groups_of(allocators, windows, SIZE), **options)
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
    tree.extend(lease, token_ids, tables, num_tokens=len(token_ids))
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


def test_pages_are_given_back_even_if_the_listener_fails() -> None:
    def fail(node: Node, pages: Sequence[int | None], snapshots: Sequence[Snapshot]) -> None:
        raise RuntimeError(node.number)

    tree = make_tree(None, on_evict=fail)
    put(tree, list(range(8)))
    with pytest.raises(RuntimeError, match="1"):  # of two, the deepest
        tree.evict(0, 5)
    assert tree.allocators[0].num_held == 0
    check(tree)


def test_keys_of_a_path_are_made_once() -> None:
    calls = []

    def next_key(parent: bytes, tokens: Sequence[int]) -> bytes:
        calls.append(tokens)
        return parent + bytes(tokens)

    tree = make_tree(None)
    put(tree, list(range(12)))
    keys = [page.chain_keys(b"", next_key) for page in reversed(list(tree.nodes()))]
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
        for page in tree.nodes():
            page.pages = Pages(page.pages)
            if page.number % 3:
                page.pages[page.number % 3] = None  # no two groups resume together
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
