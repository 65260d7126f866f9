"""Snapshots of states in the prefix tree, against a dictionary of the positions that have one."""

import itertools
import random
from collections.abc import Sequence

import pytest
from cache.prefix_invariants import check, groups_of

from mlxinfer.cache.pages import PageAllocator, PageTable, StateGroup
from mlxinfer.cache.prefix import Lease, Node, PrefixTree, Snapshot
from mlxinfer.cache.prefix.node import resume_point

SIZE = 4


class World:
    """A tree with states, and what it should say."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.windows = self.rng.choice([[None], [None, 5], [6]])
        self.allocators = [PageAllocator(40) for _ in self.windows]
        self.states = StateGroup(100, self.rng.choice([0, 1, 3, 50]))
        self.tree = PrefixTree(
            groups_of(self.allocators, self.windows, SIZE),
            on_evict=self._note,
            states=self.states,
        )
        self.there: dict[Snapshot, tuple[int, ...]] = {}  # the tokens that each is behind
        self.leases: list[tuple[Lease, Snapshot | None]] = []

    def _note(self, node: Node, pages: Sequence[int | None], snapshots: Sequence[Snapshot]) -> None:
        for snapshot in snapshots:
            assert not snapshot.holds, "a snapshot that a lease needs is evicted"
            del self.there[snapshot]

    def prompt(self) -> list[int]:
        """One of few, so that prompts share beginnings."""
        return [self.rng.randint(0, 1) for _ in range(self.rng.randint(1, 14))]

    def run(self) -> None:
        """A sequence computes a prompt, leaves its pages, and a snapshot at its end or before."""
        ids = self.prompt()
        point = self.tree.probe("", ids)
        self.check_point(ids, point.num_tokens, point.snapshot)
        lease = self.tree.lock(point)
        tables = point.tables()
        for table, allocator, window in zip(tables, self.allocators, self.windows, strict=True):
            missing = -(-(len(ids) - table.end) // SIZE)
            if missing > allocator.num_free:
                self.tree.evict(self.allocators.index(allocator), missing - allocator.num_free)
            if missing > allocator.num_free:
                allocator_tables = zip(tables, self.allocators, strict=True)
                for other, its in allocator_tables:
                    its.release(other.pages_from(lease.num_pages))
                self.tree.unlock(lease)
                return
            table.append(allocator.allocate(max(missing, 0)))
            if window is not None:
                first = max(len(ids) - window + 1, 0) // SIZE
                own = max(lease.num_pages - table.first, 0)
                allocator.release(table.drop_before(first)[own:])
        self.tree.extend(lease, ids, tables, num_tokens=len(ids))
        kept = self.tree.add_partial(lease, ids, tables, num_tokens=len(ids))
        for table, allocator in zip(tables, self.allocators, strict=True):
            allocator.release(table.pages_from(lease.num_pages + kept))
        for place in {len(ids), len(ids) - len(ids) % SIZE} - {0}:
            self.add(ids[:place])
        self.tree.unlock(lease)

    def add(self, ids: list[int]) -> None:
        """A snapshot behind some tokens; pages that begin alike may each have one."""
        taken = self.tree.add_snapshot("", ids, len(ids))
        if taken is not None:
            self.there[taken] = tuple(ids)

    def hold(self) -> None:
        """A sequence goes on from a snapshot for a while."""
        point = self.tree.probe("", self.prompt())
        self.leases.append((self.tree.lock(point), point.snapshot))

    def let_go(self) -> None:
        if self.leases:
            lease, _ = self.leases.pop(self.rng.randrange(len(self.leases)))
            if self.rng.random() < 0.5:
                self.tree.release_cut(lease)
            self.tree.unlock(lease)

    def evict(self) -> None:
        if self.rng.random() < 0.5:
            self.tree.evict(self.rng.randrange(len(self.windows)), self.rng.randint(1, 4))
        else:
            self.tree.evict_snapshot()

    def check_point(self, ids: list[int], num_tokens: int, snapshot: Snapshot | None) -> None:
        """A prompt resumes where a snapshot stands, and at the last such place if all is held."""
        assert (snapshot is None) == (num_tokens == 0)
        if snapshot is not None:
            assert self.there[snapshot] == tuple(ids[:num_tokens])
        if self.windows == [None]:
            places = [n for n in range(len(ids)) if tuple(ids[:n]) in self.there.values()]
            assert num_tokens <= max(places, default=0)

    def check(self) -> None:
        check(self.tree)
        assert len(self.there) == self.states.num_held <= max(self.states.max_snapshots, 0)
        found = [s for node in self.tree.nodes() for s in node.snapshots.values()]
        assert set(found) == set(self.there)
        for node in self.tree.nodes():
            start = node.token_ids()[: node.number * SIZE]
            for snapshot in node.snapshots.values():
                tokens = (*start, *node.tokens[: snapshot.offset])
                assert self.there[snapshot] == tokens
        dropped = self.states.take_dropped()
        assert not set(dropped) & {s.number for s in found}


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 60), marks=pytest.mark.slow)])
def test_a_prompt_resumes_only_where_a_snapshot_stands(seeds: range) -> None:
    for seed in seeds:
        print("seed", seed)
        world = World(seed)
        steps = [world.run, world.run, world.hold, world.let_go, world.evict]
        for _ in range(120):
            world.rng.choice(steps)()
            world.check()
        while world.leases:
            world.let_go()
        world.tree.clear()
        assert world.states.num_held == 0
        for allocator in world.allocators:
            assert allocator.num_held == 0


def test_the_longest_unused_snapshot_goes_first() -> None:
    states, allocator = StateGroup(1, 2), PageAllocator(20)
    tree = PrefixTree(groups_of([allocator], [None], SIZE), states=states)
    for first in (1, 2, 3):
        ids = [first] * SIZE
        tree.insert("", ids, [PageTable(SIZE, pages=allocator.allocate(1))])
        if first == 3:  # the first one is used in between
            tree.unlock(tree.lock(tree.probe("", [1] * SIZE + [9])))
        assert tree.add_snapshot("", ids, SIZE) is not None
    found = [tree.probe("", [first] * SIZE + [9]).num_tokens for first in (1, 2, 3)]
    assert found == [SIZE, 0, SIZE]


def test_a_longer_page_takes_over_the_snapshots_of_a_shorter_one() -> None:
    states, allocator = StateGroup(1, 9), PageAllocator(20)
    tree = PrefixTree(groups_of([allocator], [None], SIZE), states=states)
    lease = tree.lock(tree.probe("", [0], limit=0))
    tree.add_partial(lease, [5, 6], [PageTable(SIZE, pages=allocator.allocate(1))], num_tokens=2)
    tree.unlock(lease)
    assert tree.add_snapshot("", [5, 6], 2) is not None
    tree.insert("", [5, 6, 7, 8], [PageTable(SIZE, pages=allocator.allocate(1))])
    assert tree.num_nodes == 1
    assert tree.probe("", [5, 6, 1, 1, 1]).num_tokens == 2
    check(tree)


def test_the_coordinator_finds_the_last_position_that_all_accept() -> None:
    for a, b, alignment in itertools.product(range(1, 7), range(1, 7), (1, 2, 3)):
        coverages = [lambda n, a=a: n - n % a, lambda n, b=b: n - n % b]  # type: ignore[misc]
        expected = max(n for n in range(41) if not (n % a or n % b or n % alignment))
        assert resume_point(40, coverages, alignment) == expected


def test_a_snapshot_behind_a_page_that_a_window_lost_goes_first() -> None:
    states, allocators = StateGroup(1, 2), [PageAllocator(20), PageAllocator(20)]
    tree = PrefixTree(groups_of(allocators, [None, 5], SIZE), states=states)
    for first in (1, 2):
        tables = [PageTable(SIZE, pages=a.allocate(2)) for a in allocators]
        tree.insert("", [first] * 2 * SIZE, tables)
        assert tree.add_snapshot("", [first] * SIZE, SIZE) is not None
    passed = tree.hold_path(tree.probe("", [2] * 2 * SIZE + [9]))  # a sequence that went on
    tree.trim(passed, 1, 2)
    kept = tree.hold_path(tree.probe("", [1] * 2 * SIZE + [9]))
    while tree.evict(1, 1):
        pass
    assert tree.probe("", [2] * SIZE + [9]).num_tokens == 0, "the window's page is lost"
    assert states.num_held == 2
    assert tree.evict_snapshot(), "the one used last, of which nothing can resume"
    assert tree.probe("", [1] * SIZE + [9]).num_tokens == SIZE
    check(tree)
    tree.unlock(passed)
    tree.unlock(kept)
