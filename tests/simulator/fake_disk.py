"""A disk tier in memory that forgets and lies as disks do. Knows no pages."""

import random
from collections.abc import Sequence

from mlxinfer.cache.disk import Entry, namespace_key


class FakeTier:
    """What `PageStore` wants of a `DiskTier`.

    Args:
        rng: which faults come.
        fault_share: of so many entries: not written, or found to be broken when read.
    """

    def __init__(self, rng: random.Random, *, fault_share: float) -> None:
        self.namespace = namespace_key("simulated")
        self.num_read = 0
        self._rng, self._fault_share = rng, fault_share
        self._entries: dict[bytes, Entry] = {}

    def _fails(self) -> bool:
        return self._rng.random() < self._fault_share

    name = "disk"

    def has(self, key: bytes) -> bool:
        return key in self._entries

    def remove(self, key: bytes) -> None:
        self._entries.pop(key, None)

    def store(self, entry: Entry) -> bool:
        if self._fails():
            return False
        before = self._entries.setdefault(entry.key, entry)
        assert before == entry, "the same tokens, another content"
        return True

    def load(self, keys: Sequence[bytes]) -> list[Entry]:
        entries: list[Entry] = []
        for key in keys:
            if key not in self._entries:
                break
            if self._fails():
                del self._entries[key]
                break
            entries.append(self._entries[key])
        self.num_read += len(entries)
        return entries

    def flush(self, timeout_s: float | None = None) -> bool:
        return True
