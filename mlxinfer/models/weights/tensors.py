"""Tensors in files of safetensors, read into MLX's memory; the dtype that a model computes in.

A `FileTensor` is an array that lies in files in one piece or several, and is not read yet. Matrices
that become one are joined before they are read, so each byte goes from the file to its place.
`mx.load` reads one tensor after the other, and joining its arrays copies them. From the system's
cache that took 1.2 to 1.4 times as long. If each expert is a tensor of its own, it took 2.8 times
as long and a quarter more memory (600 MB of bfloat16 and the same at 4 bits, on Linux, in one run).
"""

import json
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock
from typing import TypeGuard

import mlx.core as mx

from ...errors import CheckpointError, wrong_value
from .files import Span, TensorInfo, WeightFile, new_pool, open_weights

CHUNK_BYTES = 2 << 20  # of one task: few calls, and enough for all threads in one matrix
SMALL_BYTES = 64 << 10  # writing these zeros takes less time than a thread of MLX takes to answer
WAKE_S = 0.1  # between two looks at Ctrl-C
LEAVE_S = 1.0  # that MLX's threads may take to leave what they have read
_OF_PACKED = (".scales", ".biases")
FLOATS = {mx.float32: "float32", mx.bfloat16: "bfloat16", mx.float16: "float16"}
_DTYPES = {name: dtype for dtype, name in FLOATS.items()}
STORED = {  # dtypes of safetensors -> of MLX
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "I64": mx.int64,
    "I32": mx.int32,
    "I16": mx.int16,
    "I8": mx.int8,
    "U64": mx.uint64,
    "U32": mx.uint32,
    "U16": mx.uint16,
    "U8": mx.uint8,
    "F8_E4M3": mx.uint8,
    "F8_E5M2": mx.uint8,
    "F8_E8M0": mx.uint8,
    "BOOL": mx.bool_,
}


class FileTensor:
    """An array that lies in files.

    Args:
        stored: its dtype there, a key of ITEM_BYTES.
        spans: its bytes, row by row.

    Attributes:
        array: its numbers, once they are read.

    Raises:
        CheckpointError: MLX has no such dtype.
    """

    __slots__ = ("array", "dtype", "shape", "spans", "stored")

    def __init__(self, stored: str, shape: tuple[int, ...], spans: Sequence[Span]) -> None:
        if stored not in STORED:
            where = spans[0].file.path
            raise CheckpointError(f"{where} holds a tensor of {stored}, which MLX has not.")
        self.stored = stored
        self.dtype = STORED[stored]
        self.shape = shape
        self.spans = spans
        self.array: mx.array | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.size

    def read(self) -> mx.array:
        """Read the array, once; every call returns the same one."""
        (array,) = read_together([self])
        return array

    def cut(self, axis: int, start: int, stop: int) -> "FileTensor":
        """Return the part at [start, stop) of an axis, not read."""
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        row = prod(self.shape[axis + 1 :]) * self.dtype.size
        blocks = _blocks(self.spans, prod(self.shape[:axis]))
        spans = [span for block in blocks for span in _between(block, start * row, stop * row)]
        return FileTensor(self.stored, shape, spans)

    def rows(self) -> list[list[Span]]:
        return _blocks(self.spans, self.shape[0])


Tensor = mx.array | FileTensor


def load_tensors(folder: Path) -> dict[str, FileTensor]:
    """Every tensor of a checkpoint, by name. No data is read.

    Raises:
        CheckpointError: a file that is broken.
        ModelNotFoundError: there is none.
    """
    return _by_name(open_weights(folder))


def file_tensors(path: Path) -> dict[str, FileTensor]:
    """Every tensor of one file of safetensors, by name. No data is read."""
    return _by_name([WeightFile(path, new_pool())])


def _by_name(files: Sequence[WeightFile]) -> dict[str, FileTensor]:
    return {name: _stored(info, file) for file in files for name, info in file.header.items()}


def _stored(info: TensorInfo, file: WeightFile) -> FileTensor:
    span = Span(file, file.data_start + info.start, info.end - info.start)
    return FileTensor(info.dtype, info.shape, [span])


def loaded(tensor: Tensor) -> mx.array:
    """Return the array; it is read if it is in a file."""
    return tensor.read() if isinstance(tensor, FileTensor) else tensor


def cast(tensor: Tensor, dtype: mx.Dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else loaded(tensor).astype(dtype)


def side_by_side(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Join arrays along an axis, counted from the end; nothing is read if all are in files."""
    if not _unread(parts):
        return mx.concatenate([loaded(part) for part in parts], axis=axis)
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    blocks = [_blocks(part.spans, prod(shape[:axis])) for part in parts]
    spans = [span for row in zip(*blocks, strict=True) for block in row for span in block]
    return FileTensor(parts[0].stored, tuple(shape), spans)


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Stack arrays along a new first axis; nothing is read if all are in files."""
    if not _unread(parts):
        return mx.stack([loaded(part) for part in parts])
    spans = [span for part in parts for span in part.spans]
    return FileTensor(parts[0].stored, (len(parts), *parts[0].shape), spans)


def _unread(parts: Sequence[Tensor]) -> TypeGuard[Sequence[FileTensor]]:
    unread = [part for part in parts if isinstance(part, FileTensor) and part.array is None]
    return (
        len({id(part) for part in unread}) == len(parts)
        and len({part.stored for part in unread}) == 1
    )


def _blocks(spans: Sequence[Span], count: int) -> list[list[Span]]:
    """Divide spans into `count` runs of equally many bytes."""
    if count == 1:
        return [list(spans)]
    if len(spans) == count and len({span.size for span in spans}) == 1:
        return [[span] for span in spans]
    size = sum(span.size for span in spans) // count
    return [_between(spans, i * size, (i + 1) * size) for i in range(count)]


def _between(spans: Sequence[Span], start: int, stop: int) -> list[Span]:
    """Return the bytes at [start, stop) of all spans one behind the other."""
    cut, at = [], 0
    for span in spans:
        first, last = max(start - at, 0), min(stop - at, span.size)
        if first < last:
            cut.append(Span(span.file, span.start + first, last - first))
        at += span.size
    return cut


def read_together(tensors: Sequence[Tensor]) -> list[mx.array]:
    """Return arrays. Tensors in files are read in parallel."""
    new = [one for one in tensors if isinstance(one, FileTensor) and one.array is None]
    if new:
        made = _allocated(new)
        _read([(tensor.spans, view) for tensor, (_, view) in zip(new, made, strict=True)], made)
        for tensor, (array, _) in zip(new, made, strict=True):
            tensor.array = array
    return [_array_of(one) for one in tensors]


def _array_of(tensor: Tensor) -> mx.array:
    array = tensor.array if isinstance(tensor, FileTensor) else tensor
    assert array is not None
    return array


@dataclass(frozen=True, slots=True)
class _Read:
    """Bytes of a file that follow each other, and the pieces of memory that they go to."""

    file: WeightFile
    start: int
    views: list[memoryview]


def _read(destinations: Sequence[tuple[Sequence[Span], memoryview]], owner: object) -> None:
    """Read each destination's spans to its memory, one behind the other; several reads at once.

    Args:
        destinations: spans, and the memory that they fill.
    """

    def run(task: Sequence[_Read], _owner: object) -> None:
        """A task holds the memory that it writes to: an interrupted caller may let go of it."""
        for read in task:
            read.file.read_into(read.views, read.start)

    tasks = _tasks(destinations)
    futures = [task[0].file.pool.submit(run, task, owner) for task in tasks]
    try:
        for future in futures:
            while not wait([future], WAKE_S).done:
                pass  # a signal that came just before this thread slept is handled now
            future.result()
    finally:
        for future in futures:
            future.cancel()


def _tasks(destinations: Sequence[tuple[Sequence[Span], memoryview]]) -> list[list[_Read]]:
    """The reads, in tasks of CHUNK_BYTES.

    Bytes that lie together in a file are one read, even if they go to many pieces of memory: of
    experts with gate and up side by side, the file has all of gate first.
    """
    pieces = []
    for spans, view in destinations:
        at = 0
        for span in spans:
            pieces.append((span, view[at : at + span.size]))
            at += span.size
    tasks, room, end = list[list[_Read]](), 0, (-1, 0)
    for span, view in sorted(pieces, key=lambda piece: (id(piece[0].file), piece[0].start)):
        first = 0
        while first < span.size:
            if not room:
                tasks.append([])
                room, end = CHUNK_BYTES, (-1, 0)
            size, start = min(room, span.size - first), span.start + first
            if end != (id(span.file), start):
                tasks[-1].append(_Read(span.file, start, []))
            tasks[-1][-1].views.append(view[first : first + size])
            first, room, end = first + size, room - size, (id(span.file), start + size)
    return tasks


def _allocated(tensors: Sequence[FileTensor]) -> list[tuple[mx.array, memoryview]]:
    large = [tensor for tensor in tensors if tensor.nbytes > SMALL_BYTES]
    unwritten = iter(_unwritten(large) if large else [])
    return [next(unwritten) if t.nbytes > SMALL_BYTES else _zeros(t) for t in tensors]


def _zeros(tensor: FileTensor) -> tuple[mx.array, memoryview]:
    memory = mx.zeros((tensor.nbytes,), mx.uint8)
    mx.eval(memory)
    view = memoryview(memory)  # type: ignore[arg-type]  # it is a buffer
    return memory.view(tensor.dtype).reshape(tensor.shape), view


def _unwritten(tensors: Sequence[FileTensor]) -> list[tuple[mx.array, memoryview]]:
    """Make arrays without writing to their memory.

    MLX leaves memory unwritten only for arrays that it loads. So it loads a file that is
    empty (`mx.zeros` and a read took twice as long as the read).
    """
    source, left = _Source(tensors), Lock()
    views = source.views
    left.acquire()
    weakref.finalize(source, left.release)
    try:
        arrays = mx.load(source, format="safetensors")  # type: ignore[arg-type]  # enough for it
    finally:
        # A thread of MLX lets go of `source` a moment later, and needs Python for it: a process
        # that ended meanwhile would be aborted.
        del source
        left.acquire(timeout=LEAVE_S)
    assert isinstance(arrays, dict)
    return [(arrays[f"{number}"], view) for number, view in sorted(views.items())]


class _Source:
    """A file of tensors, as MLX reads it: `readinto` gets the memory of each array itself."""

    name, closed = "weights.safetensors", False

    def __init__(self, tensors: Sequence[FileTensor]) -> None:
        entries, end = {}, 0
        self.views: dict[int, memoryview] = {}
        self._numbers: dict[int, int] = {}  # of tensors, by their first byte behind the header
        for number, tensor in enumerate(tensors):
            self._numbers[end] = number
            dtype = "U8" if tensor.stored.startswith("F8_") else tensor.stored
            offsets = [end, end := end + tensor.nbytes]
            entries[f"{number}"] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": offsets}
        header = json.dumps(entries).encode()
        self._head = len(header).to_bytes(8, "little") + header
        self._end = len(self._head) + end
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the position: from the beginning, or from the end if `whence` is 2."""
        self._at = offset + (self._end if whence == 2 else self._at if whence == 1 else 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, view: memoryview) -> int:
        if self._at < len(self._head):
            view[:] = self._head[self._at : self._at + len(view)]
        else:
            self.views[self._numbers[self._at - len(self._head)]] = view.cast("B")
        self._at += len(view)
        return len(view)


def choose_dtype(
    tensors: Mapping[str, Tensor], dtype: str, *, fits_float16: bool = True
) -> mx.Dtype:
    """The dtype of activations: as requested, or the checkpoint's own; float32 on the CPU.

    The checkpoint's own is that of most tensors but scales and biases of quantised matrices, which
    may be narrower than what they were made from. Vectors in float32 alone make no model wide.

    Args:
        dtype: "auto", or one of MLX's.
        fits_float16: whether activations stay below 65,504; else "auto" takes bfloat16 instead.
    """
    if dtype != "auto":
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise wrong_value("dtype", dtype, f"auto, {', '.join(_DTYPES)}")
        return _DTYPES[dtype]
    if not mx.metal.is_available():
        return mx.float32
    floats = {name: t for name, t in tensors.items() if t.dtype in FLOATS}
    packed = [t.dtype for name, t in floats.items() if name.endswith(_OF_PACKED)]
    weights = [t for name, t in floats.items() if not name.endswith(_OF_PACKED)]
    chosen = _most([t.dtype for t in weights] or packed)
    if chosen == mx.float32 and packed and all(t.ndim < 2 for t in weights):
        chosen = _most(packed)
    return mx.bfloat16 if chosen == mx.float16 and not fits_float16 else chosen


def _most(dtypes: Sequence[mx.Dtype]) -> mx.Dtype:
    return Counter(dtypes).most_common(1)[0][0] if dtypes else mx.float32
