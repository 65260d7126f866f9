"""Folders of safetensors: which files hold the weights, and their checked headers.

Every header is checked before anything else reads the file. Nothing in a checkpoint is ever run:
pickles are refused, `auto_map` and `model_file` are ignored. Pure Python, no mlx.

The format (github.com/huggingface/safetensors, README "Format"): eight bytes of little-endian
header length, a JSON object of name -> {dtype, shape, data_offsets}, then the data without holes.
"""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ModelNotFoundError
from ..memory import raise_file_limit
from .jsonfields import parse_json, read_json

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # as the reference implementation
MAX_DIMS = 8
MAX_FILE_NAME = 255  # characters; file systems refuse to look for a longer one
GIT_LFS = b"version https://git-lfs"  # how a clone without git-lfs says where a large file lies

READERS = 8  # reads under way at once: a solid-state disk answers many
CHUNK_BYTES = 2 << 20  # of one task: few calls, and enough for all readers in one matrix
MAX_VIEWS = 1024  # that one call fills: IOV_MAX of Linux and macOS

# Stacks of experts, or one of them; those that every token goes to are called otherwise.
_OF_EXPERT = re.compile(r"\.(experts|switch_mlp|switch_glu)\.")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies in its file."""

    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]
    start: int  # bytes after the header
    end: int


def read_headers(folder: Path) -> dict[Path, dict[str, TensorInfo]]:
    """The weight files of a checkpoint and what each holds, every header checked.

    Raises:
        ModelNotFoundError: the folder has no safetensors.
        CheckpointError: a broken file, a tensor in two files, or an index that is wrong.
    """
    return _each_once({path: read_header(path) for path in _weight_files(folder)})


def _each_once(headers: dict[Path, dict[str, TensorInfo]]) -> dict[Path, dict[str, TensorInfo]]:
    """The headers, no tensor of which is in two files."""
    owners: dict[str, Path] = {}
    for path, tensors in headers.items():
        for name in tensors:
            if name in owners:
                raise CheckpointError(f"Tensor {name!r} is in {owners[name]} and in {path}.")
            owners[name] = path
    return headers


def _weight_files(folder: Path) -> list[Path]:
    """One file, or what the index lists, or shards without an index: in this order."""
    whole, index = folder / "model.safetensors", folder / INDEX
    if whole.is_file():
        return [whole]
    if index.is_file():
        return _indexed(index)
    paths = sorted(folder.glob("model*.safetensors"))
    if paths:
        return paths
    pickles = [path.name for pattern in _PICKLES for path in folder.glob(pattern)]
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run any code and is "
            "never opened; use a safetensors version of this model."
        )
    raise ModelNotFoundError(f"{folder} has no model.safetensors.")


def _indexed(index: Path) -> list[Path]:
    """The shards that the index names: plain file names in the index's own folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map.")
    names = list(dict.fromkeys(str(name) for name in weight_map.values()))
    for name in names:
        if not name.endswith(".safetensors") or name != Path(name).name or "\\" in name:
            raise CheckpointError(
                f"{index} names the file {name[:200]!r}; expected the name of a .safetensors file "
                "in the same folder."
            )
        if len(name) > MAX_FILE_NAME or not (index.parent / name).is_file():
            raise CheckpointError(
                f"{index} names {name[:200]!r}, which is missing; download it again."
            )
    return [index.parent / name for name in names]


def weights_bytes(folder: Path) -> int:
    """Bytes of the weight files in a folder, each weight once; 0: there are none.

    Beside model*.safetensors, consolidated*.safetensors are the same weights in another layout.
    """
    files = list(folder.glob("*.safetensors"))
    if any(file.name.startswith("model") for file in files):
        files = [file for file in files if not file.name.startswith("consolidated")]
    return sum(file.stat().st_size for file in files)


def expert_bytes(folder: Path) -> int:
    """Bytes of the experts of a mixture in a checkpoint, by their tensors' names.

    Raises:
        CheckpointError, ModelNotFoundError: as of `read_headers`.
    """
    return sum(
        info.end - info.start
        for tensors in read_headers(folder).values()
        for name, info in tensors.items()
        if is_expert(name)
    )


def is_expert(name: str) -> bool:
    """Whether a tensor is a stack of experts that a router chooses from, or one of them."""
    return _OF_EXPERT.search(name) is not None


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, in the order of their bytes.

    Raises:
        CheckpointError: anything at all that is not as the format demands, with file and tensor.
    """
    fd = _opened(path)
    try:
        return _header(fd, path)[0]
    finally:
        os.close(fd)


def _opened(path: Path) -> int:
    """A descriptor of a file that is there."""
    try:
        if path.exists() and not path.is_file():  # a pipe or a device may have no end
            raise CheckpointError(f"{path} is no file.")
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise unreadable(path, error) from error


def _header(fd: int, path: Path) -> tuple[dict[str, TensorInfo], int]:
    """The tensors of an open file, and where its data begins."""
    try:
        size = os.fstat(fd).st_size
        with open(fd, "rb", closefd=False) as file:
            first = file.read(8)
            if first == GIT_LFS[:8]:
                raise CheckpointError(
                    f"{path} is a pointer of git-lfs and not the weights: run `git lfs pull` in "
                    "its folder, or download the model again."
                )
            length = int.from_bytes(first, "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path} has {size} bytes and says that its header has {length}; the file is "
                    "truncated, or no safetensors file."
                )
            header = parse_json(file.read(length), f"the header of {path}")
    except OSError as error:
        raise unreadable(path, error) from error
    metadata = header.pop("__metadata__", None) or {}  # MLX writes null where there is none
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"__metadata__ in {path} is not an object of strings.")
    tensors = {name: _tensor_info(name, entry, path) for name, entry in header.items()}
    return _check_spans(tensors, size - 8 - length, path), 8 + length


def _tensor_info(name: str, entry: Any, path: Path) -> TensorInfo:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, span = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _bad(name, path, f"has dtype {str(dtype)[:40]!r}, which is not known")
    if not _is_integers(shape) or len(shape) > MAX_DIMS or not all(d < 2**31 for d in shape):
        raise _bad(name, path, f"has shape {str(shape)[:60]}")
    if not _is_integers(span) or len(span) != 2:
        raise _bad(name, path, f"has data_offsets {str(span)[:60]}")
    info = TensorInfo(dtype, tuple(shape), *span)
    needed = prod(info.shape) * ITEM_BYTES[dtype]
    if info.end - info.start != needed:
        raise _bad(name, path, f"spans {info.end - info.start} bytes but needs {needed}")
    return info


def _is_integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_spans(
    tensors: dict[str, TensorInfo], data_bytes: int, path: Path
) -> dict[str, TensorInfo]:
    """Tensors must follow each other without overlap or hole, from the first byte to the last."""
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    position = 0
    for name, info in ordered.items():
        if info.start != position:
            raise _bad(name, path, f"starts at byte {info.start}; expected {position}")
        position = info.end
    if position != data_bytes:
        raise CheckpointError(
            f"{path} has {data_bytes} bytes of data, but its tensors end at {position}; the file "
            "is truncated or was appended to."
        )
    return ordered


def _bad(name: str, path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"Tensor {name[:200]!r} of {path} {what}.")


class WeightFile:
    """One file of weights, open for reads at any place from any thread.

    What is read stays the file that was checked, even where another takes its name meanwhile.

    Args:
        path: of the file.
        readers: threads that read.

    Attributes:
        header: its tensors.
        data_start: the first byte behind the header.

    Raises:
        CheckpointError: as of `read_header`.
    """

    def __init__(self, path: Path, readers: "Readers") -> None:
        self._fd = -1
        self._fd = _opened(path)
        self.header, self.data_start = _header(self._fd, path)
        self.path = path
        self.readers = readers

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read_into(self, views: Sequence[memoryview], start: int) -> None:
        """Fill views, one behind the other, with the bytes from `start` on: one read, if it can be.

        Raises:
            CheckpointError: the file ends before, or the disk fails.
        """
        left, done = [view for view in views if len(view)], 0
        while left:
            try:
                count = os.preadv(self._fd, left[:MAX_VIEWS], start + done)
            except OSError as error:
                raise unreadable(self.path, error) from error
            if not count:
                raise CheckpointError(
                    f"{self.path} ends at byte {start + done}, within a tensor: it became shorter "
                    "while it was read. Download it again, and let nothing write to it meanwhile."
                )
            done += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]


def open_weights(folder: Path, readers: "Readers") -> list[WeightFile]:
    """The weight files of a checkpoint, open; errors as of `read_headers`."""
    paths = _weight_files(folder)
    raise_file_limit(len(paths))
    files = [WeightFile(path, readers) for path in paths]
    _each_once({file.path: file.header for file in files})
    return files


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file that follow each other."""

    file: WeightFile
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Destination:
    """Memory, and the spans that are read to it, one behind the other."""

    view: memoryview
    spans: Sequence[Span]

    def places(self) -> Iterator[tuple[Span, memoryview]]:
        """Each span with the part of the memory that is its own."""
        at = 0
        for span in self.spans:
            yield span, self.view[at : at + span.size]
            at += span.size


@dataclass(frozen=True, slots=True)
class _Read:
    """Bytes of a file that follow each other, and the pieces of memory that they are for."""

    file: WeightFile
    start: int
    views: list[memoryview]


def _tasks(destinations: Sequence[Destination]) -> list[list[_Read]]:
    """What is to be read, in tasks of CHUNK_BYTES.

    What lies together in a file is one read, also where it goes to many places: of experts with
    gate and up side by side, the file has all of gate first.
    """
    tasks, room, end = list[list[_Read]](), 0, (-1, 0)
    places = [place for destination in destinations for place in destination.places()]
    for span, view in sorted(places, key=lambda each: (id(each[0].file), each[0].start)):
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


def _read_in_turn(task: Sequence[_Read], _owner: object) -> None:
    """Read; `_owner` has the memory, which so stays while it is written to, whatever is raised."""
    for read in task:
        read.file.read_into(read.views, read.start)


class Readers:
    """Threads that read weights into memory, and what they have not read yet.

    Attributes:
        num_waits: calls of `wait` so far.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(READERS, "mlxinfer-weights")  # ends with the tensors
        self._under_way: list[Future[None]] = []
        self._ahead = False
        self.num_waits = 0

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Within, what is given out may still be under way, and behind it until `wait`."""
        self._ahead = True
        try:
            yield
        finally:
            self._ahead = False

    @property
    def num_started(self) -> int:
        """Reads that nothing has waited for."""
        return len(self._under_way)

    def start(self, destinations: Sequence[Destination], owner: object) -> None:
        """Begin to read, several reads at once, each byte once.

        Args:
            destinations: what is read, and where it goes.
            owner: of that memory; it is held until nothing is written to it.
        """
        for task in _tasks(destinations):
            self._under_way.append(self._pool.submit(_read_in_turn, task, owner))

    def give_out(self) -> None:
        """Wait for all that was started, but not within `ahead`; errors as of `wait`."""
        if not self._ahead:
            self.wait()

    def wait(self, first: int | None = None) -> None:
        """Wait for what was started, or for the `first` reads of it.

        Raises:
            CheckpointError: as of `WeightFile.read_into`, once none of these is under way.
        """
        self.num_waits += 1
        wait(self._under_way[:first])
        ended, self._under_way[:first] = self._under_way[:first], []
        for future in ended:
            future.result()


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """What is raised where the system does not read a file."""
    advice = " Allow the process more of them (`ulimit -n`)." if error.errno == errno.EMFILE else ""
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}.{advice}")
