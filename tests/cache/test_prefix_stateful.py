"""Random sequences share a prefix tree, against a dictionary of paths and a record of contents.

Every slot of every page remembers for which prefix it was computed, so a page that is handed to the
wrong prompt, released while in use or overwritten shows at once, whatever the counts say.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest
from cache.prefix_invariants import check, groups_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxinfer.cache.pages import PageAllocator, PageTable
from mlxinfer.cache.prefix import Lease, Node, PrefixTree, Snapshot

Path = tuple[str, tuple[int, ...]]  # namespace, tokens from position 0 to the end of a page
SIZE = 2
NUM_PAGES = 14
LAYOUTS = [  # windows, kept pages
    ([None], [0]),
    ([None, 3], [0, 0]),
    ([None, 1, 4], [0, 0, 1]),
    ([3], [1]),
    ([2, 5], [0, 0]),
]
LONGEST = 11
prompts = st.integers(1, 2**LONGEST - 1).map(lambda n: [int(bit) for bit in f"{n:b}"][::-1])
few_prompts = prompts | st.integers(1, LONGEST).map(lambda n: [1, 0] * (n // 2) + [n % 2])
which = st.integers(0, 3)  # of those that run
namespaces = st.sampled_from(["", "adapter"])


@dataclass(eq=False)
class Running:
    namespace: str
    token_ids: list[int]
    tables: list[PageTable]
    lease: Lease
    num_computed: int
    path: list[Path]  # what its lease protects, by the model's reckoning
    cut: Path | None
    priority: int
    forgotten: bool = False  # the tree was cleared under it


@dataclass
class Entry:
    pages: list[int | None]
    tick: int
    priority: int


@dataclass
class Model:
    """What the tree should hold."""

    entries: dict[Path, Entry] = field(default_factory=dict)

    def children(self, parent: Path) -> list[Path]:
        depth = len(parent[1])
        return [
            (name, tokens)
            for name, tokens in self.entries
            if name == parent[0]
            and tokens[:depth] == parent[1]
            and depth < len(tokens) <= depth + SIZE
        ]

    def matches(
        self,
        namespace: str,
        token_ids: list[int],
        limit: int,
        windows: list[int | None],
        kept: list[int],
    ) -> set[int]:
        """The reusable lengths that are right: one for each last page that agrees best."""
        tokens = tuple(token_ids[:limit])
        depth = 0
        while depth + SIZE <= limit and (namespace, tokens[: depth + SIZE]) in self.entries:
            depth += SIZE
        options = [(namespace, tokens[:depth]), *self.children((namespace, tokens[:depth]))]
        overlaps = [shared(path[1], tokens) for path in options]
        best = max(overlaps)
        ends = [path for path, overlap in zip(options, overlaps, strict=True) if overlap == best]
        return {self.resumable(path, best, windows, kept) for path in ends}

    def resumable(self, end: Path, longest: int, windows: list[int | None], kept: list[int]) -> int:
        name, tokens = end
        return next(
            point
            for point in range(longest, -1, -1)
            if all(
                self.entries[name, tokens[: (q // SIZE + 1) * SIZE]].pages[g] is not None
                for g, window in enumerate(windows)
                for q in range(point)
                if window is None
                or q > point - window
                or q < kept[g] * SIZE
                or q // SIZE == point // SIZE
            )
        )


def shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


class PrefixMachine(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(LAYOUTS), served=st.lists(st.tuples(namespaces, few_prompts))
    )
    def build(
        self,
        layout: tuple[list[int | None], list[int]],
        served: list[tuple[str, list[int]]],
    ) -> None:
        self.windows, self.kept = layout
        self.groups = range(len(self.windows))
        self.allocators = [PageAllocator(NUM_PAGES, headroom=1) for _ in self.groups]
        self.contents = [[[None] * SIZE for _ in range(NUM_PAGES)] for _ in self.groups]
        self.ticks = count(1)
        self.evicted: list[Node] = []
        self.num_hits = self.num_misses = self.num_evicted = 0
        self.tree = PrefixTree(
            groups_of(self.allocators, self.windows, SIZE, self.kept),
            clock=lambda: next(self.ticks),
            on_evict=self.note_evicted,
        )
        self.model = Model()
        self.running: list[Running] = []
        self.pins: list[tuple[Lease, list[Path]]] = []
        for namespace, token_ids in served:
            self.serve(namespace, token_ids, chunk=3)

    # -- what the model knows -------------------------------------------------------------------

    def now(self) -> int:
        return next(self.ticks)

    def note_evicted(
        self, node: Node, pages: Sequence[int | None], snapshots: Sequence[Snapshot]
    ) -> None:
        """Pages are still the tree's while it tells of them."""
        assert pages == node.pages
        assert not snapshots
        for group, page_id in enumerate(pages):
            if page_id is not None:
                self.check_contents(group, page_id, node.namespace, node.token_ids())
        self.evicted.append(node)
        self.num_evicted += 1

    def check_contents(self, group: int, page: int, namespace: object, token_ids: list) -> None:
        start = (len(token_ids) - 1) // SIZE * SIZE
        for position in range(start, len(token_ids)):
            slot = self.contents[group][page][position - start]
            assert slot == (namespace, tuple(token_ids[: position + 1]))

    def locked(self) -> set[Path]:
        paths = [path for running in self.running if not running.forgotten for path in running.path]
        cuts = [r.cut for r in self.running if r.cut is not None and not r.forgotten]
        return {*paths, *cuts, *(path for _, pinned in self.pins for path in pinned)}

    def naive_victims(self, num_pages: int) -> list[Path]:
        """Leaves without a lock, one after the other: priority, then time, then depth."""
        left, locked = dict(self.model.entries), self.locked()
        victims: list[Path] = []
        while len(victims) < num_pages:
            parents = {(name, t[: (len(t) - 1) // SIZE * SIZE]) for name, t in left}
            free = [path for path in left if path not in locked and path not in parents]
            if not free:
                break
            victims.append(min(free, key=lambda p: (left[p].priority, left[p].tick, -len(p[1]))))
            del left[victims[-1]]
        return victims

    def sync_evictions(self) -> None:
        """The tree may lose nodes without a lock, and windowed pages without a hold."""
        held = {(p.namespace, tuple(p.token_ids())): p.pages for p in self.tree.nodes()}
        assert held.keys() <= self.model.entries.keys()
        assert self.locked() <= held.keys()
        for path in list(self.model.entries):
            if path not in held:
                del self.model.entries[path]
                continue
            for group, page in enumerate(held[path]):
                had = self.model.entries[path].pages[group]
                assert page == had or (page is None and self.windows[group] is not None)
            self.model.entries[path].pages = list(held[path])

    # -- sequences ------------------------------------------------------------------------------

    @precondition(lambda self: len(self.running) < 4)
    @rule(namespace=namespaces, token_ids=few_prompts, priority=st.sampled_from([0, 0, 0, 1]))
    def start(self, namespace: str, token_ids: list[int], priority: int) -> None:
        match = self.tree.probe(namespace, token_ids)
        lease = self.tree.lock(match, priority=priority)
        self.tree.count(match)
        self.num_hits += match.num_tokens > 0
        self.num_misses += match.num_tokens == 0
        length = match.num_tokens
        whole = length // SIZE * SIZE
        path = [(namespace, tuple(token_ids[: n + SIZE])) for n in range(0, whole, SIZE)]
        cut = None
        if match.cut is not None:
            cut = (namespace, tuple(match.cut.token_ids()))
        running = Running(namespace, token_ids, match.tables(), lease, length, path, cut, priority)
        self.running.append(running)
        if cut is not None:
            if not self.make_room(running, length):
                return
            for table, page, content in zip(
                running.tables, match.cut_pages, self.contents, strict=True
            ):
                assert page is not None
                own = table.all_pages[-1]
                content[own][: length - whole] = content[page][: length - whole]

    def make_room(self, running: Running, num_tokens: int) -> bool:
        for group, table in enumerate(running.tables):
            missing = -(-(num_tokens - table.end) // SIZE)
            while missing > 0:
                if missing <= self.allocators[group].num_free:
                    table.append(self.allocators[group].allocate(missing))
                    break
                if not self.evict_naively_too(group, 1):
                    self.leave(running)
                    return False
        return True

    @precondition(lambda self: self.running)
    @rule(which=which, num_tokens=st.integers(1, 7), hand_over=st.booleans())
    def grow(self, which: int, num_tokens: int, hand_over: bool) -> None:
        running = self.running[which % len(self.running)]
        start = running.num_computed
        stop = min(start + num_tokens, len(running.token_ids))
        if not self.make_room(running, stop):
            return
        for group, table in enumerate(running.tables):
            for position in range(start, stop):
                number = position // SIZE
                page = page_of(table, number)
                content = (running.namespace, tuple(running.token_ids[: position + 1]))
                self.contents[group][page][position % SIZE] = content
        running.num_computed = stop
        if hand_over:
            self.hand_over(running)
        for group, window in enumerate(self.windows):
            if window is not None:
                self.move_window(running, group, max(stop - window + 1, 0) // SIZE)

    def move_window(self, running: Running, group: int, first: int) -> None:
        table = running.tables[group]
        old = table.first
        dropped = table.drop_before(first)
        own = [p for n, p in enumerate(dropped, old) if n >= running.lease.num_pages]
        self.allocators[group].release(own)
        self.tree.trim(running.lease, group, table.first)

    def hand_over(self, running: Running) -> None:
        tree_had = len(running.path)
        before = [table.copy() for table in running.tables]
        some_replaced = self.tree.extend(
            running.lease, running.token_ids, running.tables, num_tokens=running.num_computed
        )
        if running.forgotten:
            assert not some_replaced
            assert running.tables == before
            assert running.lease.num_pages == tree_had
            return
        num_replaced = 0
        for number in range(tree_had, running.num_computed // SIZE):
            path = (running.namespace, tuple(running.token_ids[: (number + 1) * SIZE]))
            own = [page_of(table, number) for table in before]
            entry = self.model.entries.get(path)
            if entry is None:
                self.drop_shorter(path)
                entry = Entry([None] * len(own), self.now(), running.priority)
                self.model.entries[path] = entry
            for group, page in enumerate(own):
                if page is None:
                    continue
                num_replaced += entry.pages[group] is not None
                if entry.pages[group] is None:
                    entry.pages[group] = page
                assert page_of(running.tables[group], number) == entry.pages[group]
            running.path.append(path)
        assert some_replaced == (num_replaced > 0)
        assert running.lease.num_pages == len(running.path)

    def drop_shorter(self, path: Path) -> None:
        name, tokens = path
        locked = self.locked()
        for length in range((len(tokens) - 1) // SIZE * SIZE + 1, len(tokens)):
            if (name, tokens[:length]) not in locked:
                self.model.entries.pop((name, tokens[:length]), None)

    @precondition(lambda self: self.running)
    @rule(which=which)
    def copy_done(self, which: int) -> None:
        running = self.running[which % len(self.running)]
        self.tree.release_cut(running.lease)
        if running.cut is not None and not running.forgotten:
            self.touch([running.cut], running.priority)
        running.cut = None

    def touch(self, paths: list[Path], priority: int) -> None:
        tick = self.now()
        for path in paths:
            entry = self.model.entries[path]
            entry.tick, entry.priority = tick, max(entry.priority, priority)

    @precondition(lambda self: self.running)
    @rule(which=which, partial=st.booleans())
    def finish(self, which: int, partial: bool) -> None:
        running = self.running[which % len(self.running)]
        self.hand_over(running)
        tables, tokens = running.tables, running.token_ids[: running.num_computed]
        taken = False
        if partial:
            rest = (running.namespace, tuple(tokens))
            own = [page_of(table, len(tokens) // SIZE) for table in tables]
            taken = self.tree.add_partial(
                running.lease, running.token_ids, tables, num_tokens=running.num_computed
            )
            begun = any(
                name == rest[0] and known[: len(tokens)] == rest[1]
                for name, known in self.model.entries
            )
            assert taken == bool(len(tokens) % SIZE and not begun and not running.forgotten)
            if taken:
                self.drop_shorter(rest)
                self.model.entries[rest] = Entry(own, self.now(), running.priority)
        self.leave(running, without=len(tokens) // SIZE if taken else None)

    def leave(self, running: Running, without: int | None = None) -> None:
        """What is its own goes back to the allocators."""
        for group, table in enumerate(running.tables):
            numbered = [*enumerate(table.kept), *enumerate(table.pages, table.first)]
            own = [p for n, p in numbered if n >= running.lease.num_pages and n != without]
            self.allocators[group].release(own)
        self.running.remove(running)
        self.tree.unlock(running.lease)
        if not running.forgotten:
            if running.cut is not None:
                self.touch([running.cut], running.priority)
            self.touch(running.path, running.priority)
            self.drop_worthless()

    def drop_worthless(self) -> None:
        """Leaves without any page are no use; only windows alone can lose all of theirs."""
        while True:
            parents = {(n, t[: (len(t) - 1) // SIZE * SIZE]) for n, t in self.model.entries}
            locked = self.locked()
            worthless = [
                path
                for path, entry in self.model.entries.items()
                if not any(p is not None for p in entry.pages)
                and path not in locked
                and path not in parents
            ]
            if not worthless:
                break
            for path in worthless:
                del self.model.entries[path]

    @precondition(lambda self: len(self.running) < 4)
    @rule(namespace=namespaces, token_ids=few_prompts, chunk=st.integers(2, LONGEST))
    def serve(self, namespace: str, token_ids: list[int], chunk: int) -> None:
        """One from start to end, so that there is something to find."""
        self.start(namespace, token_ids, priority=0)
        last = len(self.running) - 1
        running = self.running[last]
        while running in self.running and running.num_computed < len(token_ids):
            self.grow(last, chunk, hand_over=True)
        if running in self.running:
            self.finish(last, partial=True)

    # -- the tree -------------------------------------------------------------------------------

    @rule(namespace=namespaces, token_ids=few_prompts, limit=st.integers(0, LONGEST))
    def look(self, namespace: str, token_ids: list[int], limit: int) -> None:
        limit = min(limit, len(token_ids))
        match = self.tree.probe(namespace, token_ids, limit=limit)
        right = self.model.matches(namespace, token_ids, limit, self.windows, self.kept)
        assert match.num_tokens in right
        assert match.cut_tokens == match.num_tokens % SIZE
        for group, table in enumerate(match.tables()):
            numbered = [*enumerate(table.kept), *enumerate(table.pages, table.first)]
            for number, page in numbered:
                self.check_contents(group, page, namespace, token_ids[: (number + 1) * SIZE])

    @rule(group=st.integers(0, 2), num_pages=st.integers(1, 6))
    def evict(self, group: int, num_pages: int) -> None:
        self.evict_naively_too(group % len(self.groups), num_pages)

    def evict_naively_too(self, group: int, num_pages: int) -> int:
        expected = self.naive_victims(num_pages)
        evictable = self.tree.num_evictable(group)
        free = self.allocators[group].num_free
        self.evicted = []
        freed = self.tree.evict(group, num_pages)
        assert freed == min(num_pages, evictable)
        assert self.allocators[group].num_free == free + freed
        if self.windows[group] is None:
            assert [(p.namespace, tuple(p.token_ids())) for p in self.evicted] == expected
        self.sync_evictions()
        return freed

    @precondition(lambda self: len(self.pins) < 2)
    @rule(namespace=namespaces, token_ids=few_prompts)
    def pin(self, namespace: str, token_ids: list[int]) -> None:
        match = self.tree.probe(namespace, token_ids, limit=len(token_ids))
        lease = self.tree.lock(self.tree.probe(namespace, token_ids, limit=len(token_ids)))
        nodes = [*match.nodes, match.cut] if match.cut else match.nodes
        paths = [(namespace, tuple(node.token_ids())) for node in nodes]
        self.pins.append((lease, paths))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        lease, paths = self.pins.pop(0)
        whole = lease.num_pages
        self.tree.unlock(lease)
        self.touch(paths[whole:], 0)
        self.touch(paths[:whole], 0)
        self.drop_worthless()

    @precondition(lambda self: self.running)
    @rule(sure=st.integers(0, 5))
    def clear(self, sure: int) -> None:
        if sure:
            return
        for lease, _ in self.pins:
            self.tree.unlock(lease)
        self.pins = []
        self.tree.clear()
        self.model.entries.clear()
        for running in self.running:
            running.forgotten = True
        assert self.tree.num_nodes == 0

    # -- always ---------------------------------------------------------------------------------

    @invariant()
    def every_page_has_one_owner(self) -> None:
        check(self.tree)
        for group, allocator in enumerate(self.allocators):
            own = [
                page
                for r in self.running
                for n, page in [
                    *enumerate(r.tables[group].kept),
                    *enumerate(r.tables[group].pages, r.tables[group].first),
                ]
                if n >= r.lease.num_pages
            ]
            assert len(own) == len(set(own))
            stored = {p.pages[group] for p in self.tree.nodes()} - {None}
            assert not stored & set(own)
            assert allocator.num_held == len(own) + self.tree.num_pages(group)

    @invariant()
    def tree_holds_what_the_model_holds(self) -> None:
        held = {(p.namespace, tuple(p.token_ids())): list(p.pages) for p in self.tree.nodes()}
        assert held == {path: entry.pages for path, entry in self.model.entries.items()}

    @invariant()
    def every_sequence_sees_its_own_past(self) -> None:
        for r in self.running:
            for group, table in enumerate(r.tables):
                numbered = [*enumerate(table.kept), *enumerate(table.pages, table.first)]
                for number, page in numbered:
                    stop = min((number + 1) * SIZE, r.num_computed)
                    if stop > number * SIZE:
                        self.check_contents(group, page, r.namespace, r.token_ids[:stop])

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        for running in list(self.running):
            self.leave(running)
        for lease, _ in self.pins:
            self.tree.unlock(lease)
        self.tree.clear()
        assert [allocator.num_held for allocator in self.allocators] == [0] * len(self.groups)


def page_of(table: PageTable, number: int) -> int | None:
    numbered = [*enumerate(table.kept), *enumerate(table.pages, table.first)]
    return dict(numbered).get(number)


TestPrefixTree = PrefixMachine.TestCase
TestPrefixTree.settings = settings(stateful_step_count=30)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_long_life(layout: tuple[list[int | None], list[int]]) -> None:
    """The same rules in one run that is long enough for rare things to meet."""
    rng = random.Random(7)
    machine = PrefixMachine()
    machine.build(layout, [])
    for _ in range(1500):
        step(machine, rng)
        machine.every_page_has_one_owner()
        machine.tree_holds_what_the_model_holds()
        machine.every_sequence_sees_its_own_past()
    assert min(machine.num_hits, machine.num_misses, machine.num_evicted) > 30
    machine.teardown()


KINDS = [
    *["start"] * 2,
    *["grow"] * 4,
    "done",
    *["finish"] * 3,
    "look",
    "evict",
    "pin",
    "unpin",
    "clear",
]


def step(machine: PrefixMachine, rng: random.Random) -> None:
    namespace = rng.choice(["", "adapter"])
    token_ids = [rng.choice([0, 1, 1, 1]) for _ in range(rng.randint(1, LONGEST))]
    number, at = rng.randint(1, 7), rng.randrange(4)
    kind = rng.choice(KINDS)
    if kind == "start" and len(machine.running) < 4:
        machine.start(namespace, token_ids, rng.randrange(2))
    elif kind == "look":
        machine.look(namespace, token_ids, rng.randint(0, LONGEST))
    elif kind == "evict" and rng.random() < 0.3:
        machine.evict(at, number)
    elif kind == "pin" and not machine.pins:
        machine.pin(namespace, token_ids)
    elif kind == "unpin" and machine.pins:
        machine.unpin()
    elif kind == "grow" and machine.running:
        machine.grow(at, number, rng.random() < 0.7)
    elif kind == "finish" and machine.running:
        machine.finish(at, rng.random() < 0.7)
    elif kind == "done" and machine.running:
        machine.copy_done(at)
    elif kind == "clear" and machine.running:
        machine.clear(rng.randrange(30))
