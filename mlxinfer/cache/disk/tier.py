"""Prefix pages on an SSD: a file for each entry, under a byte budget, written by a thread.

Bytes in, bytes out; knows no mlx. The files are a cache. A full or broken disk, a killed process or
a flipped bit costs a miss, and never gives a wrong payload or an exception.

`root/<namespace>.<version>/<key>.kv`, one page each. A file appears under its name complete or not
at all: it is written under another name, synced and renamed. Names carry the key, so several
processes may share a root. The worst that happens is that two write the same file, or that one
misses a file that another removed.
"""

import contextlib
import errno
import logging
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from ..prefix.index import KEY_BYTES, VERSION
from .entry import Entry, Files, decode, encode

_FULL = (errno.ENOSPC, errno.EDQUOT)
_HEX = f"[0-9a-f]{{{2 * KEY_BYTES}}}"
_FOLDER = re.compile(rf"{_HEX}\.{VERSION}")
_OTHER_FOLDER = re.compile(rf"{_HEX}(\.[0-9]+)?")
_ENTRY = re.compile(rf"{_HEX}\.kv")
_TEMP = re.compile(rf"{_HEX}\.[0-9a-f]+\.tmp")
log = logging.getLogger("mlxinfer.cache")
WRITES_PER_SCAN = 64  # how often to look for what other processes wrote


NOTHING_STORED = {
    "num_entries": 0,  # of all namespaces
    "num_bytes": 0,
    "hits": 0,
    "misses": 0,
    "written": 0,
    "dropped": 0,  # not written: the queue was full, or the entry larger than what may go
    "evicted": 0,
    "corrupt": 0,  # found broken, and removed
    "errors": 0,  # of the file system; each was a miss, or an entry not written
}
"""Entries on disk, and counts since a tier was opened."""


class DiskTier:
    """Prefix pages of one namespace, in a folder that other processes and models may share.

    Raises nothing that files can cause. Safe to use from several threads. `store` never waits for
    a write: a thread of its own, which the first `store` starts, calls `write_entry` and `sync`.

    Args:
        root: the folder; made where it is missing.
        namespace: `namespace_key` of what makes payloads comparable: model content, KV format. An
            adapter is best part of the key that a chain starts from.
        max_bytes: what the entries of all namespaces under `root` may take together.
        max_pending_bytes: payloads that may wait to be written; what comes on top is dropped.
        clock_ns: nanoseconds since the epoch.
    """

    name = "disk"

    def __init__(
        self,
        root: str,
        namespace: bytes,
        *,
        max_bytes: int,
        max_pending_bytes: int = 256 * 2**20,
        files: Files | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        assert len(namespace) == KEY_BYTES
        self.root = root
        self.namespace = namespace
        self.folder = os.path.join(root, f"{namespace.hex()}.{VERSION}")
        self.max_bytes = max_bytes
        self._files = files or Files()
        self._clock_ns = clock_ns
        self._lock = threading.Lock()  # of the next three
        self._sizes: OrderedDict[str, int] = OrderedDict()  # path -> bytes, longest unused first
        self._num_bytes = 0  # of all of them
        self._counts = dict(NOTHING_STORED)
        self._num_until_scan = WRITES_PER_SCAN
        self._unsynced = False
        self._max_pending_bytes = max_pending_bytes
        self._pending: OrderedDict[bytes, Entry] = OrderedDict()  # until they are written
        self._num_pending_bytes = 0
        self._writer: threading.Thread | None = None
        self._stopping = False
        self._changed = threading.Condition()  # of all from `_pending` on
        with self._errors_counted():
            self._files.make_folder(self.folder)
        self._empty_others()
        self._scan(remove_temps=True)

    # -- reading --------------------------------------------------------------------------------

    def get(self, key: bytes) -> Entry | None:
        """The entry of a key, which counts as used; None: not there, or broken and now removed."""
        return next(iter(self.load([key])), None)

    def load(self, keys: Sequence[bytes]) -> list[Entry]:
        """The entries of a prompt's pages from the first on, up to the first miss.

        They count as used, the first one most recently. So a chain loses its end first, and its
        beginning stays useful.
        """
        entries: list[Entry] = []
        read: list[str] = []  # from the disk
        for key in keys:
            entry = self._waiting(key)
            if entry is None:
                entry = self.read(key)
                if entry is None:
                    break
                read.append(self.path(key))
            entries.append(entry)
        self._mark_used(read[::-1])
        return entries

    def has(self, key: bytes) -> bool:
        """Whether an entry is on the disk, or waits to be written; it may yet prove broken."""
        if self._waiting(key) is not None:
            return True
        try:
            self._files.info(self.path(key))
        except OSError:
            return False
        return True

    def stats(self) -> dict[str, int]:
        with self._lock:
            now = {"num_entries": len(self._sizes), "num_bytes": self._num_bytes}
            return {**self._counts, **now}

    def remove(self, key: bytes) -> None:
        with self._changed:
            waiting = self._pending.pop(key, None)
            self._num_pending_bytes -= 0 if waiting is None else waiting.num_bytes
            self._changed.notify_all()
        path = self.path(key)
        pinned = False
        with self._errors_counted(missing_is_fine=True):
            pinned = self._files.is_pinned(path)
            if not pinned:
                self._remove(path)
        if not pinned:
            self._forget(path)

    def read(self, key: bytes) -> Entry | None:
        """The entry of the file of a key; None: not there, or broken and now removed."""
        path = self.path(key)
        entry = None
        with self._errors_counted(missing_is_fine=True):
            data = self._files.read(path)
            entry = decode(data, key)
            if entry is None:
                self._count(corrupt=1)
                self._remove(path)
        if entry is None:
            self._forget(path)
        self._count(hits=entry is not None, misses=entry is None)
        return entry

    def _mark_used(self, paths: Sequence[str]) -> None:
        now = self._clock_ns()
        for age, path in enumerate(reversed(paths)):
            with self._errors_counted(missing_is_fine=True):
                self._files.mark_used(path, now - 1000 * age)
        with self._lock:
            for path in paths:
                if path in self._sizes:
                    self._sizes.move_to_end(path)

    # -- writing --------------------------------------------------------------------------------

    def write_entry(self, entry: Entry) -> bool:
        """Write an entry, and remove the longest unused ones for room; False: it is not written."""
        size = entry.num_bytes
        if size > self.max_bytes:
            self._count(dropped=1)
            return False
        self._num_until_scan -= 1
        if self._num_until_scan <= 0:
            self._num_until_scan = WRITES_PER_SCAN
            self._scan()
        path = self.path(entry.key)
        written = False
        with self._errors_counted():
            if not self._make_room(size, self.max_bytes, but_for=path):
                self._count(dropped=1)
                return False
            try:
                self._write(path, encode(entry))
            except OSError as error:  # others have filled the disk: it holds no more than now
                room = error.errno in _FULL and self._make_room(size, self._num_bytes, but_for=path)
                if not room:
                    raise
                self._write(path, encode(entry))
            self._forget(path)
            with self._lock:
                self._sizes[path] = size
                self._num_bytes += size
            self._mark_used([path])  # by the clock that later uses are marked with
            self._unsynced = True
            self._count(written=1)
            written = True
        return written

    def sync(self) -> None:
        """Sync the names of the files written last; without this, a crash may lose them."""
        if self._unsynced:
            with self._errors_counted():
                self._files.sync_folder(self.folder)
                self._unsynced = False

    def _write(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        self._files.make_folder(self.folder)
        temp = f"{path.removesuffix('.kv')}.{secrets.token_hex(8)}.tmp"
        try:
            handle = self._files.create(temp)
            try:
                for part in parts:
                    view = memoryview(part)
                    while view:
                        view = view[self._files.write(handle, view) :]
                self._files.fsync(handle)
            finally:
                self._files.close(handle)
            self._files.rename(temp, path)
        except OSError:
            with contextlib.suppress(OSError):
                self._files.remove(temp)
            raise

    def _make_room(self, size: int, max_bytes: int, *, but_for: str) -> bool:
        """Remove entries until `size` more fit; False: the rest belongs to saved sessions."""
        num_pinned = 0
        while True:
            with self._lock:
                used = self._num_bytes - self._sizes.get(but_for, 0)
                if used + size <= max_bytes:
                    return True
                oldest = next((path for path in self._sizes if path != but_for), None)
                if oldest is None or num_pinned == len(self._sizes):
                    return False
            pinned = False
            with self._errors_counted(missing_is_fine=True):
                pinned = self._files.is_pinned(oldest)
            if pinned:
                num_pinned += 1
                with self._lock:
                    self._sizes.move_to_end(oldest)
                continue
            with self._errors_counted():
                self._remove(oldest)
                self._count(evicted=1)
            self._forget(oldest)  # or what cannot be removed would stand in the way of all others

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            self._files.remove(path)

    def _forget(self, path: str) -> None:
        with self._lock:
            self._num_bytes -= self._sizes.pop(path, 0)

    # -- writing later --------------------------------------------------------------------------

    def store(self, entry: Entry) -> bool:
        """Store a page soon. The payload is not copied, and must not change.

        Returns:
            False: dropped, for too much waits already, or the tier was closed.
        """
        assert entry.is_named
        if self.has(entry.key):
            return True
        with self._changed:
            waiting = self._num_pending_bytes + entry.num_bytes
            if not self._stopping and waiting <= self._max_pending_bytes:
                if self._writer is None:  # first: where it fails, nothing waits for it
                    writer = threading.Thread(target=self._write_all, name="kv-disk", daemon=True)
                    writer.start()
                    self._writer = writer
                self._num_pending_bytes = waiting
                self._pending[entry.key] = entry
                self._changed.notify_all()
                return True
        self._count(dropped=1)
        return False

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all entries so far are on the disk; False: some are not."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Write the waiting entries, and stop. Later entries are dropped; reading goes on."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join(timeout_s)

    def _waiting(self, key: bytes) -> Entry | None:
        with self._changed:
            return self._pending.get(key)

    def _write_all(self) -> None:
        """The writer's thread. If a bug ends it, no caller waits for ever."""
        try:
            while (entry := self._next()) is not None:
                self.write_entry(entry)
                if len(self._pending) == 1:
                    self.sync()
                if not self._done(entry):
                    self.remove(entry.key)
        finally:
            with self._changed:
                self._stopping = True
                self._pending.clear()
                self._changed.notify_all()

    def _next(self) -> Entry | None:
        """The entry that waits longest; None: there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._stopping)
            return next(iter(self._pending.values()), None)

    def _done(self, entry: Entry) -> bool:
        """Whether a written entry is still wanted: it may have been removed meanwhile."""
        with self._changed:
            if self._pending.get(entry.key) is not entry:
                return False
            del self._pending[entry.key]
            self._num_pending_bytes -= entry.num_bytes
            self._changed.notify_all()
            return True

    # -- looking around -------------------------------------------------------------------------

    def _scan(self, *, remove_temps: bool = False) -> None:
        files: list[tuple[int, str, int]] = []
        for folder in self._folders():
            for name in self._names(folder):
                path = os.path.join(folder, name)
                with self._errors_counted(missing_is_fine=True):
                    if remove_temps and _TEMP.fullmatch(name):
                        self._files.remove(path)
                    elif _ENTRY.fullmatch(name):
                        num_bytes, used_ns = self._files.info(path)
                        files.append((used_ns, path, num_bytes))
        with self._lock:
            self._sizes = OrderedDict((path, size) for _, path, size in sorted(files))
            self._num_bytes = sum(self._sizes.values())

    def _empty_others(self) -> None:
        """Remove the entries of other versions: their keys follow another rule."""
        num_removed = 0
        for folder in self._folders(_OTHER_FOLDER):
            if _FOLDER.fullmatch(os.path.basename(folder)):
                continue
            for name in self._names(folder):
                if _ENTRY.fullmatch(name) or _TEMP.fullmatch(name):
                    with self._errors_counted(missing_is_fine=True):
                        self._files.remove(os.path.join(folder, name))
                        num_removed += 1
        if num_removed:
            log.info("%d pages of another version are removed from %s", num_removed, self.root)

    def _folders(self, form: re.Pattern[str] = _FOLDER) -> list[str]:
        names = self._names(self.root)
        return [os.path.join(self.root, name) for name in names if form.fullmatch(name)]

    def _names(self, folder: str) -> list[str]:
        names: list[str] = []
        with self._errors_counted(missing_is_fine=True):
            names = self._files.names(folder)
        return names

    def path(self, key: bytes) -> str:
        return os.path.join(self.folder, f"{key.hex()}.kv")

    @contextlib.contextmanager
    def _errors_counted(self, *, missing_is_fine: bool = False) -> Iterator[None]:
        """Count an error of the file system, which is a miss to the caller."""
        try:
            yield
        except OSError as error:
            if not (missing_is_fine and isinstance(error, FileNotFoundError)):
                self._count(errors=1)

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count
