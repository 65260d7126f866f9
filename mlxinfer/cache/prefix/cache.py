"""The prefix cache: which sequences need a page, and which page is evicted next.

A page with a name belongs to the cache and is never written again. For each group, the cache counts
the sequences that need a page; a page without any can be evicted. A sequence that needs a page
also needs all pages before it, and releases them at the same time or later. So a page is never
evicted before the pages that follow it. Pure Python; knows no arrays and no requests.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from ...fair import NOBODY, Tenant
from ..pages import HeldBy, PageGroup, PageTable, Spans, StateGroup, longest_prefix
from .index import Name, Page, PageIndex, PageNames, UnusedPages, namespace_key, page_key

LOCAL_ROOT = namespace_key("this process")
PagesByGroup = dict[int, list[Page]]
"""Pages that somebody needs, by group; those of a prompt in order."""
OnEvict = Callable[[Page, Sequence[int]], None]
"""Gets a page and the groups that lose it, before their places are given to others."""


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The prefix that a prompt can reuse. Lock it before anything else changes the cache."""

    names: PageNames
    num_tokens: int  # positions that need not be computed
    num_matched: int  # positions that agree with pages, whether groups can resume there or not
    path: list[Page | None]  # the whole pages before `num_matched`; None: no group has that page
    cut: Page | None  # the page that `num_tokens` lies inside of
    state: Page | None  # the page with the state after `num_tokens`, where there are state layers
    tables: list[PageTable]  # by group, of the whole pages that are needed to go on
    spans: Spans  # of the prompt

    @property
    def num_pages(self) -> int:
        return self.num_tokens // self.names.page_size

    @property
    def cut_tokens(self) -> int:
        """Tokens of `cut` that are reused."""
        return self.num_tokens % self.names.page_size

    def holds(self, number: int, group: int) -> bool:
        """Whether a group has whole page `number` of the prompt."""
        page = self.path[number] if number < len(self.path) else None
        return page is not None and page.ids[group] is not None


@dataclass(slots=True, eq=False)
class Lease:
    """The pages of the cache that one sequence holds."""

    tables: list[PageTable]  # by group; whole pages before number `num_pages` have names
    num_pages: int
    # the page it is inside of and the state it goes on from, until they are copied
    copied: PagesByGroup
    priority: int
    epoch: int  # how often everything had been forgotten when it began
    tenant: Tenant = NOBODY  # of the sequence
    released: bool = False


class PrefixCache(PageIndex):
    """Named pages of all layer groups.

    Args:
        groups: what layers keep in pages, and where these come from and go back to.
        on_evict: gets pages that go, the deepest of a prompt first. A window's page that goes while
            longer prompts are there is left out.
        states: of the state layers; None: there are none.

    Attributes:
        epoch: how often everything was forgotten. A lease of another epoch names nothing.
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        *,
        on_evict: OnEvict | None = None,
        states: StateGroup | None = None,
        root: Name = LOCAL_ROOT,
    ) -> None:
        assert groups
        super().__init__(root, groups[0].page_size)
        self.groups, self.states = groups, states
        self.allocators = [group.allocator for group in groups]
        self.attention = range(len(groups))
        self.windowed = [g for g, group in enumerate(groups) if group.recycles]
        num_groups = len(groups) + (states is not None)
        self.unused = [UnusedPages() for _ in range(num_groups)]
        self.by_id: list[dict[int, Page]] = [{} for _ in groups]
        self.tokens_reused = 0  # of matches that were made use of
        self._num_uses = itertools.count(1)
        self._needs_whole = len(self.windowed) < len(groups)  # a group needs every page
        self.alignment = self.page_size if any(group.whole_pages for group in groups) else 1
        self._on_evict = on_evict or (lambda page, groups: None)
        self.epoch = 0

    def set_root(self, root: Name) -> None:
        """Name all pages again, now that it is known what the model is.

        Those whose parents a window has recycled are forgotten: their names cannot be known.
        """
        for page in self.rename(root):
            self._forget(page)

    # -- looking --------------------------------------------------------------------------------

    def probe(
        self,
        names: PageNames,
        *,
        limit: int | None = None,
        whole_pages: bool = False,
        spans: Spans = (),
    ) -> RestorePoint:
        """The longest reusable prefix of at most `limit` tokens. Locks, counts, changes nothing.

        The last token of a prompt must be computed, so the default limit is one less than its
        length. The time depends on the length of the prompt, and not on what the cache holds.

        Args:
            limit: tokens.
            whole_pages: end at the end of a page, even if all groups could go on inside of one.
        """
        num_ids, size = len(names.token_ids), self.page_size
        highest = max(num_ids - 1 if limit is None else min(limit, num_ids), 0)
        path = self.walk(names, highest // size, whole=self._needs_whole)
        partial_page = names.tokens(len(path), min(highest - len(path) * size, size))
        begun, overlap = self.closest(names.name(len(path) - 1), partial_page, self.attention)

        longest = len(path) * size + overlap
        ids = [[None if page is None else page.ids[g] for page in path] for g in self.attention]
        point = longest_prefix(
            longest,
            self.groups,
            self.states,
            self._held(names, ids, begun),
            spans=spans,
            alignment=size if whole_pages else self.alignment,
        )
        number, inside = divmod(point, size)
        cut = (path[number] if number < len(path) else begun) if inside else None
        at = (number, inside) if inside else (number - 1, size)
        return RestorePoint(
            names=names,
            num_tokens=point,
            num_matched=longest,
            path=path,
            cut=cut,
            state=self._last_state(names, *at) if self.states is not None and point else None,
            tables=[self._table(g, ids[g][:number], point) for g in self.attention],
            spans=spans,
        )

    def _last_state(self, names: PageNames, number: int, count: int) -> Page | None:
        """Of the pages that the first `count` tokens of a page begin with, the longest with a
        state.
        """
        pages = self.beginnings(names.name(number - 1), names.tokens(number, count))
        return next((page for page in pages if page.ids[-1] is not None), None)

    def _held(
        self, names: PageNames, ids: Sequence[Sequence[int | None]], begun: Page | None
    ) -> HeldBy:
        """Up to where a group has pages, for `longest_prefix`.

        Args:
            ids: by group, its pages of the whole ones that agree; None where one is missing.
            begun: the page that shares the beginning of the page behind them.
        """

        def held(group: int, start: int, stop: int) -> int:
            number, size = start // self.page_size, self.page_size
            if group == len(self.groups):
                state = self._last_state(names, number, stop - start)
                return start if state is None else start + len(state.tokens)
            of_begun = begun.ids[group] if begun is not None else None
            page_ids = [*ids[group][number : -(-stop // size)], of_begun]
            return min(start + page_ids.index(None) * size, stop) if None in page_ids else stop

        return held

    def _table(self, group: int, ids: Sequence[int | None], num_tokens: int) -> PageTable:
        """A group's table of the whole pages that are needed to go on after `num_tokens`.

        `ids`: its pages, up to there.
        """
        num_kept = self.groups[group].num_kept
        first = max(self.groups[group].first_page(num_tokens), num_kept)
        sinks, rest = ids[:num_kept], ids[first:]  # a restore point has all: no id is None
        return PageTable(self.page_size, num_kept, first, sinks, rest)  # type: ignore[arg-type]

    def num_evictable(self, group: int, tenant: Tenant | None = None) -> int:
        """Pages of a group that `evict` could free now; for a tenant: without everything."""
        unused = self.unused[group]
        return len(unused) if tenant is None else unused.num_for(tenant, self._num_shared(group))

    def _num_shared(self, group: int) -> int:
        if group in self.attention:
            return self.allocators[group].num_pages
        return self.unused[group].held.total()

    # -- using ----------------------------------------------------------------------------------

    def lock(self, point: RestorePoint, *, priority: int = 0, tenant: Tenant = NOBODY) -> Lease:
        """Take what a match found until `release`. The match must be fresh, and may be empty.

        Its pages are evicted after all pages of a lower priority, see `evict`.
        """
        tables = enumerate(point.tables)
        whole = {g: [*map(self.by_id[g].__getitem__, table.all_pages)] for g, table in tables}
        copied: PagesByGroup = {} if point.cut is None else self._of_groups([point.cut])
        if point.state is not None:
            copied[len(self.groups)] = [point.state]
        self.use(whole, anchored=True)
        self.use(copied, anchored=True)
        return Lease(point.tables, point.num_pages, copied, priority, self.epoch, tenant)

    def hold_path(self, point: RestorePoint) -> PagesByGroup:
        """Keep all whole pages that agreed with a prompt, until `let_go`."""
        users = self._of_groups(point.path)
        self.use(users, anchored=True)
        return users

    def _of_groups(self, pages: Sequence[Page | None]) -> PagesByGroup:
        return {g: [p for p in pages if p and p.ids[g] is not None] for g in self.attention}

    def use(self, users: PagesByGroup, *, anchored: bool = False) -> None:
        for group, pages in users.items():
            for page in pages:
                assert page.is_named, "the cache changed between match and lock"
                page.users[group] += 1
                if anchored:
                    page.anchored[group] = True
            self.unused[group].discard(pages)

    def let_go(self, users: PagesByGroup, *, priority: int = 0, anchored: bool = False) -> None:
        """Note that a sequence no longer needs these pages; they count as just used.

        Args:
            anchored: others will go on from here.
        """
        now = next(self._num_uses)
        for group, pages in users.items():
            unused = []
            for page in pages:
                page.tick = now
                if page.priority < priority:
                    page.priority = priority
                if anchored:
                    page.anchored[group] = True
                page.users[group] = left = page.users[group] - 1
                assert left >= 0
                if not left:
                    unused.append(page)
            self._offer(group, unused)

    def release_copied(self, lease: Lease) -> None:
        """Stop protecting the cut page and the state: copies of them are launched.

        `release` does so too.
        """
        copied, lease.copied = lease.copied, {}
        self.let_go(copied, priority=lease.priority)

    def give_back(self, lease: Lease, group: int, ids: Sequence[int]) -> None:
        self.let_go({group: self._named(group, ids)}, priority=lease.priority)

    def _named(self, group: int, ids: Sequence[int]) -> list[Page]:
        """The named pages among `ids`; pages without a name are given back."""
        pages = []
        for page_id in ids:
            page = self.by_id[group].get(page_id)
            if page is None:
                self.allocators[group].release((page_id,))
            else:
                pages.append(page)
        return pages

    def release(self, lease: Lease) -> None:
        assert not lease.released
        lease.released = True
        self.release_copied(lease)
        users = {g: self._named(g, table.all_pages) for g, table in enumerate(lease.tables)}
        self.let_go(users, priority=lease.priority, anchored=True)

    # -- naming ---------------------------------------------------------------------------------

    def extend(self, lease: Lease, names: PageNames, num_tokens: int) -> bool:
        """Name the whole pages of the first `num_tokens` positions that have no name yet.

        Where there is an equal page, it takes the place of the sequence's in the table, and the
        sequence's is released. Costs what is new. After `clear`, a lease from before names nothing.

        Args:
            names: of its pages.
            num_tokens: positions that have keys and values in pages, or will be once the steps
                launched so far have run.

        Returns:
            Whether a page was replaced by an equal one.
        """
        replaced, stop = False, num_tokens // self.page_size
        users: PagesByGroup = {group: [] for group in self.attention}
        if lease.epoch != self.epoch:
            return False
        for number in range(lease.num_pages, stop):
            if all(table.page_at(number) is None for table in lease.tables):
                continue
            page = self._page(names, number, self.page_size, lease.priority, lease.tenant)
            for group, table in enumerate(lease.tables):
                page_id, known_id = table.page_at(number), page.ids[group]
                if page_id is not None and known_id is not None:
                    table.replace(number, known_id)
                    self.allocators[group].release([page_id])
                    replaced = True
                if page_id is not None:
                    self.fill(page, group, page_id if known_id is None else known_id)
                    users[group].append(page)
        self.use(users)
        lease.num_pages = max(lease.num_pages, stop)
        return replaced

    def add_partial(self, lease: Lease, names: PageNames, num_tokens: int) -> None:
        """Name the last page, begun but not full, for good: it is never written again.

        Call it after `extend`, when the sequence ends. Nothing is done if there is no such page,
        or one that begins like it.
        """
        count = num_tokens - lease.num_pages * self.page_size
        tokens = names.tokens(lease.num_pages, max(count, 0))
        parent = names.name(lease.num_pages - 1)
        if lease.epoch != self.epoch or not tokens or self._covers(parent, tokens):
            return
        page = self._page(names, lease.num_pages, count, lease.priority, lease.tenant)
        for group, table in enumerate(lease.tables):
            page_id = table.page_at(lease.num_pages)
            if page_id is not None:
                self.fill(page, group, page_id)
                self.use({group: [page]}, anchored=True)

    def add_state(
        self, names: PageNames, num_tokens: int, priority: int = 0, tenant: Tenant = NOBODY
    ) -> Page | None:
        """Make room for the state after the first `num_tokens` tokens, which pages must hold.

        If there is no room, the state that was unused for longest is evicted.

        Returns:
            None: there is one already, there are no such pages, or there is no room.
        """
        number = (num_tokens - 1) // self.page_size
        count, group = num_tokens - number * self.page_size, len(self.groups)
        tokens, parent = names.tokens(number, count), names.name(number - 1)
        if self.states is None or not self._covers(parent, tokens):
            return None
        page = self.page_of.get(page_key(parent, tokens))
        if page is not None and page.ids[group] is not None:
            page.tick = next(self._num_uses)
            if not page.users[group]:
                self._offer(group, [page])
            return None
        if not self.states.has_room and not self.evict(group, 1, tenant):
            return None
        page = self._page(names, number, count, priority, tenant)
        self.fill(page, group, self.states.allocate())
        self._offer(group, [page])
        return page

    def _covers(self, parent: Name, tokens: tuple[int, ...]) -> bool:
        return self.closest(parent, tokens, self.attention)[1] == len(tokens)

    def remove_state(self, page: Page) -> None:
        """Give up a state that another one replaces, unless it is needed or gone."""
        if page.is_named and len(self.groups) in page.unused:
            self._free(page, [len(self.groups)])

    def fill(self, page: Page, group: int, number: int) -> None:
        if page.ids[group] is not None:
            return
        page.ids[group] = number
        self.unused[group].hold(page.owner, 1)
        if group in self.attention:
            self.by_id[group][number] = page
            if self.states is not None and len(self.groups) in page.unused:
                self._offer(len(self.groups), [page])

    def insert(self, names: PageNames, number: int, group: int, page_id: int) -> Page | None:
        """Name a page that the caller needs until `let_go`; None: the group has one of the name."""
        page = self._page(names, number, self.page_size, 0)
        if page.ids[group] is not None:
            return None
        self.fill(page, group, page_id)
        self.use({group: [page]}, anchored=True)
        return page

    def _page(
        self, names: PageNames, number: int, count: int, priority: int, owner: Tenant = NOBODY
    ) -> Page:
        """The page of the first `count` tokens of a page; made if it does not exist.

        Shorter ones that it begins with make room for it, but keep their states.
        """
        parent, tokens = names.name(number - 1), names.tokens(number, count)
        whole = count == self.page_size
        name = names.name(number) if whole else page_key(parent, tokens)
        page = self.page_of.get(name)
        if page is None:
            for shorter in list(self.beginnings(parent, tokens)):
                self._free(shorter, [g for g in shorter.unused if g in self.attention])
            anchored = [g not in self.windowed for g in range(len(self.unused))]
            page = Page(name, parent, number, tokens, anchored)
            page.priority, page.tick, page.owner = priority, next(self._num_uses), owner
            self.add(page)
        before = self.page_of.get(parent)
        if before is not None and before.owner != page.owner:
            self._give(page, before.owner)  # pages go before those that they follow
        return page

    # -- eviction -------------------------------------------------------------------------------

    def evict(
        self, group: int, num_pages: int, tenant: Tenant = NOBODY, *, everything: bool = True
    ) -> int:
        """Free at least `num_pages` pages of a group if that many may go; how many were freed.

        Of the tenant that needs them, and of those that hold more than their share, the one that
        holds most for its weight loses pages first; then, with `everything`, others. Of its pages
        the lowest priority goes first, then the longest unused, of one prompt the deepest. Of a
        window, pages that sequences have passed by go before those that one went on from or ended
        at. Of a page that later tokens of every prompt need, all groups give up theirs.
        """
        freed, unused, shared = 0, self.unused[group], self._num_shared(group)
        while freed < num_pages:
            page = unused.pop(tenant, shared, everything=everything)
            if page is None:
                break
            freed += 1
            is_passed = group in self.windowed and (any(page.users) or page.name in self.children)
            groups = [group] if is_passed or group == len(self.groups) else page.unused
            try:
                if not is_passed:
                    self._on_evict(page, groups)
            finally:
                self.note_evicted(page)
                self._free(page, groups)
                self._strand(page, group)
        return freed

    def _offer(self, group: int, pages: Iterable[Page]) -> None:
        """Allow eviction of unused pages, by worth; pages without a name are freed."""

        def worth_of(page: Page) -> tuple[bool, Tenant, bool, int, int]:
            return page.is_named, page.owner, page.anchored[group], page.priority, page.tick

        for (is_named, _, *worth), run in groupby(pages, worth_of):
            if is_named:
                self.unused[group].push([*run], tuple(worth))
            else:
                for page in run:
                    self._free(page, [group])

    def _give(self, page: Page, owner: Tenant) -> None:
        for group, number in enumerate(page.ids):
            if number is not None:
                self.unused[group].discard([page])
                self.unused[group].hold(page.owner, -1)
                self.unused[group].hold(owner, 1)
        page.owner = owner
        for group in page.unused if page.is_named else ():
            self._offer(group, [page])

    def _strand(self, page: Page, group: int) -> None:
        """A window lost a page, so no prompt can resume at the state behind it: it goes first."""
        states = len(self.groups)
        sees_others = group in self.windowed and self.groups[group].window.size != 1
        if sees_others and self.states is not None and states in page.unused:
            self.unused[states].push([page], (False, page.priority, page.tick))

    def _free(self, page: Page, groups: Iterable[int]) -> None:
        """Give back what groups have of a page; without any it is gone."""
        for group in groups:
            number = page.ids[group]
            assert number is not None
            assert not page.users[group]
            page.ids[group] = None
            self.unused[group].discard([page])
            self.unused[group].hold(page.owner, -1)
            if group in self.attention:
                del self.by_id[group][number]
                self.allocators[group].release([number])
            elif self.states is not None:
                self.states.release(number)
        if page.is_named and page.ids.count(None) == len(page.ids):
            self.remove(page)

    def clear(self) -> None:
        """Forget all pages: no prompt finds them, and those in use go with their last user.

        Older leases still protect their pages, and name no more.
        """
        pages = list(self.page_of.values())
        self.page_of, self.children = {}, {}
        for page in pages:
            self._forget(page)
        self.epoch += 1

    def _forget(self, page: Page) -> None:
        page.is_named = False
        self._free(page, page.unused)
