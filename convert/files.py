"""Safetensors files that are laid out first and filled in any order.

The header follows from the plan, so the file has its final length from the start and any row of any
tensor can be written on its own: no tensor is ever held whole. The file is named `….partial` until
it is complete on the disk.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ConversionError
from ..files import sync_folder
from .plan import PlannedArray, laid_out

ALIGNMENT = 8


def header_of(arrays: list[PlannedArray]) -> tuple[bytes, dict[str, int]]:
    """The bytes in front of the data, and where each array starts in the file."""
    entries: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    starts: dict[str, int] = {}
    position = 0
    for array in arrays:
        starts[array.name] = position
        end = position + array.num_bytes
        entries[array.name] = {
            "dtype": array.dtype,
            "shape": list(array.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    front = len(text).to_bytes(8, "little") + text
    return front, {name: start + len(front) for name, start in starts.items()}


def partial_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


class ShardFile:
    """A file of the output.

    Args:
        pieces: what lies in it, by the array that each is a part of, see ConversionPlan.
    """

    def __init__(self, path: Path, pieces: Mapping[str, list[PlannedArray]]) -> None:
        self.path = path
        self._partial = partial_path(path)
        arrays = laid_out(pieces)
        front, starts = header_of(arrays)
        self._places = {
            name: ([starts[part.name] for part in parts], parts[0].num_bytes)
            for name, parts in pieces.items()
        }
        length = len(front) + sum(array.num_bytes for array in arrays)
        self._file = os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            os.ftruncate(self._file, length)
            _put(self._file, front, 0)
        except BaseException:  # Ctrl-C too: no file stays open
            os.close(self._file)
            raise

    def write(self, name: str, offset: int, data: NDArray[np.generic]) -> int:
        """Put `data` `offset` bytes into the array `name`; returns the number of bytes."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        starts, size = self._places[name]
        view = raw.data
        while view:
            piece, inside = divmod(offset, size)
            part = view[: size - inside]
            _put(self._file, part, starts[piece] + inside)
            view, offset = view[len(part) :], offset + len(part)
        return raw.nbytes

    def sync(self) -> None:
        os.fsync(self._file)

    def finish(self) -> None:
        self.sync()
        os.replace(self._partial, self.path)
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Let go of the file; it keeps the name of a part unless it is finished."""
        os.close(self._file)


def _put(handle: int, data: bytes | memoryview, position: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(handle, view, position)
        view, position = view[count:], position + count


def write_file(path: Path, data: bytes) -> None:
    """A whole small file, on the disk before it has its name."""
    partial = partial_path(path)
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def damaged(path: Path) -> ConversionError:
    return ConversionError(
        f"{path} is damaged, so this conversion cannot continue; use --restart to begin again."
    )
