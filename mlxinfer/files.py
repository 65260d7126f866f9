"""Files that survive a kill: small ones that are there whole or not at all, and lists that grow.

And small JSON files, read within limits.
"""

import fcntl
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from .errors import CheckpointError, InvalidRequestError

MAX_JSON_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, {} if there is no such file; raises CheckpointError."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it has more than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; expected a JSON object.")
    return value


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file in one step, also where the machine crashes. Only its user can read it.

    Raises:
        OSError: it cannot be written, such as on a full disk; what was there stays.
    """
    with written_whole(path) as file:
        file.write(data)


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` in one step once the block ends.

    Raises:
        OSError: it cannot be written; it names `path`.
        whatever the block raises; what was there stays then, too.
    """
    try:
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0o600
        try:
            with open(number, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:  # Ctrl-C too: no half of a file stays
            os.unlink(name)
            raise
    except OSError as error:
        error.filename = str(path)
        raise


def sync_folder(folder: str | Path) -> None:
    """Return when the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_lines(path: Path, begin: bytes, read: Callable[[bytes], object]) -> BinaryIO:
    """Open a file of lines to add more. An end that a killed run left of a line is cut off.

    Args:
        path: made if it is not there. Until it is closed, no other process opens it so.
        begin: how each line begins.
        read: gets every line that is there; ValueError, KeyError and TypeError mean that it is
            another program's.

    Raises:
        InvalidRequestError: it is no file, another process adds to it, or it is another program's:
            then it stays as it is.
    """
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise InvalidRequestError(f"{path} is no file; name one in a folder that is there.")
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, or the process ends
        end = _read_lines(path, file, begin, read)
        file.truncate(end)
    except BlockingIOError:
        file.close()
        raise InvalidRequestError(
            f"Another run writes to {path}; wait for its end, or name another file."
        ) from None
    except BaseException:  # such as Ctrl-C: no file stays locked
        file.close()
        raise
    return file


def _read_lines(path: Path, file: BinaryIO, begin: bytes, read: Callable[[bytes], object]) -> int:
    """Read the whole lines; return where the last of them ends."""
    file.seek(0)
    end = 0
    for number, line in enumerate(file, start=1):
        whole = line.endswith(b"\n")
        try:
            if line[: len(begin)] != begin[: len(line)]:
                raise ValueError
            if whole:
                read(line)
        except (ValueError, KeyError, TypeError):
            raise InvalidRequestError(
                f"{path}, line {number}: this is not as it was written here; name another file.",
                param="path",
            ) from None
        end += len(line) if whole else 0
    return end


_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


def other_build(indexed: Iterable[str], present: Iterable[str]) -> list[str]:
    """The shards to take where an index names files that are missing.

    They are the one complete set, 1 to N of N. The index then belongs to another build of the
    model, of which no file is present; half a download of that build is no model.

    Returns:
        The shards in their order; [] where there is no such set.
    """
    names = set(present)
    numbered: dict[tuple[str, int], dict[int, str]] = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            stem, number, count = match[1], int(match[2]), int(match[3])
            numbered.setdefault((stem, count), {})[number] = name
    whole = [
        [shards[number] for number in range(1, count + 1)]
        for (_, count), shards in numbered.items()
        if shards.keys() == set(range(1, count + 1))
    ]
    if len(whole) != 1 or names & set(indexed) - set(whole[0]):
        return []
    return whole[0]


def data_folder() -> Path:
    """The folder of what this user keeps; XDG_DATA_HOME moves it."""
    data = os.environ.get("XDG_DATA_HOME")
    if data:
        folder = Path(data).expanduser()
    elif sys.platform == "darwin":
        folder = Path.home() / "Library/Application Support"
    else:
        folder = Path.home() / ".local/share"
    return folder / "mlxinfer"
