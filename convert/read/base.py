"""Readers of single tensors, and the Source that is made of them. Independent of the format."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ..arrays import as_numpy
from .origin import Origin
from .source import MLXFormat, Packed, TensorInfo
from .stored import FLOATS, Files, StoredArray, to_mlx


class Reader(Protocol):
    """One tensor, whatever it is made of."""

    @property
    def info(self) -> TensorInfo:
        """What is known without reading it."""
        ...

    @property
    def parts(self) -> Sequence[StoredArray]:
        """The arrays that it is made of; the first decides its place in the order."""
        ...

    def read(self, rows: slice) -> mx.array:
        """Values of a range of the first axis; bounds are within it, the step is 1."""
        ...

    def packed(self) -> Packed:
        """As TensorInfo.lossless says."""
        ...


def bounded(rows: slice | None, length: int, name: str) -> slice:
    """`rows` as a slice from start to stop within an axis of `length`.

    Raises:
        ValueError: a step other than 1.
    """
    start, stop, step = (rows or slice(None)).indices(length)
    if step != 1:
        raise ValueError(f"rows of {name} come with step {step}; expected 1")
    return slice(start, max(start, stop))


class DenseReader:
    """Values as they are stored."""

    def __init__(self, name: str, array: StoredArray) -> None:
        dtype = FLOATS.get(array.dtype)
        if dtype is None:
            raise array.fail(f"is {array.dtype}; expected {' or '.join(FLOATS)}")
        self.parts = (array,)
        self.info = TensorInfo(name, array.shape, dtype, array.dtype.lower(), array.num_bytes)

    def read(self, rows: slice) -> mx.array:
        """As stored."""
        (array,) = self.parts
        return to_mlx(array.view(rows) if array.shape else array.view(), array.dtype)

    def packed(self) -> Packed:
        """Raise: dense values have no codes."""
        raise not_packed(self.info)


def not_packed(info: TensorInfo) -> CheckpointError:
    """What read_packed() raises for a tensor without a lossless format."""
    return CheckpointError(
        f"{info.name} is stored as {info.stored}, which no MLX format holds; read its values."
    )


Leaves = dict[str, StoredArray]
Claim = Callable[[str, Leaves], Iterable[Reader]]
"""Takes what it knows out of the leaves of the module at a path, and returns readers of it."""


_OVERFLOW = {"mxfp4": 253, "mxfp8": 246, "nvfp4": 127}  # scale bytes from which code x scale may


class DroppableFiles(Files, Protocol):
    """Files of which those that were fetched can be given back."""

    def drop(self, file: str) -> None:
        """The file will not be read again."""
        ...

    def close(self) -> None:
        """No file will."""
        ...


class LocalFiles:
    """Local files, which are never deleted."""

    def __init__(self, sizes: Mapping[str, int], folder: Path) -> None:
        self._sizes = sizes
        self._folder = folder

    def path(self, file: str) -> Path:
        """Where the file is."""
        return self._folder / file

    def size(self, file: str) -> int:
        """Bytes."""
        return self._sizes[file]

    def drop(self, file: str) -> None:
        """The user's files are never deleted."""

    def close(self) -> None:
        """Nothing was borrowed."""


class ReaderSource:
    """Implements Source."""

    def __init__(
        self,
        *,
        label: str,
        format: str,
        config: Mapping[str, Any],
        dtype: str,
        readers: Mapping[str, Reader],
        files: DroppableFiles,
        side_files: Callable[[], Mapping[str, bytes | Path]],
        fingerprint: str,
        notes: tuple[str, ...] = (),
        origin: Callable[[], Origin] = Origin,
    ) -> None:
        if not readers:
            raise CheckpointError(f"{label} has no tensors.")
        self.label = label
        self.format = format
        self.config = config
        self.dtype = dtype
        self.fingerprint = fingerprint
        self.notes = notes
        self._origin = origin
        self.tensors = MappingProxyType({name: reader.info for name, reader in readers.items()})
        self._readers = readers
        self._files = files
        self._side_files = side_files
        self._wanted: dict[str, set[str]] = {}  # file -> the tensors still to be read from it
        for name, reader in readers.items():
            for part in reader.parts:
                self._wanted.setdefault(part.file, set()).add(name)

    def read(self, name: str, rows: slice | None = None) -> mx.array:
        """See Source."""
        reader = self._reader(name)
        shape = reader.info.shape
        with np.errstate(all="ignore"):  # a damaged scale is an infinite value, not a warning
            return reader.read(bounded(rows, shape[0], name) if shape else slice(None))

    def read_packed(self, name: str) -> Packed:
        """See Source."""
        reader = self._reader(name)
        with np.errstate(all="ignore"):
            packed = reader.packed()
            if may_overflow(packed, reader.info.lossless) and not _is_finite(reader):
                raise CheckpointError(f"{name} holds NaN or infinity: the checkpoint is damaged.")
        return packed

    def forget(self, names: Iterable[str]) -> None:
        """See Source."""
        for name in names:
            for part in self._reader(name).parts:
                waiting = self._wanted[part.file]
                waiting.discard(name)
                if not waiting:
                    self._files.drop(part.file)

    @property
    def origin(self) -> Origin:
        """See Source."""
        return self._origin()

    def side_files(self) -> dict[str, bytes | Path]:
        """See Source."""
        return dict(self._side_files())

    def close(self) -> None:
        """See Source."""
        self._files.close()

    def _reader(self, name: str) -> Reader:
        if name not in self._readers:
            raise CheckpointError(f"{self.label} has no tensor {name!r}.")
        return self._readers[name]


def may_overflow(packed: Packed, form: MLXFormat | None) -> bool:
    """Whether some product of code and scale may be infinite or NaN, by the bytes alone.

    Affine scales are checked where they are read. E8M0 has NaN (255), and its largest powers
    overflow float32 with the largest codes; E4M3 has NaN (0x7F, either sign) and no infinity.
    """
    if form is None or form.mode not in _OVERFLOW:
        return False
    scales = np.asarray(as_numpy(packed.scales), np.uint8)
    if form.mode == "nvfp4":
        return bool(((scales & 0x7F) == 0x7F).any())
    if bool((scales >= _OVERFLOW[form.mode]).any()):
        return True
    codes = as_numpy(packed.weight).reshape(-1).view(np.uint8)
    return form.mode == "mxfp8" and bool(((codes & 0x7F) == 0x7F).any())


def _is_finite(reader: Reader) -> bool:
    """Whether all values of a tensor are finite, a part of the first axis at a time."""
    length = reader.info.shape[0]
    step = max(1, length // 8)
    parts = (slice(start, min(start + step, length)) for start in range(0, length, step))
    return all(bool(mx.isfinite(reader.read(rows)).all()) for rows in parts)


def majority_dtype(config: Mapping[str, Any], infos: Iterable[TensorInfo], default: str) -> str:
    """The dtype that the config states, or that most dense numbers have."""
    known = ("bfloat16", "float16", "float32")
    text = config.get("text_config")
    for stated in (config, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if stated.get(key) in known:
                return str(stated[key])
    sizes = dict.fromkeys(known, 0)
    for info in infos:
        if info.lossless is None and info.stored in ("bf16", "f16", "f32"):
            sizes[info.dtype] += info.stored_bytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if any(sizes.values()) else default
