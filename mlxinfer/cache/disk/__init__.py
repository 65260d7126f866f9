"""Prefix pages to and from SSD, written by a thread of its own. Bytes in, bytes out; knows no mlx.

What lies on disk is a cache: a full or broken disk, a killed process or a flipped bit costs a miss,
never a wrong payload and never an exception.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from .entry import Entry, chain_keys, namespace_key, page_key
from .files import Files
from .store import DiskStats, DiskStore

__all__ = ["DiskStats", "DiskTier", "Entry", "Files", "chain_keys", "namespace_key", "page_key"]


class DiskTier:
    """A store of prefix pages that never makes its caller wait for a write.

    Args:
        root: the folder; made where it is missing. Other processes and models may share it.
        namespace: `namespace_key` of what makes payloads comparable: model content, KV format. An
            adapter is best told by the key that a chain starts from.
        max_bytes: what all entries under `root` may take.
        max_pending_bytes: payloads that may wait to be written; what comes on top is dropped.
        files, clock_ns: for tests.
    """

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
        self.namespace = namespace
        self._store = DiskStore(
            root, namespace, max_bytes=max_bytes, files=files, clock_ns=clock_ns
        )
        self._max_pending_bytes = max_pending_bytes
        self._pending: OrderedDict[bytes, Entry] = OrderedDict()  # until they are written
        self._num_pending_bytes = 0
        self._stopping = False
        self._changed = threading.Condition()  # of the three above
        self._writer = threading.Thread(target=self._write_all, name="kv-disk", daemon=True)
        self._writer.start()

    def put(
        self, key: bytes, parent: bytes, token_ids: Sequence[int], payload: bytes | memoryview
    ) -> bool:
        """Store a page soon. The payload is copied, unless it is bytes.

        Args:
            key: `page_key(parent, token_ids)`.
            parent: key of the page before, or what the chain starts from.
            token_ids: of this page alone.
            payload: of any size and content.

        Returns:
            False: dropped, for too much waits already, or the tier was closed.
        """
        assert key == page_key(parent, token_ids)
        if self.contains(key):
            return True
        entry = Entry(key, parent, tuple(token_ids), memoryview(bytes(payload)))
        with self._changed:
            waiting = self._num_pending_bytes + entry.num_bytes
            if not self._stopping and waiting <= self._max_pending_bytes:
                self._num_pending_bytes = waiting
                self._pending[key] = entry
                self._changed.notify_all()
                return True
        self._store.count_dropped()
        return False

    def get(self, key: bytes) -> Entry | None:
        """The entry of a key, read now; None: not there, or broken."""
        return self._waiting(key) or self._store.get(key)

    def get_chain(self, keys: Sequence[bytes]) -> list[Entry]:
        """The entries of a prompt's `chain_keys` from the first on, up to the first miss."""
        entries: list[Entry] = []
        while rest := keys[len(entries) :]:
            waiting = self._waiting(rest[0])
            found = [waiting] if waiting else self._store.get_chain(rest)
            if not found:
                break
            entries += found
        return entries

    def contains(self, key: bytes) -> bool:
        """Whether there is an entry; it may yet prove broken."""
        return self._waiting(key) is not None or self._store.contains(key)

    def stats(self) -> DiskStats:
        """What is there and what happened."""
        return self._store.stats()

    def clear(self) -> None:
        """Remove everything under the root."""
        self.flush()
        self._store.clear()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was put is on the disk; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Write what waits, and stop. What is put later is dropped; reading goes on."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._writer.join(timeout_s)

    def _waiting(self, key: bytes) -> Entry | None:
        with self._changed:
            return self._pending.get(key)

    def _write_all(self) -> None:
        """The writer's life. It ends early only by a bug, and then nobody waits for it."""
        try:
            while (entry := self._next()) is not None:
                self._store.put(entry)
                if len(self._pending) == 1:
                    self._store.sync()
                self._done(entry)
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

    def _done(self, entry: Entry) -> None:
        with self._changed:
            del self._pending[entry.key]
            self._num_pending_bytes -= entry.num_bytes
            self._changed.notify_all()
