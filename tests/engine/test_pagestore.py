"""Which pages are looked for on the disk, and when it pays to read them."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest

from mlxinfer.cache.disk import DiskTier, Entry, namespace_key, page_key
from mlxinfer.cache.inputs import PageTransfer
from mlxinfer.cache.pages import AttentionWindow, PageAllocator, PageGroup
from mlxinfer.cache.prefix import PrefixCache, RestorePoint, index
from mlxinfer.engine import pagestore
from mlxinfer.engine.pagestore import TRIES, GroupPage, PageSearch, PageStore, ReceivedPages

PAGE = 4
IDS = list(range(100, 141))  # ten pages and a token
FULL, WINDOWED = 0, 1
PAGE_BYTES = [8, 6]


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowTier(DiskTier):
    """Takes a second for every read, by the test's clock."""

    clock: Clock

    def load(self, keys):  # type: ignore[no-untyped-def]
        self.clock.now += 1.0
        return super().load(keys)


class Bench:
    """A full group and a window of 9 with one sink, ten pages of both on the disk."""

    def __init__(self, folder: Path, max_bytes: int = 1 << 20) -> None:
        self.folder = folder
        self.keys: dict[tuple[int, int], bytes] = {}  # (page number, group) -> of its entry
        self.windows = [AttentionWindow(), AttentionWindow(size=9, sinks=1)]
        groups = [
            PageGroup(window, PageAllocator(20), PAGE, PAGE, page_bytes)
            for window, page_bytes in zip(self.windows, PAGE_BYTES, strict=True)
        ]
        self.clock = Clock()
        self.tier = SlowTier(str(folder), namespace_key("test"), max_bytes=1 << 20)
        self.tier.clock = self.clock
        self.store = PageStore(
            self.tier,
            groups=groups,
            max_bytes=max_bytes,
            max_received_bytes=1 << 20,
            clock=self.clock,
        )

    def memory(self, num_pages: int) -> PrefixCache:
        """One that has so many pages of the prompt."""
        allocators = [PageAllocator(20), PageAllocator(20)]
        groups = [
            PageGroup(window, allocator, PAGE, PAGE, 1)
            for window, allocator in zip(self.windows, allocators, strict=True)
        ]
        memory = PrefixCache(groups, root=self.tier.namespace)
        for group, allocator in enumerate(allocators):
            for number, page_id in enumerate(allocator.allocate(num_pages)):
                page = memory.insert(memory.names(None, IDS), number, group, page_id)
                assert page is not None
                memory.let_go({group: [page]})
        return memory

    def spills(self) -> list[PageTransfer]:
        """What the disk lacks of ten pages."""
        return self.store.lacking(self.memory(10).page_of.values())

    def store_all(self) -> None:
        for page in self.memory(10).page_of.values():
            spills = self.store.lacking([page])
            assert [spill.group for spill in spills] == [FULL, WINDOWED]
            self.store.put(s.filled(bytes([page.number]) * PAGE_BYTES[s.group]) for s in spills)
            self.keys |= {(page.number, s.group): s.entry.key for s in spills}
        self.tier.flush()

    def lose(self, number: int, group: int) -> None:
        """Remove one entry."""
        name = self.keys[number, group].hex()
        [path] = self.folder.rglob(f"{name}.kv")
        path.unlink()

    def find(self, in_memory: int = 0) -> dict[GroupPage, Entry] | None:
        search = self.store.find(self.point(IDS, in_memory))
        return None if search is None else search.loaded()

    def point(self, ids: list[int], in_memory: int = 0) -> RestorePoint:
        """Where a prompt could go on from memory alone."""
        memory = self.memory(in_memory)
        return memory.probe(memory.names(None, ids))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    bench.store_all()
    yield bench
    bench.store.close()


def numbers(loaded: dict[GroupPage, Entry] | None) -> list[list[int]]:
    """The page numbers that were read, by group; every payload is the one that was stored."""
    if loaded is None:
        return []
    for (number, group), entry in loaded.items():
        assert bytes(entry.payload) == bytes([number]) * PAGE_BYTES[group]
    return [[number for number, g in loaded if g == group] for group in (FULL, WINDOWED)]


def test_a_window_is_read_only_where_a_prompt_goes_on(bench: Bench) -> None:
    assert numbers(bench.find()) == [list(range(10)), [0, 8, 9]]
    assert numbers(bench.find(in_memory=7)) == [[7, 8, 9], [8, 9]]
    assert bench.store.tokens_loaded == 40 + 12


def test_one_page_is_not_looked_for(bench: Bench) -> None:
    assert numbers(bench.find(in_memory=9)) == []
    assert bench.tier.stats()["hits"] == 0
    assert numbers(bench.find(in_memory=8)) == [[8, 9], [8, 9]]


@pytest.mark.parametrize(
    ("number", "group", "expected"),
    [
        (0, FULL, []),
        (1, FULL, []),
        (6, FULL, [list(range(6)), [0, 4, 5]]),
        (9, WINDOWED, [list(range(9)), [0, 7, 8]]),
        (8, WINDOWED, [list(range(8)), [0, 6, 7]]),
        (3, WINDOWED, [list(range(10)), [0, 8, 9]]),
        (0, WINDOWED, []),
    ],
)
def test_a_lost_page_ends_it(
    number: int, group: int, expected: list[list[int]], bench: Bench
) -> None:
    bench.lose(number, group)
    assert numbers(bench.find()) == expected


def test_a_file_that_proves_broken_ends_the_way_too(bench: Bench) -> None:
    for number, group in ((5, FULL), (4, WINDOWED)):
        [path] = bench.folder.rglob(f"{bench.keys[number, group].hex()}.kv")
        path.write_bytes(b"broken")
    assert numbers(bench.find()) == [list(range(4)), [0, 2, 3]]


def test_a_payload_of_another_size_is_a_miss(bench: Bench) -> None:
    bench.store.page_bytes = [8, 7]
    assert bench.find() is None


def test_pages_on_the_disk_are_not_spilled_again(bench: Bench) -> None:
    assert bench.spills() == []
    bench.lose(4, WINDOWED)
    [spill] = bench.spills()
    assert (spill.group, spill.page) == (WINDOWED, 4)


def test_of_too_much_the_last_is_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    spills = [PageTransfer(g, i, Entry(b"", b"", ())) for i in range(3) for g in (FULL, WINDOWED)]
    assert bench.store.affordable(spills) == spills
    monkeypatch.setattr(pagestore, "MAX_SPILL_BYTES", 21)
    assert bench.store.affordable(spills) == spills[3:]


def test_saving_stops_at_the_budget_and_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, max_bytes=40)
    monkeypatch.setattr(pagestore, "SAVE_CHUNK_BYTES", 14)
    memory, asked = bench.memory(10), list[int]()

    def read(chunk):  # type: ignore[no-untyped-def]
        asked.append(len(chunk))
        bench.clock.now += 4.0
        return [spill.filled(bytes(PAGE_BYTES[spill.group])) for spill in chunk]

    bench.store.save(memory, read)
    assert asked == [2, 2, 1], "14, 28 and 36 bytes; six more are too many"
    asked.clear()
    monkeypatch.setattr(bench.tier, "flush", lambda timeout_s: timeout_s > 3.0)
    bench.store.save(memory, read)
    assert asked == [2, 2]
    bench.store.close()


def test_a_lookup_hashes_a_page_once_and_none_behind_the_first_that_lacks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Seq[int]] = []

    def counted(name: bytes, ids: Seq[int]) -> bytes:
        hashed.append(ids)
        return page_key(name, ids)

    monkeypatch.setattr(index, "page_key", counted)
    search = PageSearch(bench.store, bench.point(IDS), 10)  # reading would check the keys, too
    assert len(search.wanted(search.reachable())) == 13
    assert hashed == [IDS[n : n + PAGE] for n in range(0, 40, PAGE)]
    hashed.clear()
    other = [7, *IDS[1:]] * 1000
    assert bench.store.find(bench.point(other)) is None
    assert hashed == [other[:PAGE]], "of 10,250 pages"


def test_reading_must_be_quicker_than_computing(bench: Bench) -> None:
    assert bench.find() is not None, "nothing is known yet"
    for _ in range(2):  # the first does not count: something was read meanwhile
        step(bench, 40, seconds=0.5)  # and a read takes a second
    reads = bench.clock.now
    tried = [bench.find() is not None for _ in range(TRIES)]
    assert tried == [False] * (TRIES - 1) + [True], "now and then it may have become quicker"
    assert bench.clock.now == reads + 1
    for _ in range(20):
        step(bench, 40, seconds=2.0)
    assert bench.find() is not None


def step(bench: Bench, num_tokens: int, *, seconds: float, num_prefill: int | None = None) -> None:
    began_s = bench.clock.now
    bench.clock.now += seconds
    bench.store.step_ended(
        num_prefill=num_tokens if num_prefill is None else num_prefill,
        num_tokens=num_tokens,
        began_s=began_s,
    )


def test_only_prefill_without_a_read_meanwhile_tells_the_speed(bench: Bench) -> None:
    bench.find()
    step(bench, 40, seconds=0.001)  # a read was made meanwhile
    assert bench.find() is not None
    step(bench, 1, seconds=0.001, num_prefill=0)
    step(bench, 40, seconds=0.001, num_prefill=4)
    assert bench.find() is not None
    step(bench, 40, seconds=0.001)
    step(bench, 40, seconds=0.001)
    assert bench.find() is None


# -- pages from peers ---------------------------------------------------------------------------


def received_entries(count: int) -> list[Entry]:
    root = namespace_key("test")
    payload = memoryview(b"0123456789")
    return [Entry(page_key(root, [n]), root, (n,), payload) for n in range(count)]


def test_a_received_page_is_loaded_once_and_the_oldest_make_room() -> None:
    tier, entries = ReceivedPages(max_bytes=25), received_entries(3)
    assert [tier.store(entry) for entry in [*entries, entries[2]]] == [True] * 4, "it counts once"
    oldest, *kept = (entry.key for entry in entries)
    assert [tier.has(key) for key in (oldest, *kept)] == [False, True, True]
    assert [entry.key for entry in tier.load([oldest, *kept])] == kept
    assert tier.load(kept) == []
    assert tier.store(entries[0])
    tier.remove(oldest)
    assert not tier.has(oldest)
    assert not ReceivedPages(max_bytes=9).store(entries[0])


def test_received_pages_are_read_before_the_disk_and_are_not_stored(bench: Bench) -> None:
    keys = [bench.keys[number, group] for number in (8, 9) for group in (FULL, WINDOWED)]
    for key in keys:
        entry = bench.tier.get(key)
        assert entry is not None
        assert bench.store.received.store(entry)
    for number in (8, 9):
        bench.lose(number, FULL)
    assert [spill.entry.key for spill in bench.spills()] == [keys[0], keys[2]]
    search = bench.store.find(bench.point(IDS))
    assert numbers(search.loaded()) == [list(range(10)), [0, 8, 9]]
    assert search.tiers == dict.fromkeys(range(8), "disk") | {8: "peer", 9: "peer"}
    assert not any(bench.store.received.has(key) for key in keys)
