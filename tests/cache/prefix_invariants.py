"""What holds of a prefix cache at any time."""

from collections import Counter
from collections.abc import Sequence

from mlxinfer.cache.pages import AttentionWindow, PageAllocator, PageGroup
from mlxinfer.cache.prefix import Lease, Page, PagesByGroup, PrefixCache


def groups_of(
    allocators: Sequence[PageAllocator],
    windows: Sequence[int | None],
    page_size: int,
    num_kept: Sequence[int] | None = None,
) -> list[PageGroup]:
    """Groups of these windows; `num_kept` pages of each hold sinks."""
    kept = num_kept or [0] * len(windows)
    return [
        PageGroup(AttentionWindow(window, sinks * page_size), allocator, page_size, page_size, 1)
        for allocator, window, sinks in zip(allocators, windows, kept, strict=True)
    ]


def check(prefix: PrefixCache) -> None:
    """Assert all invariants. Costs the number of pages."""
    named = list(prefix.page_of.values())
    known = {page for by_id in prefix.by_id for page in by_id.values()} | set(named)
    children = [page for pages in prefix.children.values() for page in pages]
    assert len(children) == len(named)
    assert set(children) == set(named)
    for page in known:
        assert any(number is not None for number in page.ids), "a page of nothing"
        assert page.is_named == (prefix.page_of.get(page.name) is page)
        assert page.is_named or any(page.users)
        assert 0 < len(page.tokens) <= prefix.page_size
        for group, number in enumerate(page.ids):
            assert page.users[group] >= 0
            assert number is not None or not page.users[group]
            waits = page.is_named and group in page.unused
            assert (page in waiting(prefix, group)) == waits
            if number is not None and group in prefix.attention:
                assert prefix.by_id[group][number] is page
    for parent, pages in prefix.children.items():
        assert [page.tokens for page in pages] == sorted({page.tokens for page in pages})
        assert all(page.parent == parent for page in pages)
    for group, by_id in enumerate(prefix.by_id):
        assert sum(page.ids[group] is not None for page in known) == len(by_id)
        if group not in prefix.windowed:
            check_parents(prefix, group)


def check_parents(prefix: PrefixCache, group: int) -> None:
    """All later tokens see these pages, so none is there, or needed, without its parent."""
    for page in prefix.page_of.values():
        parent = prefix.page_of.get(page.parent)
        if page.number and page.ids[group] is not None:
            assert parent.ids[group] is not None
            assert parent.users[group] or not page.users[group]


def check_users(
    prefix: PrefixCache, leases: Sequence[Lease], pins: Sequence[PagesByGroup] = ()
) -> set[Page]:
    """Pages count just the leases and pins that need them, by group; others have one owner.

    Returns:
        All pages with a name, and those that are needed without one.
    """
    assert not any(lease.released for lease in leases)
    users: Counter[tuple[Page, int]] = Counter()
    for needed in [*pins, *(lease.copied for lease in leases)]:
        users.update((page, group) for group, pages in needed.items() for page in pages)
    for group, allocator in enumerate(prefix.allocators):
        by_id = prefix.by_id[group]
        page_ids = [i for lease in leases for i in lease.tables[group].all_pages]
        unnamed = [i for i in page_ids if i not in by_id]
        assert len(unnamed) == len(set(unnamed)), "a page has two owners"
        assert allocator.num_held == len(unnamed) + len(by_id)
        assert allocator.num_held + allocator.num_free == allocator.num_pages
        users.update((by_id[i], group) for i in page_ids if i in by_id)
    known = {*prefix.page_of.values(), *(page for page, _ in users)}
    for page in known:
        assert page.users == [users[page, group] for group in range(len(page.users))]
    return known


def waiting(prefix: PrefixCache, group: int) -> set[Page]:
    """Pages of a group that may be evicted."""
    return {page for queue in prefix.unused[group].queues.values() for page in queue.run_of}


def states_of(prefix: PrefixCache) -> list[Page]:
    """Pages with a state after them."""
    return [page for page in prefix.page_of.values() if page.ids[-1] is not None]


def token_ids_of(prefix: PrefixCache, page: Page) -> list[int] | None:
    """All tokens from position 0 to the end of a page; None: pages before it are gone."""
    parts = [page.tokens]
    while page.number:
        parent = prefix.page_of.get(page.parent)
        if parent is None:
            return None
        parts.append(parent.tokens)
        page = parent
    return [token for part in reversed(parts) for token in part]
