"""safetensors headers, checked before anything else reads the file. Pure Python, no mlx.

The format (github.com/huggingface/safetensors, README "Format"): eight bytes of little-endian
header length, a JSON object of name -> {dtype, shape, data_offsets}, then the data without holes.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .jsonfields import parse_json

MAX_HEADER_BYTES = 100_000_000  # as the reference implementation
MAX_DIMS = 8
GIT_LFS = b"version https://git-lfs"  # how a clone without git-lfs says where a large file lies

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


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, in the order of their bytes.

    Raises:
        CheckpointError: anything at all that is not as the format demands, with file and tensor.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a device may have no end
            raise CheckpointError(f"{path} is no file.")
        size = path.stat().st_size
        with path.open("rb") as file:
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
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    metadata = header.pop("__metadata__", None) or {}  # MLX writes null where there is none
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"__metadata__ in {path} is not an object of strings.")
    tensors = {name: _tensor_info(name, entry, path) for name, entry in header.items()}
    return _check_spans(tensors, size - 8 - length, path)


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
