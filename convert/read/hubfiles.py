"""Shards of a hub repository: fetched when they are read, gone when they were. Knows no formats."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...hub.remote import Listing, RemoteFile, cached_file, fetch_file, fetch_small, read_range
from .stored import Array, StoredArray

Report = Callable[[int], None]


@dataclass(slots=True)
class HubFiles:
    """Shards that are fetched when they are first read."""

    listing: Listing
    folder: Path  # for shards that are not in the hub cache
    report: Report
    remote: dict[str, RemoteFile] = field(init=False)
    fetched: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Index the listing."""
        self.remote = {file.path: file for file in self.listing.files}

    def path(self, file: str) -> Path:
        """The shard, fetched if need be.

        Raises:
            DownloadError, ModelNotFoundError: as fetch_file().
        """
        cached = cached_file(self.listing, file)
        if cached is not None:
            return cached
        remote = self.remote[file]
        target = self.folder / file
        if not (target.is_file() and target.stat().st_size == remote.size):
            if remote.sha256 is None:
                return fetch_small(self.listing, file)
            fetch_file(self.listing, remote, target, self.report)
        self.fetched.add(file)
        return target

    def size(self, file: str) -> int:
        """Bytes, as the hub says."""
        return self.remote[file].size

    def small(self, array: StoredArray) -> Array:
        """A few float32 numbers, without the rest of their file."""
        data = read_range(self.listing, array.file, array.offset, array.num_bytes)
        return np.frombuffer(data, "<f4")

    def drop(self, file: str) -> None:
        """Delete a shard that was fetched here; the hub cache stays as it is."""
        if file in self.fetched:
            (self.folder / file).unlink(missing_ok=True)
            self.fetched.discard(file)

    def close(self) -> None:
        """Delete all that was fetched here."""
        shutil.rmtree(self.folder, ignore_errors=True)
