"""Named pages by example, where the stateful test has no model: windows, states and costs."""

from collections.abc import Sequence

import pytest
from cache.prefix_invariants import check, groups_of, states_of

from mlxinfer.cache.disk import namespace_key
from mlxinfer.cache.pages import PageAllocator, StateGroup, resume_point
from mlxinfer.cache.prefix import EvictionQueue, Lease, Page, PrefixCache, index
from mlxinfer.cache.prefix.index import page_key

SIZE = 4


def make_cache(*windows: int | None, num_pages: int = 200, **options: object) -> PrefixCache:
    allocators = [PageAllocator(num_pages, headroom=0) for _ in windows]
    return PrefixCache(groups_of(allocators, windows, SIZE), **options)


def begin(cache: PrefixCache, token_ids: Sequence[int], priority: int = 0) -> Lease:
    """A sequence that reuses nothing."""
    point = cache.probe(cache.names("", token_ids), limit=0)
    return cache.lock(point, priority=priority)


def put(
    cache: PrefixCache, token_ids: Sequence[int], *, priority: int = 0, states: Sequence[int] = ()
) -> None:
    """A sequence that came, was computed and went."""
    lease, prompt = begin(cache, token_ids, priority), cache.names("", token_ids)
    for table, allocator in zip(lease.tables, cache.allocators, strict=True):
        table.append(allocator.allocate(-(-len(token_ids) // SIZE)))
    cache.extend(lease, prompt, len(token_ids))
    cache.add_partial(lease, prompt, len(token_ids))
    for place in states:
        assert cache.add_state(prompt, place) is not None
    cache.release(lease)


def pass_by(cache: PrefixCache, token_ids: list[int]) -> None:
    """A sequence with a window of SIZE in group 1 computes and moves on, page by page."""
    lease, prompt = begin(cache, token_ids), cache.names("", token_ids)
    for stop in range(SIZE, len(token_ids) + 1, SIZE):
        for table, allocator in zip(lease.tables, cache.allocators, strict=True):
            table.append(allocator.allocate(1))
        cache.extend(lease, prompt, stop)
        cache.give_back(lease, 1, cache.groups[1].recycle(lease.tables[1], stop))
    cache.release(lease)


def reused(cache: PrefixCache, token_ids: Sequence[int]) -> int:
    return cache.probe(cache.names("", token_ids), limit=len(token_ids)).num_tokens


# -- eviction -----------------------------------------------------------------------------------


def test_windows_lose_pages_passed_by_before_those_where_a_sequence_ended() -> None:
    cache = make_cache(None, SIZE)
    old, new = list(range(12)), list(range(100, 140))
    pass_by(cache, old)
    pass_by(cache, new)
    cache.evict(1, 11)
    assert (reused(cache, old), reused(cache, new)) == (12, 40)
    assert len(cache.by_id[1]) == 2
    cache.evict(1, 1)
    assert (reused(cache, old), reused(cache, new)) == (0, 40)


def test_a_page_is_given_back_even_if_the_listener_fails() -> None:
    def fail(page: Page, groups: Sequence[int]) -> None:
        raise RuntimeError(page.number)

    cache = make_cache(None, on_evict=fail)
    put(cache, range(8))
    with pytest.raises(RuntimeError, match="1"):  # of two, the deepest
        cache.evict(0, 5)
    assert cache.allocators[0].num_held == 1
    check(cache)


def test_queue_drops_stale_entries() -> None:
    queue, (a, b, c) = EvictionQueue(), [Page(b"", b"", number, (), []) for number in range(3)]
    for number in range(1000):
        queue.push([a], (1000 - number,))
        queue.push([b, c], (number,))
    assert len(queue) == 3
    assert len(queue._heap) < 100
    assert [queue.pop() for _ in range(4)] == [a, c, b, None]


def test_a_page_is_kept_by_the_highest_priority_of_all_that_used_it() -> None:
    cache = make_cache(None, 4 * SIZE)
    shared, other = list(range(100, 116)), list(range(300, 316))
    put(cache, [*shared, 1])
    put(cache, [*shared, 1], priority=1)
    put(cache, [*other, 1])  # used later
    cache.evict(1, 5)
    assert reused(cache, shared) == len(shared)
    assert reused(cache, other) < len(other)


# -- states -------------------------------------------------------------------------------------


def test_the_longest_unused_state_goes_first() -> None:
    cache = make_cache(None, states=StateGroup(1, 2))
    for first in (1, 2, 3):
        if first == 3:  # the first one is used in between
            cache.release(cache.lock(cache.probe(cache.names("", [1] * SIZE + [9]))))
        put(cache, [first] * SIZE, states=[SIZE])
    assert [reused(cache, [first] * SIZE) for first in (1, 2, 3)] == [SIZE, 0, SIZE]


def test_a_longer_page_leaves_the_state_of_a_shorter_one() -> None:
    cache = make_cache(None, states=StateGroup(1, 9))
    put(cache, [5, 6], states=[2])
    put(cache, [5, 6, 7, 8])
    assert len(cache.by_id[0]) == len(states_of(cache)) == 1
    assert cache.probe(cache.names("", [5, 6, 1, 1, 1])).num_tokens == 2
    check(cache)


def test_the_coordinator_finds_the_last_position_that_all_accept() -> None:
    for a in range(1, 7):
        for b in range(1, 7):
            for alignment in (1, 2, 3):
                rules = [lambda n, a=a: n - n % a, lambda n, b=b: n - n % b]  # type: ignore[misc]
                expected = max(n for n in range(41) if not (n % a or n % b or n % alignment))
                assert resume_point(40, rules, alignment) == expected


def test_a_state_behind_a_page_that_a_window_lost_goes_first() -> None:
    cache = make_cache(None, 5, states=StateGroup(1, 2))
    for first in (1, 2):
        put(cache, [first] * 2 * SIZE, states=[SIZE])
    kept = cache.hold_path(cache.probe(cache.names("", [1] * 2 * SIZE + [9])))
    passed = cache.hold_path(cache.probe(cache.names("", [2] * 2 * SIZE + [9])))
    cache.let_go({1: passed[1]})
    cache.evict(1, 9)
    assert (reused(cache, [1] * SIZE), reused(cache, [2] * SIZE)) == (SIZE, 0)
    assert len(states_of(cache)) == 2
    assert cache.evict(2, 1) == 1, "the one used last, from which nothing can go on"
    assert reused(cache, [1] * SIZE) == SIZE
    check(cache)
    cache.let_go(kept)
    cache.let_go({0: passed[0]})


# -- names --------------------------------------------------------------------------------------


def test_pages_keep_their_prompts_when_the_model_becomes_known() -> None:
    cache = make_cache(None, states=StateGroup(1, 2))
    put(cache, range(11), states=[8, 11])
    cache.set_root(namespace_key("a model"))
    assert reused(cache, range(11)) == 11
    prompt = cache.names("", range(11))
    assert prompt.root == cache.root_of("") != cache.root == namespace_key("a model")
    assert cache.page_of[prompt.name(1)].ids[0] is not None
    check(cache)


@pytest.mark.parametrize("window", [None, 9])
def test_each_page_is_hashed_once(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[list[int]] = []

    def counted(parent: bytes, token_ids: Sequence[int]) -> bytes:
        hashed.append(list(token_ids))
        return page_key(parent, token_ids)

    cache = make_cache(window)
    put(cache, range(400))
    monkeypatch.setattr(index, "page_key", counted)
    prompt = cache.names("", range(400))
    for _ in range(3):
        assert cache.probe(prompt).num_tokens == 399
    lease = cache.lock(cache.probe(prompt, limit=0))
    for table, allocator in zip(lease.tables, cache.allocators, strict=True):
        table.append(allocator.allocate(100))
    cache.extend(lease, prompt, 400)
    assert hashed == [list(range(n, n + SIZE)) for n in range(0, 400, SIZE)]
    cache.release(lease)


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

    def __index__(self) -> int:  # as hashing does
        Counted.looked += 1
        return int(self)

    def __hash__(self) -> int:
        Counted.looked += 1
        return int.__hash__(self)


@pytest.mark.parametrize("window", [None, 9])
def test_matching_costs_the_prompt_and_not_what_is_cached(window: int | None) -> None:
    def cost(num_tokens: int, num_others: int) -> int:
        cache = make_cache(window, num_pages=num_others + num_tokens)
        for other in range(num_others):  # all begin alike, and differ in the first page
            put(cache, [1, 1, 1, other])
        tokens = [Counted(7)] * num_tokens
        put(cache, tokens)
        Counted.looked = 0
        assert reused(cache, tokens) == num_tokens
        return Counted.looked

    assert cost(400, 1) <= 2.2 * cost(200, 1)
    assert cost(200, 500) - cost(200, 1) < 100


def test_holes_in_several_windows_cost_no_more_than_the_path() -> None:
    looked = 0

    class Ids(list):
        def __getitem__(self, group: int) -> int | None:
            nonlocal looked
            looked += 1
            return super().__getitem__(group)

    def cost(num_pages: int) -> int:
        cache = make_cache(None, 60, 61, 62, num_pages=num_pages)
        tokens = range(num_pages * SIZE)
        put(cache, tokens)
        for page in cache.page_of.values():
            page.ids = Ids(page.ids)
            if page.number % 3:
                page.ids[page.number % 3] = None  # no two groups resume together
        before = looked
        assert reused(cache, tokens) < 8
        return looked - before

    assert cost(400) <= 2.2 * cost(200)


def test_growing_costs_what_is_new() -> None:
    cache = make_cache(None, 9)
    tokens = [Counted(token) for token in range(400)]
    lease, prompt = begin(cache, tokens), cache.names("", tokens)
    for table, allocator in zip(lease.tables, cache.allocators, strict=True):
        table.append(allocator.allocate(100))
    costs = []
    for stop in range(40, 401, 40):
        Counted.looked = 0
        cache.extend(lease, prompt, stop)
        costs.append(Counted.looked)
    assert max(costs) <= min(costs) + 2
