"""The header of a GGUF file: metadata, and type, shape and offset of each tensor.

Layout (github.com/ggml-org/ggml, docs/gguf.md): magic, version, counts, key-value pairs, tensor
infos, padding to the alignment, data. All little-endian. The file is not trusted: each length is
compared with the bytes that are left before anything is allocated.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES

from ....errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class BlockType:
    """Values are stored in blocks along the last axis."""

    name: str
    num_values: int
    num_bytes: int


TYPES = {
    int(kind): BlockType(kind.name, values, size)
    for kind, (values, size) in GGML_QUANT_SIZES.items()
}

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 256 << 20  # a vocabulary of 262 thousand with its merges takes 20 million
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_STRINGS = 1 << 22  # in all arrays together
MAX_DIMS = 4
BEAT = 1 << 14  # strings between two reports
_FORMATS = "BbHhIif?"  # value types 0 to 7
_STRING, _ARRAY = 8, 9
_SCALARS = {**dict(enumerate(_FORMATS)), 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as the header states it."""

    name: str
    type: BlockType
    shape: tuple[int, ...]  # the last axis is contiguous
    offset: int  # bytes from the start of the data
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The metadata and the tensors, which stand before the data."""

    metadata: dict[str, Any]  # int, float, bool, str, list[str] or a numpy array
    tensors: tuple[TensorEntry, ...]
    data_start: int


def parse_header(
    data: memoryview, label: str, tell: Callable[[int, int], None] = lambda *_: None
) -> GGUFHeader:
    """The header of a file with these bytes.

    Args:
        tell: is called with the number of keys that are read, of how many; a vocabulary is a key,
            and takes nearly all of the time.
    """
    cursor = _Cursor(data, label)
    _check_start(cursor, label)
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
        raise cursor.fail(f"says it has {num_tensors} tensors and {num_keys} keys")
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        cursor.beat = partial(tell, index, num_keys)
        cursor.beat()
        key = cursor.string()
        if key in metadata:
            raise cursor.fail(f"has the key {key[:80]!r} twice")
        metadata[key] = _value(cursor, key)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.fail(f"says its alignment is {str(alignment)[:40]}")
    tensors = [_tensor(cursor) for _ in range(num_tensors)]
    start = -(-cursor.position // alignment) * alignment
    return GGUFHeader(metadata, _checked(tensors, start, alignment, cursor), start)


def _check_start(cursor: "_Cursor", label: str) -> None:
    if cursor.take(4) != MAGIC:
        raise cursor.fail("does not begin with GGUF")
    version = cursor.scalar("I")
    if version not in (2, 3):
        kind = "big-endian" if version and version & 0xFFFF == 0 else f"version {version}"
        raise UnsupportedModelError(f"{label} is GGUF, but {kind}; expected version 2 or 3.")


def _value(cursor: "_Cursor", key: str) -> Any:
    kind = cursor.scalar("I")
    if kind == _STRING:
        return cursor.string()
    if kind == _ARRAY:
        return _array(cursor, key)
    return cursor.scalar(_format(cursor, kind, key))


def _array(cursor: "_Cursor", key: str) -> Any:
    kind, count = cursor.scalar("I"), cursor.scalar("Q")
    if kind == _STRING:
        cursor.num_strings += count
        if cursor.num_strings > MAX_STRINGS:
            raise cursor.fail(f"has {count} strings in {key[:80]!r}")
        return [
            string for first in range(0, count, BEAT) for string in cursor.strings(first, count)
        ]
    item = np.dtype("<" + _format(cursor, kind, key))
    return np.frombuffer(cursor.take(count * item.itemsize), item).copy()


def _format(cursor: "_Cursor", kind: int, key: str) -> str:
    if kind not in _SCALARS:
        raise cursor.fail(f"has a value of type {kind} in {key[:80]!r}")
    return _SCALARS[kind]


def _tensor(cursor: "_Cursor") -> TensorEntry:
    name = cursor.string()
    num_dims = cursor.scalar("I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.fail(f"says that {name[:80]!r} has {num_dims} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
    kind, offset = cursor.scalar("I"), cursor.scalar("Q")
    if kind not in TYPES:
        raise UnsupportedModelError(
            f"Tensor {name[:80]!r} of {cursor.label} has the type {kind}, which is not known."
        )
    block = TYPES[kind]
    if not all(0 < size < 2**31 for size in shape) or shape[-1] % block.num_values:
        raise cursor.fail(f"says that {name[:80]!r} has shape {shape} of {block.name}")
    num_blocks = 1
    for size in shape:
        num_blocks *= size
    num_bytes = num_blocks // block.num_values * block.num_bytes
    return TensorEntry(name, block, shape, offset, num_bytes)


def _checked(
    tensors: list[TensorEntry], start: int, alignment: int, cursor: "_Cursor"
) -> tuple[TensorEntry, ...]:
    """In the order of their bytes: inside the file, aligned, apart, each name once."""
    if len({entry.name for entry in tensors}) != len(tensors):
        raise cursor.fail("has two tensors of one name")
    position = 0
    ordered = sorted(tensors, key=lambda entry: entry.offset)
    for entry in ordered:
        if entry.offset % alignment or entry.offset < position:
            raise cursor.fail(f"has {entry.name[:80]!r} at byte {entry.offset} of its data")
        position = entry.offset + entry.num_bytes
    if ordered and start + position > cursor.file_bytes:
        raise cursor.fail(
            f"has {cursor.file_bytes} bytes, but its tensors end at {start + position}: "
            "truncated; download it again"
        )
    return tuple(ordered)


class _Cursor:
    def __init__(self, data: memoryview, label: str) -> None:
        self._data = data
        self.file_bytes = len(data)
        self.label = label
        self.position = 0
        self.num_strings = 0
        self.beat: Callable[[], None] = lambda: None  # says that reading goes on

    def take(self, count: int) -> memoryview:
        end = self.position + count
        if end > min(self.file_bytes, MAX_HEADER_BYTES):
            raise self.fail(
                f"goes on for {count} bytes at byte {self.position}, and the file has "
                f"{self.file_bytes}: truncated; download it again"
            )
        part = self._data[self.position : end]
        self.position = end
        return part

    def scalar(self, form: str) -> Any:
        """The next number; float32 as the shortest decimal that means it."""
        (value,) = struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))
        return float(str(np.float32(value))) if form == "f" else value

    def string(self) -> str:
        raw = bytes(self.take(int.from_bytes(self.take(8), "little")))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"has a string that is not UTF-8 ({error.reason})") from None

    def strings(self, first: int, count: int) -> list[str]:
        """Read at most BEAT more strings of an array of `count`; `first` have been read."""
        self.beat()
        return [self.string() for _ in range(min(BEAT, count - first))]

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"The header of {self.label} {what}.")
