"""The disk store on a disk that fails, tears, reorders and loses power: the payload, or a miss."""

import errno
import os
import random
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxinfer.cache.disk.entry import Entry, Files, decode
from mlxinfer.cache.disk.tier import DiskTier
from mlxinfer.cache.prefix.index import namespace_key, page_key

BLOCK = 64
MODEL = namespace_key("model", "bf16")
ROOT = "/cache"


class PowerCut(BaseException):
    """Nothing runs any more."""


@dataclass(eq=False)
class Inode:
    data: bytearray
    durable: bytes | None = None  # None: never synced
    used_ns: int = 0


class Disk(Files):
    """Files in memory, with what a power cut would leave of them.

    Data and names that were not synced may be lost in part and in any order; `lying` loses what
    was synced, too.
    """

    def __init__(self) -> None:
        self.files: dict[str, Inode] = {}
        self.durable: dict[str, Inode] = {}
        self.log: list[tuple[str, str, Inode | None]] = []  # (path it leaves, path, file) unsynced
        self.handles: dict[int, Inode] = {}
        self.time_ns = 0
        self.dead = False
        self.plan: dict[int, int | None] = {}  # operation number from now -> errno, None: power cut
        self.num_operations = 0

    def step(self) -> None:
        if self.dead:
            raise PowerCut
        self.num_operations += 1
        if self.num_operations in self.plan:
            code = self.plan[self.num_operations]
            if code is None:
                self.dead = True
                raise PowerCut
            raise OSError(code, os.strerror(code))

    def find(self, path: str) -> Inode:
        self.step()
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return self.files[path]

    def make_folder(self, folder: str) -> None:
        self.step()

    def names(self, folder: str) -> list[str]:
        self.step()
        inside = [path.removeprefix(folder + "/") for path in self.files if path.startswith(folder)]
        return list({name.split("/")[0] for name in inside})

    def create(self, path: str) -> int:
        self.step()
        assert path not in self.files
        self.files[path] = inode = Inode(bytearray())
        self.log.append(("", path, inode))
        handle = max(self.handles, default=0) + 1
        self.handles[handle] = inode
        return handle

    def write(self, handle: int, data: bytes | memoryview) -> int:
        try:
            self.step()
        except OSError:
            self.handles[handle].data += bytes(data[: len(data) // 2])
            raise
        part = bytes(data[: max(1, 2 * len(data) // 3)])
        self.handles[handle].data += part
        return len(part)

    def fsync(self, handle: int) -> None:
        self.step()
        self.handles[handle].durable = bytes(self.handles[handle].data)

    def close(self, handle: int) -> None:
        if not self.dead:
            del self.handles[handle]
            self.step()

    def read(self, path: str) -> bytes:
        return bytes(self.find(path).data)

    def rename(self, path: str, to: str) -> None:
        self.find(path)
        self.files[to] = self.files.pop(path)
        self.log.append((path, to, self.files[to]))

    def sync_folder(self, folder: str) -> None:
        self.step()
        self.durable = dict(self.files)
        self.log = []

    def remove(self, path: str) -> None:
        self.find(path)
        del self.files[path]
        self.log.append((path, "", None))

    def info(self, path: str) -> tuple[int, int]:
        inode = self.find(path)
        return len(inode.data), inode.used_ns

    def is_pinned(self, path: str) -> bool:
        self.find(path)
        return False

    def mark_used(self, path: str, at_ns: int) -> None:
        self.find(path).used_ns = at_ns

    def clock_ns(self) -> int:
        self.time_ns += 10**6
        return self.time_ns

    def after_power_cut(self, rng: random.Random, *, lying: bool) -> "Disk":
        """The disk as it is found when the power is back."""
        names = dict(self.durable)
        kept = [change for change in self.log if rng.random() < 0.6]
        rng.shuffle(kept)
        for old, new, inode in kept:
            names.pop(old, None)
            if new and inode is not None:
                names[new] = inode
        disk = Disk()
        disk.time_ns = self.time_ns
        for path, inode in names.items():
            data = self.torn(inode, rng, lying=lying)
            disk.files[path] = Inode(bytearray(data), data, inode.used_ns)
        disk.durable = dict(disk.files)
        return disk

    def torn(self, inode: Inode, rng: random.Random, *, lying: bool) -> bytes:
        data = bytes(inode.data)
        if inode.durable == data and not (lying and rng.random() < 0.5):
            return data
        blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
        for at, block in enumerate(blocks):
            if rng.random() < 0.3:
                blocks[at] = rng.choice([bytes(len(block)), rng.randbytes(len(block))])
        whole = b"".join(blocks)
        return whole[: rng.randint(0, len(whole))] if rng.random() < 0.5 else whole


def make_entries() -> list[Entry]:
    entries: list[Entry] = []
    for number, size in enumerate([0, 5, 300, 64, 1000, 300, 300]):
        parent = entries[(number - 1) // 2].key if number else MODEL
        token_ids = (number, number + 1)
        payload = random.Random(number).randbytes(size)
        entries.append(Entry(page_key(parent, token_ids), parent, token_ids, memoryview(payload)))
    return entries


ENTRIES = make_entries()
MAX_BYTES = 1500
which = st.integers(0, len(ENTRIES) - 1)
codes = st.sampled_from([errno.EIO, errno.ENOSPC, errno.EROFS])


class DiskMachine(RuleBasedStateMachine):
    @initialize()
    def build(self) -> None:
        self.disk = Disk()
        self.store = self.open()
        self.other: DiskTier | None = None
        self.safe: set[str] = set()  # paths that a power cut must leave

    def open(self) -> DiskTier:
        return DiskTier(
            ROOT, MODEL, max_bytes=MAX_BYTES, files=self.disk, clock_ns=self.disk.clock_ns
        )

    def path(self, number: int) -> str:
        return self.store.path(ENTRIES[number].key)

    def check_get(self, store: DiskTier, number: int) -> bool:
        entry = store.get(ENTRIES[number].key)
        assert entry is None or entry == ENTRIES[number]
        return entry is not None

    @rule(number=which)
    def put(self, number: int) -> None:
        assert self.store.write_entry(ENTRIES[number])
        assert self.check_get(self.store, number)
        if self.other is None:
            sizes = [len(inode.data) for path, inode in self.disk.files.items() if ".kv" in path]
            assert sum(sizes) <= MAX_BYTES

    @rule(number=which, at=st.integers(1, 12), code=codes)
    def put_on_a_failing_disk(self, number: int, at: int, code: int) -> None:
        self.disk.plan = {self.disk.num_operations + at: code}
        self.store.write_entry(ENTRIES[number])
        self.check_get(self.store, number)
        self.store.sync()
        self.disk.plan = {}

    @rule(number=which)
    def get(self, number: int) -> None:
        there = self.path(number) in self.disk.files
        assert self.store.has(ENTRIES[number].key) == there
        self.check_get(self.store, number)

    @rule(numbers=st.lists(which, max_size=4))
    def load(self, numbers: list[int]) -> None:
        entries = self.store.load([ENTRIES[number].key for number in numbers])
        assert entries == [ENTRIES[number] for number in numbers[: len(entries)]]

    @rule()
    def sync(self) -> None:
        self.store.sync()
        for number, entry in enumerate(ENTRIES):
            inode = self.disk.files.get(self.path(number))
            if inode and inode is self.disk.durable.get(self.path(number)):
                sound = decode(bytes(inode.data), entry.key) is not None  # not torn before
                self.safe |= {self.path(number)} if sound else set()

    @rule(number=which)
    def put_by_another_process(self, number: int) -> None:
        self.other = self.other or self.open()
        self.other.write_entry(ENTRIES[number])
        self.check_get(self.other, number)

    @rule(at=st.integers(1, 25), number=which, seed=st.integers(0, 999), lying=st.booleans())
    def lose_power(self, at: int, number: int, seed: int, lying: bool) -> None:
        self.disk.plan = {self.disk.num_operations + at: None}
        try:
            self.store.write_entry(ENTRIES[number])
            self.store.sync()
        except PowerCut:
            pass
        self.safe &= self.disk.files.keys()
        self.disk = self.disk.after_power_cut(random.Random(seed), lying=lying)
        self.store, self.other = self.open(), None
        assert not [path for path in self.disk.files if path.endswith(".tmp")]
        for path in [] if lying else self.safe:
            (number,) = (n for n in range(len(ENTRIES)) if self.path(n) == path)
            assert self.check_get(self.store, number), "it was synced"
        self.safe = set()

    @precondition(lambda self: self.disk.files)
    @rule(file=st.integers(0, 99), bit=st.integers(0, 9999), cut=st.booleans())
    def damage(self, file: int, bit: int, cut: bool) -> None:
        path = sorted(self.disk.files)[file % len(self.disk.files)]
        data = self.disk.files[path].data
        if cut:
            del data[bit % (len(data) + 1) :]
        elif data:
            data[bit // 8 % len(data)] ^= 1 << bit % 8
        self.safe.discard(path)

    @rule()
    def restart(self) -> None:
        self.store, self.other = self.open(), None

    @invariant()
    def nothing_stays_open(self) -> None:
        self.safe &= self.disk.files.keys()
        assert not self.disk.handles

    def teardown(self) -> None:
        for number in range(len(ENTRIES)):
            self.check_get(self.store, number)


TestDiskTier = DiskMachine.TestCase
TestDiskTier.settings = settings(stateful_step_count=25)


def test_the_power_may_go_at_any_moment() -> None:
    """Every single operation of two writes that need room, many times over."""
    for at in range(1, 40):
        for seed in range(12):
            machine = DiskMachine()
            machine.build()
            for number in (4, 2, 1):
                machine.put(number)
            machine.sync()
            machine.disk.plan = {machine.disk.num_operations + at: None}
            try:
                machine.put(5)
                machine.put(3)
                machine.sync()
            except PowerCut:
                pass
            machine.disk.dead, machine.disk.plan = False, {}
            machine.lose_power(10**6, 0, seed, lying=seed % 3 == 0)
            machine.teardown()
