"""The few file operations that the disk tier needs, so that tests can make each of them fail."""

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Size in bytes, and when it was last used (`mtime`)."""

    num_bytes: int
    used_ns: int


class Files:
    """The operating system's files. Every method raises OSError as the system does."""

    def make_folder(self, folder: str) -> None:
        """Make a folder and those above it, for this user alone; fine where it exists."""
        os.makedirs(folder, mode=0o700, exist_ok=True)

    def names(self, folder: str) -> list[str]:
        """What lies in a folder."""
        return os.listdir(folder)

    def create(self, path: str) -> int:
        """Open a file that must not exist, for this user alone; its handle."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)

    def write(self, handle: int, data: bytes | memoryview) -> int:
        """Write some of `data`, at least a byte; how many."""
        return os.write(handle, data)

    def fsync(self, handle: int) -> None:
        """Return when what was written is on the disk."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Close a handle."""
        os.close(handle)

    def read(self, path: str) -> bytes:
        """All of a file that is not a link."""
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
            return file.read()

    def rename(self, path: str, to: str) -> None:
        """Put a file in the place of another, in one go."""
        os.replace(path, to)

    def sync_folder(self, folder: str) -> None:
        """Return when the names in a folder are on the disk."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def info(self, path: str) -> FileInfo:
        """Size and time of last use."""
        status = os.stat(path, follow_symlinks=False)
        return FileInfo(status.st_size, status.st_mtime_ns)

    def mark_used(self, path: str, at_ns: int) -> None:
        """Set the time of last use, nanoseconds since the epoch."""
        os.utime(path, ns=(at_ns, at_ns))
