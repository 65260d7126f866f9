"""Random sequences share named pages, against brute force and a record of contents.

Every slot of every page, and every state, remembers for which prefix it was computed, so a page
that is handed to the wrong prompt, released while in use or overwritten shows at once.
"""

import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from cache.prefix_invariants import check, check_users, groups_of, waiting

from mlxinfer.cache.disk import namespace_key, page_key
from mlxinfer.cache.pages import PageAllocator, PageTable, StateGroup
from mlxinfer.cache.prefix import Lease, Page, PageNames, PagesByGroup, PrefixCache, RestorePoint

Path = tuple[str, tuple[int, ...]]  # namespace, tokens from position 0 to the end of a page
SIZE = 2
NUM_PAGES = 14
LONGEST = 11
LAYOUTS = [  # windows, kept pages, states
    ([None], [0], None),
    ([None, 3], [0, 0], None),
    ([None, 1, 4], [0, 0, 1], None),
    ([3], [1], None),
    ([2, 5], [0, 0], None),
    ([None], [0], 3),
    ([None, None], [0, 0], 50),
    ([None, 5], [0, 0], 1),
    ([6], [0], 5),
    ([None], [0], 0),
]
SEEDS = range(int(os.environ.get("MLXINFER_SEEDS", "3")))


@dataclass(eq=False)
class Running:
    """A sequence, and how far it was computed."""

    namespace: str
    names: PageNames
    lease: Lease
    num_computed: int


class World:
    """Sequences that come, grow and go."""

    def __init__(self, seed: int, layout: tuple[list[int | None], list[int], int | None]) -> None:
        self.windows, self.kept, max_states = layout
        self.rng = random.Random(seed)
        self.allocators = [PageAllocator(NUM_PAGES, headroom=1) for _ in self.windows]
        self.states = None if max_states is None else StateGroup(1, max_states)
        self.contents: list[list[list[object]]] = [
            [[None] * SIZE for _ in range(NUM_PAGES)] for _ in self.windows
        ]
        self.state_contents: dict[int, Path] = {}
        self.path_of: dict[bytes, Path] = {}  # by name
        self.roots: dict[bytes, str] = {}
        self.counts: Counter[str] = Counter()
        self.prefix = PrefixCache(
            groups_of(self.allocators, self.windows, SIZE, self.kept),
            on_evict=self.note_evicted,
            states=self.states,
        )
        self.running: list[Running] = []
        self.pins: list[PagesByGroup] = []

    # -- what brute force knows -----------------------------------------------------------------

    def learn(self, namespace: str, token_ids: Sequence[int]) -> None:
        """Name every beginning of a prompt."""
        name, tokens = self.prefix.root_of(namespace), tuple(token_ids)
        for start in range(0, len(tokens), SIZE):
            for stop in range(start + 1, min(start + SIZE, len(tokens)) + 1):
                self.path_of[page_key(name, tokens[start:stop])] = namespace, tokens[:stop]
            name = page_key(name, tokens[start : start + SIZE])

    def held(self) -> dict[Path, Page]:
        return {self.path_of[name]: page for name, page in self.prefix.page_of.items()}

    def check_page(self, page: Page) -> None:
        """What every group has of a page was computed for its tokens."""
        namespace, tokens = self.path_of[page.name]
        start = page.number * SIZE
        for group, number in enumerate(page.ids):
            if number is None:
                continue
            if group == len(self.windows):
                assert self.state_contents[number] == (namespace, tokens)
                continue
            for position in range(start, len(tokens)):
                slot = self.contents[group][number][position - start]
                assert slot == (namespace, tokens[: position + 1])

    def right_points(self, namespace: str, tokens: tuple[int, ...], whole_pages: bool) -> set[int]:
        """The reusable lengths that are right: one for each last page that agrees best."""
        held, depth = self.held(), 0
        places = range(0, len(tokens) + 1, SIZE)
        ends = [n for n in places if not n or (namespace, tokens[:n]) in held]
        if None in self.windows:  # up to the first gap
            ends = [n for n in ends if all(m in ends for m in range(0, n, SIZE))]
        depth = max(ends)
        overlaps = {
            path: shared(path[1][depth:], tokens[depth:])
            for path in held
            if path[0] == namespace
            and path[1][:depth] == tokens[:depth]
            and depth < len(path[1]) <= depth + SIZE
        }
        best = max(overlaps.values(), default=0)
        lasts = [path[1] for path, overlap in overlaps.items() if overlap == best] or [()]
        return {
            self.resumable(held, namespace, tokens, last, depth, depth + best, whole_pages)
            for last in lasts
        }

    def resumable(
        self,
        held: dict[Path, Page],
        namespace: str,
        tokens: tuple[int, ...],
        last: tuple[int, ...],
        depth: int,
        longest: int,
        whole_pages: bool,
    ) -> int:
        def has(group: int, number: int) -> bool:
            end = (number + 1) * SIZE
            page = held.get((namespace, tokens[:end] if end <= depth else last))
            return page is not None and page.ids[group] is not None

        def good(point: int) -> bool:
            if whole_pages and point % SIZE:
                return False
            state = held.get((namespace, tokens[:point]))
            if self.states is not None and (state is None or state.ids[-1] is None):
                return False
            return all(
                has(g, q // SIZE)
                for g, window in enumerate(self.windows)
                for q in range(point)
                if window is None
                or q > point - window
                or q < self.kept[g] * SIZE
                or q // SIZE == point // SIZE
            )

        return next(point for point in range(longest, -1, -1) if not point or good(point))

    def note_evicted(self, page: Page, groups: Sequence[int]) -> None:
        """What goes is not needed, still there, and worth no more than what stays."""
        self.counts["evicted"] += 1
        assert groups
        for group in groups:
            assert page.ids[group] is not None
            assert not page.users[group]
        self.check_page(page)

    # -- what happens ---------------------------------------------------------------------------

    def prompt(self) -> tuple[str, list[int]]:
        """One of few, so that prompts share beginnings."""
        namespace = self.rng.choice(["", "adapter"])
        ids = [self.rng.choice([0, 1, 1, 1]) for _ in range(self.rng.randint(1, LONGEST))]
        self.learn(namespace, ids)
        return namespace, ids

    def start(self) -> None:
        namespace, ids = self.prompt()
        names = self.prefix.names(namespace, ids)
        point = self.prefix.probe(names)
        self.counts["hits" if point.num_tokens else "misses"] += 1
        if point.state is not None:
            number = point.state.ids[-1]
            assert number is not None
            assert self.state_contents[number] == (namespace, tuple(ids[: point.num_tokens]))
        pages = [] if point.cut is None else point.cut.ids[: len(self.windows)]
        copies = [None if i is None else list(self.contents[g][i]) for g, i in enumerate(pages)]
        lease = self.prefix.lock(point, priority=self.rng.choice([0, 0, 0, 1]))
        running = Running(namespace, names, lease, point.num_tokens)
        self.running.append(running)
        if point.cut is None or not self.make_room(running, point.num_tokens):
            return
        for table, copy, contents in zip(lease.tables, copies, self.contents, strict=True):
            assert table.last is not None
            contents[table.last][: point.cut_tokens] = copy[: point.cut_tokens]

    def make_room(self, running: Running, num_tokens: int) -> bool:
        for group, table in enumerate(running.lease.tables):
            missing = -(-(num_tokens - table.end) // SIZE)
            while missing > self.allocators[group].num_free:
                if not self.evict_of(group, 1):
                    self.leave(running)
                    return False
            table.append(self.allocators[group].allocate(max(missing, 0)))
        return True

    def grow(self) -> None:
        running = self.rng.choice(self.running)
        start, ids = running.num_computed, running.names.token_ids
        stop = min(start + self.rng.randint(1, 7), len(ids))
        if not self.make_room(running, stop):
            return
        for group, table in enumerate(running.lease.tables):
            for position in range(start, stop):
                page = table.page_at(position // SIZE)
                assert page is not None
                content = running.namespace, tuple(ids[: position + 1])
                self.contents[group][page][position % SIZE] = content
        running.num_computed = stop
        if self.rng.random() < 0.7:
            self.extend(running)
        for group, page_group in enumerate(self.prefix.groups):
            dropped = page_group.recycle(running.lease.tables[group], stop)
            self.prefix.give_back(running.lease, group, dropped)

    def extend(self, running: Running) -> None:
        """Whole pages get their names; equal ones are shared from then on."""
        if running.names.root != self.prefix.root_of(running.namespace):
            ids = running.names.token_ids
            running.names = self.prefix.names(running.namespace, ids)
            self.learn(running.namespace, ids)
        before = [table.copy() for table in running.lease.tables]
        replaced = self.prefix.extend(running.lease, running.names, running.num_computed)
        assert replaced == (before != running.lease.tables)
        if running.lease.epoch != self.prefix.epoch:
            assert not replaced
            return
        for group, table in enumerate(running.lease.tables):
            for number in range(running.num_computed // SIZE):
                page = self.prefix.page_of.get(running.names.name(number))
                held = table.page_at(number)
                if page is None:  # it was forgotten when pages were named anew
                    assert None not in self.windows
                else:
                    assert held in (None, page.ids[group])

    def finish(self) -> None:
        running = self.rng.choice(self.running)
        names, place = running.names, running.num_computed
        self.extend(running)
        names = running.names
        if self.rng.random() < 0.7:
            self.prefix.add_partial(running.lease, names, place)
        for stop in {place, place - place % SIZE} - {0} if self.states is not None else ():
            page = self.prefix.add_state(names, stop)
            if page is not None:
                number = page.ids[-1]
                assert number is not None
                self.state_contents[number] = running.namespace, tuple(names.token_ids[:stop])
                assert self.path_of[page.name] == self.state_contents[number]
        self.leave(running)

    def leave(self, running: Running) -> None:
        self.running.remove(running)
        self.prefix.release(running.lease)

    def copied(self) -> None:
        self.prefix.release_copied(self.rng.choice(self.running).lease)

    def look(self) -> None:
        namespace, ids = self.prompt()
        limit, whole_pages = self.rng.randint(0, len(ids)), self.rng.random() < 0.3
        names = self.prefix.names(namespace, ids)
        point = self.prefix.probe(names, limit=limit, whole_pages=whole_pages)
        right = self.right_points(namespace, tuple(ids[:limit]), whole_pages)
        assert point.num_tokens in right, (point, right)
        self.check_point(namespace, ids, point)

    def check_point(self, namespace: str, ids: list[int], point: RestorePoint) -> None:
        self.check_tables(namespace, ids, point.tables, point.num_pages * SIZE)

    def check_tables(
        self, namespace: str, ids: Sequence[int], tables: list[PageTable], stop: int
    ) -> None:
        """Tables hold what was computed for a prompt, up to position `stop`."""
        for group, table in enumerate(tables):
            for position in range(min(stop, table.end)):
                page = table.page_at(position // SIZE)
                if page is not None:
                    slot = self.contents[group][page][position % SIZE]
                    assert slot == (namespace, tuple(ids[: position + 1]))

    def evict(self) -> None:
        if self.rng.random() < 0.3:
            self.evict_of(self.rng.randrange(len(self.prefix.unused)), self.rng.randint(1, 6))

    def evict_of(self, group: int, num_pages: int) -> int:
        evictable, before = self.prefix.num_evictable(group), self.held()
        worth = {page: (page.priority, page.tick) for page in waiting(self.prefix, group)}
        freed = self.prefix.evict(group, num_pages)
        assert freed == min(num_pages, evictable)
        stays = waiting(self.prefix, group)
        gone = [page for page in worth if page not in stays]
        assert len(gone) == freed
        assert before.keys() >= self.held().keys()
        if group not in self.prefix.windowed and self.states is None:  # states are used apart
            assert all(worth[page] <= worth[other] for page in gone for other in stays)
        return freed

    def pin(self) -> None:
        if len(self.pins) < 2:
            namespace, ids = self.prompt()
            point = self.prefix.probe(self.prefix.names(namespace, ids), limit=len(ids))
            self.pins.append(self.prefix.hold_path(point))

    def unpin(self) -> None:
        if self.pins:
            self.prefix.let_go(self.pins.pop(0), anchored=True)

    def clear(self) -> None:
        if self.rng.random() < 0.05:
            self.prefix.clear()
            assert not self.prefix.page_of

    def name_anew(self) -> None:
        """It is known now what the model is; all that brute force can name stays."""
        if self.rng.random() < 0.1:
            before = {path: (page, page.ids[:]) for path, page in self.held().items()}
            self.prefix.set_root(namespace_key(str(self.rng.random())))
            self.path_of = {}
            for namespace, tokens in before:
                self.learn(namespace, tokens)
            held = self.held()
            groups = range(len(self.windows))
            stay = {
                path for path, (_, ids) in before.items() if any(ids[g] is not None for g in groups)
            }
            assert None not in self.windows or held.keys() >= stay  # others have a state alone
            assert all((page, page.ids) == before[path] for path, page in held.items())

    # -- always ---------------------------------------------------------------------------------

    def check(self) -> None:
        check(self.prefix)
        for page in self.prefix.page_of.values():
            self.check_page(page)
        known = check_users(self.prefix, [running.lease for running in self.running], self.pins)
        for running in self.running:
            tables, ids = running.lease.tables, running.names.token_ids
            self.check_tables(running.namespace, ids, tables, running.num_computed)
        if self.states is not None:
            held = [page.ids[-1] for page in known if page.ids[-1] is not None]
            assert self.states.num_held == len(held) <= self.states.max_snapshots
            assert not set(self.states.take_dropped()) & set(held)

    def end(self) -> None:
        for running in list(self.running):
            self.leave(running)
        for users in self.pins:
            self.prefix.let_go(users)
        self.prefix.clear()
        assert [allocator.num_held for allocator in self.allocators] == [0] * len(self.windows)
        assert self.states is None or self.states.num_held == 0


def shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens agree at the beginning."""
    return sum(a[:n] == b[:n] for n in range(1, min(len(a), len(b)) + 1))


@pytest.mark.alike
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_invariants_hold_through_a_long_life(
    layout: tuple[list[int | None], list[int], int | None], seed: int
) -> None:
    print("seed", seed)
    world = World(seed, layout)
    always = [*[world.start] * 2, *[world.look] * 2, world.evict, world.pin, world.unpin]
    always += [world.name_anew, world.clear]
    running = [*[world.grow] * 5, world.copied, *[world.finish] * 3]
    for _ in range(600):
        does = world.rng.choice(always + running if world.running else always)
        if does != world.start or len(world.running) < 4:
            does()
        world.check()
    world.end()
    least = 0 if layout[2] == 0 else 1
    assert min(world.counts["hits"], world.counts["misses"]) >= least
    assert world.counts["evicted"] > 5
