"""Folders of safetensors: which files hold the weights, their headers, and reads at any place.

Nothing in a checkpoint is ever run: pickles are refused, `auto_map` and `model_file` are ignored.
The `safetensors` package reads and checks headers. It would read tensors one after the other, into
memory of its own. Here several threads read into memory that they are given. No mlx.
"""

import errno
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ...errors import CheckpointError, ModelNotFoundError
from ...files import other_build
from ...memory import raise_file_limit
from ..jsonfields import read_json

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # of the package
MAX_DIMS = 8
MAX_FILE_NAME = 255  # characters; file systems refuse to look for a longer one
GIT_LFS = b"version "  # a clone without git-lfs has text in place of a large file

READERS = 8  # reads under way at once: a solid-state disk answers many
MAX_VIEWS = 1024  # that one call fills: IOV_MAX of Linux and macOS

# Stacks of experts, or one of them; those that every token goes to are called otherwise.
_OF_EXPERT = re.compile(
    r"\.(experts|switch_mlp|switch_glu)\."
    r"|\.moe\.(gate|up|down)_proj\.|\.block_sparse_moe\.(in|out)put_linear\."
)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

NUMPY = {  # dtypes of safetensors -> as numpy can hold their bytes
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "|u1",
    "F8_E5M2": "|u1",
    "F8_E8M0": "|u1",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
    "BOOL": "|u1",
}
ITEM_BYTES = {name: int(code[-1]) for name, code in NUMPY.items()}


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
    """The headers, after a check that no tensor is in two files."""
    owners: dict[str, Path] = {}
    for path, tensors in headers.items():
        for name in tensors:
            if name in owners:
                raise CheckpointError(f"Tensor {name!r} is in {owners[name]} and in {path}.")
            owners[name] = path
    return headers


def _weight_files(folder: Path) -> list[Path]:
    """The files that are there decide.

    What an index lists, if all of it is there; else one file; else the one set of shards that is
    complete, whose index is that of another build; else shards without an index.
    """
    whole, index = folder / "model.safetensors", folder / INDEX
    indexed = index.is_file()
    if whole.is_file():
        return _indexed(index) if indexed and _is_here(index) else [whole]
    if indexed and not _is_here(index):
        present = [path.name for path in folder.glob("*.safetensors") if path.is_file()]
        if shards := other_build(_listed(index), present):
            return [folder / name for name in shards]
    if indexed:
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


def _listed(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map.")
    return list(dict.fromkeys(str(name) for name in weight_map.values()))


def _is_here(index: Path) -> bool:
    try:
        return bool(_indexed(index))
    except CheckpointError:
        return False


def _indexed(index: Path) -> list[Path]:
    names = _listed(index)
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


def expert_bytes(folder: Path) -> int:
    """Bytes of the experts of a mixture in a checkpoint, by their tensors' names."""
    return _bytes_of(folder, is_expert)


def row_table_bytes(folder: Path) -> int:
    """Bytes of tables of n-grams, which stay in their files."""
    config = folder / "config.json"
    if not config.is_file() or b"ple_layer_ids" not in config.read_bytes():
        return 0
    return _bytes_of(folder, is_row_table)


def _bytes_of(folder: Path, wanted: Callable[[str], bool]) -> int:
    return sum(
        info.end - info.start
        for tensors in read_headers(folder).values()
        for name, info in tensors.items()
        if wanted(name)
    )


def is_row_table(name: str) -> bool:
    return ".ple_embedding.ngram_embedding." in name


def is_expert(name: str) -> bool:
    return _OF_EXPERT.search(name) is not None


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, in the order of their bytes."""
    return _header(path)[0]


def _header(path: Path) -> tuple[dict[str, TensorInfo], int]:
    try:
        if path.exists() and not path.is_file():  # a pipe or a device may have no end
            raise CheckpointError(f"{path} is no file.")
        with path.open("rb") as file:
            first = file.read(8)
        if first == GIT_LFS:
            raise CheckpointError(
                f"{path} is a pointer of git-lfs and not the weights: run `git lfs pull` in its "
                "folder, or download the model again."
            )
        with safe_open(path, "np") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
            stored = [(name, one.get_dtype(), tuple(one.get_shape())) for name, one in slices]
    except OSError as error:
        raise unreadable(path, error) from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is truncated, or no safetensors file ({error}): download it again."
        ) from error
    tensors, end = {}, 0
    for name, dtype, shape in stored:  # in the order of their bytes, which have no holes
        if dtype not in ITEM_BYTES:
            raise _bad(name, path, f"has dtype {dtype}, which is not known")
        if len(shape) > MAX_DIMS or not all(size < 2**31 for size in shape):
            raise _bad(name, path, f"has shape {str(shape)[:60]}")
        start, end = end, end + prod(shape) * ITEM_BYTES[dtype]
        tensors[name] = TensorInfo(dtype, shape, start, end)
    return tensors, 8 + int.from_bytes(first, "little")


def _bad(name: str, path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"Tensor {name[:200]!r} of {path} {what}.")


class WeightFile:
    """One file of weights, open for reads at any place from any thread.

    Reads keep to the file that was opened, even if another file takes its name.

    Raises:
        CheckpointError: see `read_header`; or the file was replaced while it was opened.
    """

    def __init__(self, path: Path, pool: ThreadPoolExecutor) -> None:
        self._fd = -1
        self.path = path
        self.pool = pool
        try:
            named = path.stat()
            self.header, self.data_start = _header(path)
            self._fd = os.open(path, os.O_RDONLY)
            opened = os.fstat(self._fd)
        except OSError as error:
            raise unreadable(path, error) from error
        end = max((info.end for info in self.header.values()), default=0)
        if not os.path.samestat(named, opened) or opened.st_size != self.data_start + end:
            raise CheckpointError(f"{path} was replaced while it was opened; load it again.")

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read_into(self, views: Sequence[memoryview], start: int) -> None:
        """Fill views, one behind the other, from `start` on: in one read, if it can be."""
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


def open_weights(folder: Path) -> list[WeightFile]:
    """The weight files of a checkpoint, open; raises what `read_headers` raises."""
    paths = _weight_files(folder)
    raise_file_limit(len(paths))
    pool = new_pool()
    files = [WeightFile(path, pool) for path in paths]
    _each_once({file.path: file.header for file in files})
    return files


def new_pool() -> ThreadPoolExecutor:
    """Threads that read; they end when the last file that has them is closed."""
    return ThreadPoolExecutor(READERS, "mlxinfer-weights")


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file that follow each other."""

    file: WeightFile
    start: int
    size: int


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error to raise for a file that the system does not read."""
    advice = " Allow the process more of them (`ulimit -n`)." if error.errno == errno.EMFILE else ""
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}.{advice}")
