"""The disk tier on real files: what comes back, what costs a miss, and nothing worse."""

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.cache.disk import (
    NOTHING_STORED,
    DiskTier,
    Entry,
    Files,
    group_key,
    namespace_key,
    page_key,
)
from mlxinfer.cache.disk.entry import decode, encode
from mlxinfer.cache.prefix.index import VERSION, PageNames

MODEL = namespace_key("model", "bf16")
FOLDER = f"{MODEL.hex()}.{VERSION}"
MEGABYTE = 2**20


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(str(tmp_path), MODEL, max_bytes=MEGABYTE)
    yield tier
    tier.close()


def chain_keys(root: bytes, token_ids: list[int], page_size: int) -> list[bytes]:
    """The names of all whole pages of a prompt, in order."""
    names = PageNames(root, token_ids, page_size)
    return [names.name(number) for number in range(len(token_ids) // page_size)]


def put(tier: DiskTier, token_ids: list[int], payload: bytes, parent: bytes = MODEL) -> bytes:
    key = page_key(parent, token_ids)
    assert tier.store(Entry(key, parent, tuple(token_ids), memoryview(payload)))
    return key


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_writer_that_did_not_start(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            put(tier, [1, 2], b"lost")
    assert tier.flush(timeout_s=0)
    key = put(tier, [1, 2], b"stored")
    assert tier.flush(timeout_s=60)
    assert tier.has(key)


# -- entries ------------------------------------------------------------------------------------

entries = st.builds(
    lambda parent, token_ids, payload: Entry(
        page_key(parent, token_ids), parent, tuple(token_ids), memoryview(payload)
    ),
    st.binary(min_size=20, max_size=20),
    st.lists(st.integers(0, 2**32 - 1), max_size=16),
    st.binary(max_size=200),
)


@given(entries)
def test_entries_come_back_as_they_went(entry: Entry) -> None:
    data = b"".join(encode(entry))
    assert len(data) == entry.num_bytes
    assert decode(data, entry.key) == entry
    assert decode(data, bytes(20)) is None


@given(entries, st.data())
def test_any_damage_shows(entry: Entry, data: st.DataObject) -> None:
    whole = b"".join(encode(entry))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << bit % 8
    assert decode(bytes(flipped), entry.key) is None
    assert decode(whole[: data.draw(st.integers(0, len(whole) - 1))], entry.key) is None
    assert decode(whole + b"\0", entry.key) is None


def test_a_key_stands_for_all_that_came_before() -> None:
    keys = chain_keys(MODEL, [1, 2, 3, 4, 5], 2)
    assert keys == [page_key(MODEL, [1, 2]), page_key(page_key(MODEL, [1, 2]), [3, 4])]
    assert chain_keys(MODEL, [1, 2, 9, 4], 2)[0] == keys[0]
    assert chain_keys(MODEL, [9, 2, 3, 4], 2)[1] != keys[1]
    assert chain_keys(namespace_key("model", "q8"), [1, 2], 2) != keys[:1]
    assert len({namespace_key("ab", "c"), namespace_key("a", "bc"), namespace_key("abc")}) == 3


def test_a_page_is_one_name_for_all_groups() -> None:
    page = page_key(MODEL, [1, 2])
    keys = [group_key(page, group) for group in range(3)]
    assert len(set(keys)) == 3
    assert keys[0] == page
    for key in keys:
        entry = Entry(key, MODEL, (1, 2), memoryview(b"x"))
        assert decode(b"".join(encode(entry)), key) == entry
        assert decode(b"".join(encode(entry)), group_key(page, 9)) is None


def test_folders_of_other_versions_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older = [tmp_path / MODEL.hex(), tmp_path / f"{MODEL.hex()}.{VERSION - 1}"]
    for folder in older:
        folder.mkdir()
        (folder / f"{page_key(MODEL, [1]).hex()}.kv").write_bytes(b"old")
        (folder / "notes.txt").write_text("of somebody else")
    with caplog.at_level("INFO", "mlxinfer.cache"):
        tier = DiskTier(str(tmp_path), MODEL, max_bytes=1 << 20)
    assert [record.getMessage() for record in caplog.records] == [
        f"2 pages of another version are removed from {tmp_path}"
    ]
    assert [[file.name for file in folder.iterdir()] for folder in older] == [["notes.txt"]] * 2
    assert tier.stats() == NOTHING_STORED


# -- storing ------------------------------------------------------------------------------------


def test_the_longest_unused_goes_and_of_a_chain_the_end(tmp_path: Path) -> None:
    size = Entry(MODEL, MODEL, (1, 2), memoryview(bytes(1000))).num_bytes
    tier = DiskTier(str(tmp_path), MODEL, max_bytes=4 * size)
    keys = chain_keys(MODEL, list(range(6)), 2)
    for number, parent in enumerate([MODEL, *keys[:2]]):
        put(tier, [2 * number, 2 * number + 1], bytes(1000), parent)
    old = put(tier, [7, 7], bytes(1000))
    tier.flush()
    assert len(tier.load(keys)) == 3
    put(tier, [8, 8], bytes(1000))
    put(tier, [9, 9], bytes(1000))
    tier.flush()
    assert [tier.has(key) for key in (*keys, old)] == [True, True, False, False]
    tier.close()
    reopened = DiskTier(str(tmp_path), MODEL, max_bytes=4 * size)  # reads the times of last use
    put(reopened, [10, 10], bytes(1000))
    reopened.flush()
    assert [reopened.has(key) for key in keys] == [True, False, False]
    assert reopened.stats()["num_bytes"] == 4 * size
    assert (reopened.stats()["num_entries"], reopened.stats()["evicted"]) == (4, 1)
    reopened.close()


@pytest.mark.parametrize("oldest", range(4))
def test_a_restart_keeps_the_order_of_last_use(tmp_path: Path, oldest: int) -> None:
    size = Entry(MODEL, MODEL, (1,), memoryview(b"")).num_bytes
    tier = DiskTier(str(tmp_path), MODEL, max_bytes=4 * size)
    keys = [put(tier, [token], b"") for token in range(4)]
    tier.close()
    path = tmp_path / FOLDER / f"{keys[oldest].hex()}.kv"
    os.utime(path, ns=(0, 10**18))
    reopened = DiskTier(str(tmp_path), MODEL, max_bytes=4 * size)
    put(reopened, [9], b"")
    reopened.close()
    assert [key for key in keys if not reopened.has(key)] == [keys[oldest]]


def test_an_entry_that_can_never_fit_is_dropped(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path), MODEL, max_bytes=500)
    small = put(tier, [1], b"")
    put(tier, [2], bytes(500))
    tier.close()
    assert tier.has(small)
    assert (tier.stats()["num_entries"], tier.stats()["dropped"], tier.stats()["evicted"]) == (
        1,
        1,
        0,
    )


def test_prompts_are_for_this_user_alone(tier: DiskTier, tmp_path: Path) -> None:
    put(tier, [1], b"x")
    tier.flush()
    assert [path.stat().st_mode & 0o777 for path in files_in(tmp_path)] == [0o600]
    assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700


# -- damage -------------------------------------------------------------------------------------


def test_only_own_leftovers_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / f"{MODEL.hex()}.0123abcd.tmp").write_bytes(b"half")
    (folder / "notes.tmp").write_bytes(b"of another program")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / f"{MODEL.hex()}.kv").write_bytes(b"of another program")
    DiskTier(str(tmp_path), MODEL, max_bytes=10).close()
    assert [path.name for path in files_in(tmp_path)] == ["notes.tmp", f"{MODEL.hex()}.kv"]


def test_links_are_not_followed(tier: DiskTier, tmp_path: Path) -> None:
    key = put(tier, [1], b"x")
    tier.flush()
    (path,) = files_in(tmp_path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert tier.get(key) is None


class Failing(Files):
    """One operation fails."""

    def __init__(self, operation: str, code: int) -> None:
        self.failed = 0

        def fail(*_: object) -> None:
            self.failed += 1
            raise OSError(code, os.strerror(code))

        setattr(self, operation, fail)


OPERATIONS = [
    "make_folder", "names", "create", "write", "fsync", "close", "read", "rename",
    "sync_folder", "remove", "info", "mark_used",
]  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT])
def test_a_failing_disk_costs_a_miss(tmp_path: Path, operation: str, code: int) -> None:
    before = DiskTier(str(tmp_path), MODEL, max_bytes=400)
    old = put(before, [1], b"old")
    before.close()
    files = Failing(operation, code)
    tier = DiskTier(str(tmp_path), MODEL, max_bytes=400, files=files)
    new = put(tier, [2], bytes(200))  # takes the place of the old one
    assert tier.flush(10)
    loaded = {old: tier.get(old), new: tier.get(new)}
    tier.remove(old)
    tier.remove(new)
    tier.close()
    for key, payload in ((old, b"old"), (new, bytes(200))):
        assert loaded[key] is None or bytes(loaded[key].payload) == payload
    assert files.failed
    if operation in ("create", "write", "fsync", "close", "rename"):
        assert loaded[new] is None
        assert tier.stats()["errors"] == 1
    after = DiskTier(str(tmp_path), MODEL, max_bytes=400)
    assert all(path.suffix == ".kv" for path in files_in(tmp_path))
    put(after, [2], bytes(200))
    after.flush()
    assert bytes(after.get(new).payload) == bytes(200)
    after.close()


class Full(Files):
    """A disk that others have filled but for `room` bytes."""

    def __init__(self, folder: Path, room: int) -> None:
        self.folder, self.room = folder, room

    def write(self, handle: int, data: bytes | memoryview) -> int:
        if sum(path.stat().st_size for path in files_in(self.folder)) + len(data) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(handle, data)


def test_a_full_disk_keeps_the_entries_that_were_used_last(tmp_path: Path) -> None:
    files = Full(tmp_path, room=1500)
    tier = DiskTier(str(tmp_path), MODEL, max_bytes=MEGABYTE, files=files)
    keys = []
    for number in range(20):
        keys.append(put(tier, [number], bytes(200)))
        assert tier.flush(10)
    kept = [key for key in keys if tier.has(key)]
    assert len(kept) >= 3
    assert kept == keys[-len(kept) :]
    files.room = 0
    put(tier, [99], bytes(200))  # in vain, whatever goes
    tier.close()
    assert tier.stats()["errors"] == 1


def test_what_cannot_be_removed_does_not_block_others(tmp_path: Path) -> None:
    stuck = tmp_path / FOLDER / f"{page_key(MODEL, [0]).hex()}.kv"
    (stuck / "inner").mkdir(parents=True)  # as another user's file would be
    os.utime(stuck, (1, 1))
    tier = DiskTier(str(tmp_path), MODEL, max_bytes=stuck.stat().st_size + 1000)
    keys = []
    for number in range(1, 30):
        keys.append(put(tier, [number], bytes(200)))
        assert tier.flush(10)
    entry = tier.get(keys[-1])
    assert bytes(entry.payload) == bytes(200)
    assert stuck.exists()
    assert tier.stats()["written"] == 29
    tier.close()


def test_a_root_that_is_no_folder_costs_misses(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    tier = DiskTier(str(tmp_path / "file"), MODEL, max_bytes=400)
    key = put(tier, [1], b"x")
    tier.close()
    assert tier.get(key) is None
    assert tier.stats()["errors"] > 0


# -- several at once ----------------------------------------------------------------------------


class Slow(Files):
    """Writes wait until they may go on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def write(self, handle: int, data: bytes | memoryview) -> int:
        assert self.go_on.wait(60)
        return super().write(handle, data[:7])  # the system may write less than asked


def test_a_slow_disk_makes_no_request_wait(tmp_path: Path) -> None:
    files = Slow()
    tier = DiskTier(str(tmp_path), MODEL, max_bytes=MEGABYTE, max_pending_bytes=3000, files=files)
    entries = [
        Entry(page_key(MODEL, [n]), MODEL, (n,), memoryview(bytes([n] * 900))) for n in range(6)
    ]
    taken = [tier.store(entry) for entry in entries]
    assert taken == [True, True, True, False, False, False]
    assert bytes(tier.get(page_key(MODEL, [2])).payload) == bytes([2] * 900), "not written yet"
    assert not tier.flush(0.01)
    files.go_on.set()
    tier.close()
    assert (tier.stats()["written"], tier.stats()["dropped"]) == (3, 3)
    assert bytes(tier.get(page_key(MODEL, [2])).payload) == bytes([2] * 900)
    assert not tier.store(Entry(page_key(MODEL, [9]), MODEL, (9,)))
    assert tier.flush()


def test_removed_entries_are_gone_also_before_they_were_written(tmp_path: Path) -> None:
    files = Slow()
    tier = DiskTier(str(tmp_path), MODEL, max_bytes=MEGABYTE, files=files)
    keys = [put(tier, [n], bytes(900)) for n in range(3)]  # the first is being written
    for key in keys:
        tier.remove(key)
    kept = put(tier, [4], bytes(900))
    files.go_on.set()
    tier.close()
    assert [path.name for path in files_in(tmp_path)] == [f"{kept.hex()}.kv"]
    assert not any(tier.has(key) for key in keys)
    assert tier.stats()["num_entries"] == 1


def test_two_tiers_share_a_folder(tmp_path: Path) -> None:
    """Both write and read the same keys with room for few of them: misses, never wrong ones."""
    tiers = [DiskTier(str(tmp_path), MODEL, max_bytes=3000) for _ in range(2)]
    wrong: list[bytes] = []

    def work(tier: DiskTier) -> None:
        for number in range(120):
            token = number * 7 % 10
            key = put(tier, [token], bytes([token] * 500))
            entry = tier.get(page_key(MODEL, [number % 10]))
            if entry is not None and bytes(entry.payload) != bytes([number % 10] * 500):
                wrong.append(key)
            if number % 20 == 0:
                tier.flush()

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, tiers))
    for tier in tiers:
        tier.close()
        assert tier.stats()["corrupt"] == 0
    assert wrong == []
    assert all(path.suffix == ".kv" for path in files_in(tmp_path))
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 2 * 3000
