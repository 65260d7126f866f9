"""One file of the output: written with a journal, compared with the source. Knows no recipes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .arrange import Arranged
from .files import ShardFile, damaged
from .journal import Journal
from .plan import Planned
from .quantise import Error
from .verify import as_written, check_shard, confirm
from .write import TensorWriter, Written

CHECKPOINT_BYTES = 128 << 20  # written between two lines of the journal
CHECKPOINT_S = 5.0

Progress = Callable[[str, int, int], None]  # step, how far, of how much


@dataclass(slots=True)
class Told:
    """Counts numbers written, for whoever watches."""

    progress: Progress
    total: int
    done: int

    def add(self, count: int) -> None:
        """`count` more."""
        self.done += count
        self.progress("write", self.done, self.total)


def write_shard(path: Path, tensors: list[Planned], writer: TensorWriter, journal: Journal) -> None:
    """All tensors of one file that the journal does not have; then the file has its name."""
    arrays = [array for tensor in tensors for array in tensor.arrays]
    with ShardFile(path, arrays) as file:
        with checkpoints(file, journal) as record:
            for tensor in tensors:
                if tensor.output.name not in journal.tensors:
                    record(tensor, writer.write(tensor, file))
        file.finish()


@contextmanager
def checkpoints(file: ShardFile, journal: Journal) -> Iterator[Callable[[Planned, Written], None]]:
    """Lines in the journal for what is on the disk, not too often: each waits for the disk."""
    pending: dict[str, dict[str, Any]] = {}
    size, started = 0, time.monotonic()

    def settle() -> None:
        nonlocal size, started
        if pending:
            file.sync()
            journal.add_tensors(pending)
            pending.clear()
        size, started = 0, time.monotonic()

    def record(tensor: Planned, written: Written) -> None:
        nonlocal size
        pending[tensor.output.name] = asdict(written)
        size += tensor.num_bytes
        if size >= CHECKPOINT_BYTES or time.monotonic() - started >= CHECKPOINT_S:
            settle()

    yield record
    settle()


def entries_of(tensors: list[Planned], journal: Journal) -> list[dict[str, Any]]:
    """For the report, as writing found them."""
    written = ((tensor, *_journalled(journal, tensor)) for tensor in tensors)
    return [as_written(*entry).as_dict() for entry in written]


def checked_entries(
    path: Path,
    tensors: list[Planned],
    arranged: Arranged,
    journal: Journal,
    *,
    block: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """For the report, as reading a finished file finds them, `block` numbers at a time.

    Raises:
        ConversionError: the file is not what was written.
    """
    entries = []
    found = check_shard(path, tensors, arranged, block)
    for number, (tensor, checked) in enumerate(zip(tensors, found, strict=True), 1):
        confirm(checked, *_journalled(journal, tensor))
        entries.append(checked.as_dict())
        progress(f"check {path.name}", number, len(tensors))
    return entries


def _journalled(journal: Journal, tensor: Planned) -> tuple[Error, list[int]]:
    try:
        entry = journal.tensors[tensor.output.name]
        return Error(**entry["error"]), entry["checksums"]
    except (KeyError, TypeError) as error:
        raise damaged(journal.path) from error
