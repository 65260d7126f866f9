"""Pages by name: what a name is, and the index that finds the pages of a prompt. Pure Python.

A name is a hash of the name before it and the page's key ids. So it stands for the whole prefix
that ends with the page, wherever the page lies: in memory, on the disk, at a peer or in a saved
session. The name before the first page, the root, stands for everything else that keys and values
depend on.
"""

import heapq
import struct
from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b
from itertools import groupby
from operator import attrgetter

from ...fair import NOBODY, Tenant

Name = bytes
"""BLAKE2b-152 and a byte 0; in the key of a layer group's entry the group stands in its place."""
KEY_BYTES = 20
VERSION = 4  # of names and entries; folders of other versions are emptied
ID_BYTES = 8
_PAGE = blake2b(digest_size=KEY_BYTES - 1, person=b"page")
TOKENS = attrgetter("tokens")  # by which the pages after a page are sorted
NUM_GONE = 16384  # names of evicted pages that are remembered


class PageNames:
    """The names of a prompt's pages. Each is hashed once, up to the last one asked for.

    Args:
        token_ids: key ids from position 0; more may be appended.
    """

    __slots__ = ("_names", "page_size", "root", "token_ids")

    def __init__(self, root: Name, token_ids: Sequence[int], page_size: int) -> None:
        self.root, self.token_ids, self.page_size = root, token_ids, page_size
        self._names = [root]  # [n]: of the page before page n

    def name(self, number: int) -> Name:
        """The name of whole page `number`; -1: the root."""
        names, size = self._names, self.page_size
        for n in range(len(names) - 1, number + 1):
            names.append(page_key(names[n], self.token_ids[n * size : (n + 1) * size]))
        return names[number + 1]

    def tokens(self, number: int, count: int | None = None) -> tuple[int, ...]:
        """The first `count` key ids of a page; None: all that there are."""
        size, start = self.page_size, number * self.page_size
        return tuple(self.token_ids[start : start + (size if count is None else count)])


def namespace_key(*parts: str) -> bytes:
    """The key of a namespace: a model's content id, a KV format, an adapter, in a fixed order."""
    texts = [part.encode() for part in parts]
    data = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return blake2b(data, digest_size=KEY_BYTES, person=f"namespace{VERSION}".encode()).digest()


def page_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of the page with these key ids behind a name.

    Ids have 4 bytes each, or 8 and a mark if one is of a picture and needs 8. So the name and the
    ids of a page of text are one block of the hash.
    """
    hashed = _PAGE.copy()  # quicker than a new hash with its parameters
    hashed.update(parent)
    try:
        hashed.update(array("I", token_ids))
    except OverflowError:
        hashed.update(array("Q", token_ids).tobytes() + b"Q")
    return hashed.digest() + b"\0"


def group_key(page: bytes, group: int) -> bytes:
    """The key of a layer group's entry of the page with this key. Groups are below 256."""
    return page[:-1] + bytes([group])


def pack_ids(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}Q", *token_ids)


class Page:
    """Consecutive tokens under the name of the page before them. The last of a sequence may be
    short.

    Attributes:
        number: position // page size.
        ids: by group: the page of the group's pool, or the number of the state after its last
            token; None: the group has none.
        users: by group: how many sequences need it.
        anchored: by group: whether a sequence began or ended there, so that another may go on from
            it. In windows it is false where sequences only passed by; these pages go first.
        owner: the tenant that computed the first page of its prefix.
        is_named: no longer, once everything was forgotten; then it goes with its last user.
    """

    __slots__ = (
        "anchored",
        "ids",
        "is_named",
        "name",
        "number",
        "owner",
        "parent",
        "priority",
        "tick",
        "tokens",
        "users",
    )

    def __init__(
        self, name: Name, parent: Name, number: int, tokens: tuple[int, ...], anchored: list[bool]
    ) -> None:
        self.name, self.parent, self.number, self.tokens = name, parent, number, tokens
        self.ids: list[int | None] = [None] * len(anchored)
        self.users = [0] * len(anchored)
        self.anchored = anchored
        self.owner = NOBODY
        self.priority = self.tick = 0
        self.is_named = True

    def held(self, groups: range) -> int:
        return sum(self.ids[group] is not None for group in groups)

    @property
    def unused(self) -> list[int]:
        return [g for g, i in enumerate(self.ids) if i is not None and not self.users[g]]


class PageIndex:
    """Finds pages by name, and those that follow a name.

    Attributes:
        children: the pages after a name, in order of their tokens.
    """

    def __init__(self, root: Name, page_size: int) -> None:
        self.root, self.page_size = root, page_size
        self.page_of: dict[Name, Page] = {}
        self.children: dict[Name, list[Page]] = {}
        self._roots: dict[Hashable, Name] = {}
        self._gone: dict[Name, None] = {}  # of evicted pages, the first one longest ago

    def root_of(self, namespace: Hashable) -> Name:
        """The name before the first page of a namespace; each has its own."""
        if namespace is None:
            return self.root
        if namespace not in self._roots:
            self._roots[namespace] = namespace_key(self.root.hex(), repr(namespace))
        return self._roots[namespace]

    def names(self, namespace: Hashable, token_ids: Sequence[int]) -> PageNames:
        return PageNames(self.root_of(namespace), token_ids, self.page_size)

    def rename(self, root: Name) -> list[Page]:
        """Name all pages again below another root.

        Returns:
            Pages that are no longer in the index: a window has recycled their parents, so their
            names cannot be known.
        """
        now = {self.root: root}
        roots, self.root, self._roots = self._roots, root, {}
        now |= {name: self.root_of(namespace) for namespace, name in roots.items()}
        pages = sorted(self.page_of.values(), key=lambda page: page.number)
        self.page_of, self.children, self._gone = {}, {}, {}
        nameless = []
        for page in pages:
            if page.parent not in now:
                nameless.append(page)
                continue
            old, page.parent = page.name, now[page.parent]
            page.name = now[old] = page_key(page.parent, page.tokens)
            self.add(page)
        return nameless

    def walk(self, names: PageNames, stop: int, *, whole: bool) -> list[Page | None]:
        """The first `stop` whole pages of a prompt; with `whole` up to the first missing one."""
        path: list[Page | None] = []
        while len(path) < stop:
            path.append(self.page_of.get(names.name(len(path))))
            if whole and path[-1] is None:
                return path[:-1]
        while path and path[-1] is None:
            path.pop()
        return path

    def closest(
        self, parent: Name, tokens: tuple[int, ...], groups: range
    ) -> tuple[Page | None, int]:
        """The page after `parent` that agrees with `tokens` for longest, and for how many.

        Pages are sorted, so that page is next to the place of `tokens`: only two are compared. If
        both agree equally far, the one counts that more of the groups have.
        """
        pages = self.children.get(parent, [])
        at = bisect_left(pages, tokens, key=TOKENS)
        best: Page | None = None
        worth = (0, 0)
        for page in pages[max(at - 1, 0) : at + 1]:
            overlap = common_length(page.tokens, tokens)
            if overlap and (overlap, page.held(groups)) > worth:
                best, worth = page, (overlap, page.held(groups))
        return best, worth[0]

    def beginnings(self, parent: Name, tokens: tuple[int, ...]) -> Iterable[Page]:
        """The pages after `parent` that `tokens` begins with or is, the longest first."""
        pages = self.children.get(parent, [])
        for length in range(len(tokens) if pages else 0, 0, -1):
            at = bisect_left(pages, tokens[:length], key=TOKENS)
            if at < len(pages) and pages[at].tokens == tokens[:length]:
                yield pages[at]
            if not at:  # shorter ones would come before it
                return

    def existed(self, name: Name) -> bool:
        """Whether a page of this name is in memory, or was until not long ago."""
        return name in self.page_of or name in self._gone

    def note_evicted(self, page: Page) -> None:
        """Remember the name of a page that is evicted, for `existed`."""
        self._gone[page.name] = None
        if len(self._gone) > NUM_GONE:
            del self._gone[next(iter(self._gone))]

    def add(self, page: Page) -> None:
        self.page_of[page.name] = page
        insort(self.children.setdefault(page.parent, []), page, key=TOKENS)

    def remove(self, page: Page) -> None:
        page.is_named = False
        if self.page_of.pop(page.name, None) is None:
            return
        pages = self.children[page.parent]
        del pages[bisect_left(pages, page.tokens, key=TOKENS)]
        if not pages:
            del self.children[page.parent]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many items both begin with, of two lists or tuples; by halving: slices are compared."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class EvictionQueue:
    """Distinct pages in order of their worth, of equal worth the deepest first.

    A heap of runs: pages that are pushed together are one item. Stale pages are skipped, and swept
    out when they outnumber the others. O(log n) to pop, amortised.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], int, int, list[Page]]] = []
        self.run_of: dict[Page, int] = {}  # page -> the run of it that counts
        self._num_runs = 0  # so far
        self._num_queued = 0  # pages in the heap

    def __len__(self) -> int:
        return len(self.run_of)

    def push(self, pages: list[Page], worth: tuple[int, ...]) -> None:
        """Put pages in, or change their worth.

        Args:
            pages: the deepest last.
            worth: of each. Among equally deep ones of the same worth, the first in is the first
                out.
        """
        self._num_runs += 1
        self.run_of.update(dict.fromkeys(pages, self._num_runs))
        self._num_queued += len(pages)
        heapq.heappush(self._heap, (worth, -pages[-1].number, self._num_runs, pages))
        if self._num_queued > 2 * len(self.run_of) + 64:
            self._sweep()

    def _sweep(self) -> None:
        runs, self._heap = self._heap, []
        for worth, _, run, pages in runs:
            if pages := [page for page in pages if self.run_of.get(page) == run]:
                self._heap.append((worth, -pages[-1].number, run, pages))
        heapq.heapify(self._heap)
        self._num_queued = len(self.run_of)

    def discard(self, pages: Iterable[Page]) -> None:
        take_out = self.run_of.pop
        for page in pages:
            take_out(page, None)

    def pop(self) -> Page | None:
        """Take out the page of least worth; None: the queue is empty."""
        while self._heap:
            worth, _, run, pages = self._heap[0]
            page = pages.pop()
            self._num_queued -= 1
            if pages:
                heapq.heapreplace(self._heap, (worth, -pages[-1].number, run, pages))
            else:
                heapq.heappop(self._heap)
            if self.run_of.get(page) == run:
                del self.run_of[page]
                return page
        return None


class UnusedPages:
    """The pages of a group that may be evicted, those of each tenant in a queue of its own.

    The tenant that holds most for its weight loses pages first, so a flood of one evicts no prefix
    of another that holds less than its share. Within a tenant the page of least worth goes first.
    """

    def __init__(self) -> None:
        self.held: Counter[Tenant] = Counter()
        self.queues: dict[Tenant, EvictionQueue] = {}

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def push(self, pages: list[Page], worth: tuple[int, ...]) -> None:
        """Put pages of one owner in, see `EvictionQueue.push`."""
        owner = pages[0].owner
        if owner not in self.queues:
            self.queues[owner] = EvictionQueue()
        self.queues[owner].push(pages, worth)

    def discard(self, pages: Iterable[Page]) -> None:
        for owner, run in groupby(pages, attrgetter("owner")):
            if owner in self.queues:
                self.queues[owner].discard(run)

    def pop(self, tenant: Tenant, num_pages: int, *, everything: bool) -> Page | None:
        """The page to evict next for a tenant; None: there is none, see `num_for`.

        Args:
            everything: also from others that hold less than their share, if nobody else has any.
        """
        counts = self._evictable(tenant, num_pages)
        if not counts and everything:
            counts = {owner: len(queue) for owner, queue in self.queues.items() if len(queue)}
        if not counts:
            return None
        most = max(counts, key=lambda owner: self.held[owner] / owner.weight)
        return self.queues[most].pop()

    def num_for(self, tenant: Tenant, num_pages: int) -> int:
        """Pages that may be evicted for a tenant while others keep their shares of `num_pages`."""
        return sum(self._evictable(tenant, num_pages).values())

    def _evictable(self, tenant: Tenant, num_pages: int) -> dict[Tenant, int]:
        """The same by owner; owners without such pages are left out."""
        counts, weight = {}, sum(owner.weight for owner in self.held.keys() | {tenant})
        for owner, queue in self.queues.items():
            count = len(queue)
            if owner != tenant:
                count = min(count, self.held[owner] - int(num_pages * owner.weight / weight))
            if count > 0:
                counts[owner] = count
        return counts

    def hold(self, owner: Tenant, count: int) -> None:
        self.held[owner] += count
        if not self.held[owner]:
            del self.held[owner]
