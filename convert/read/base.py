"""A Source made of readers: what all formats have in common. Knows no format."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from .reader import Reader, bounded
from .source import Packed, TensorInfo
from .stored import Files


class DroppableFiles(Files, Protocol):
    """Files of which those that were fetched can be given back."""

    def drop(self, file: str) -> None:
        """The file will not be read again."""
        ...

    def close(self) -> None:
        """No file will."""
        ...


class LocalFiles:
    """Files that are on this disk and stay there."""

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
    ) -> None:
        if not readers:
            raise CheckpointError(f"{label} has no tensors.")
        self.label = label
        self.format = format
        self.config = config
        self.dtype = dtype
        self.fingerprint = fingerprint
        self.notes = notes
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
            return reader.packed()

    def forget(self, names: Iterable[str]) -> None:
        """See Source."""
        for name in names:
            for part in self._reader(name).parts:
                waiting = self._wanted[part.file]
                waiting.discard(name)
                if not waiting:
                    self._files.drop(part.file)

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
