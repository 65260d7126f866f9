"""Compares what lies on the disk with the source, tensor by tensor.

Headers are parsed again, codes are unpacked by MLX and errors are computed again, independently of
the code that wrote them: a wrong offset, a wrong code or a flipped bit is found.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, ConversionError
from ..models.weights.files import TensorInfo, read_header
from .arrange import ArrangedSource
from .arrays import as_numpy, mx_dtype, widen
from .plan import PlannedTensor, single_name
from .quantise import ErrorStats, compare, dequantised, total
from .read import Packed
from .read.folder import arrays_of
from .read.stored import FLOATS

Progress = Callable[[str, int, int], None]  # step, how far, of how much
TOLERANCE = 1e-3  # between the error that writing found and the one that reading finds
SCALE_LOSS = 2.0**-8  # relative: what bfloat16 would lose of the scale of copied codes
EXACT, SCALES, REQUANTISED, CAST = "exact", "scales rounded", "requantised", "rounded"


Entry = dict[str, Any]
"""One tensor of the report: `name`, `format`, `stored` (in the source), `status`, `num_weights`,
`num_bytes`, `checksums` (CRC-32 of weight, scales and biases), `relative` (root mean square of the
differences over that of the values) and the `largest` difference."""


class ShardReader:
    """Rows of a safetensors file, without holding the rest.

    Args:
        stacks: names of tensors that may lie there expert by expert, and of any others; they are
            read as if they lay in one.
    """

    def __init__(self, path: Path, stacks: Iterable[str] = ()) -> None:
        stored = read_header(path)
        self.tensors, parts = with_stacks(stored, stacks)
        arrays = {array.name: array for array in arrays_of(path, stored)}
        self._parts = {n: [arrays[part] for part in parts.get(n, [n])] for n in self.tensors}

    def rows(self, name: str, rows: slice = slice(None)) -> NDArray[np.generic]:
        """(R, …) rows of a tensor, its leading axes flattened; bfloat16 as uint16."""
        shape, parts = self.tensors[name].shape, self._parts[name]
        width, count = shape[-1] if shape else 1, prod(shape[:-1])
        first, last, _ = rows.indices(count)
        rows_each, blocks = count // len(parts), []
        for number, part in enumerate(parts):
            inside = slice(
                max(first - number * rows_each, 0), min(last - number * rows_each, rows_each)
            )
            if inside.start < inside.stop:
                blocks.append(np.asarray(part.view()).reshape(-1, width)[inside])
        return np.concatenate(blocks)

    def values(self, tensor: PlannedTensor, rows: slice) -> NDArray[np.float32]:
        """(R, in_dims) float32, as MLX unpacks them."""
        arrays = [self.rows(array.name, rows) for array in tensor.arrays]
        wide = [
            widen(part, FLOATS[array.dtype]) if array.dtype in FLOATS else part
            for array, part in zip(tensor.arrays, arrays, strict=True)
        ]
        if tensor.form is None:
            return np.asarray(wide[0], dtype=np.float32)
        weight, scales, *biases = map(mx.array, wide)
        plain = dequantised(weight, scales, biases[0] if biases else None, tensor.form)
        return np.asarray(as_numpy(plain), dtype=np.float32)

    def places(self, name: str) -> list[int]:
        """Where the parts of a tensor begin in the file, in bytes; they have equal sizes."""
        return [part.offset for part in self._parts[name]]

    def checksums(self, tensor: PlannedTensor, block: int) -> list[int]:
        """CRC-32 of each array of a tensor, read `block` numbers at a time."""
        return [self._checksum(array.name, block) for array in tensor.arrays]

    def _checksum(self, name: str, block: int) -> int:
        checksum, shape = 0, self.tensors[name].shape
        step = max(1, block // max(1, shape[-1] if shape else 1))
        for start in range(0, prod(shape[:-1]), step):
            rows = self.rows(name, slice(start, start + step))
            checksum = crc32(rows.reshape(-1).view(np.uint8).data, checksum)
        return checksum


def with_stacks(
    header: Mapping[str, TensorInfo], names: Iterable[str]
) -> tuple[dict[str, TensorInfo], dict[str, list[str]]]:
    """A header as if its stacks were not taken apart, and the parts of each."""
    whole, parts = dict(header), dict[str, list[str]]()
    for name in names:
        singles: list[str] = []
        while name not in header and (single := single_name(name, len(singles))) in header:
            singles.append(str(single))
        if singles:
            first, *_ = [whole.pop(single) for single in singles]
            whole[name], parts[name] = replace(first, shape=(len(singles), *first.shape)), singles
    return whole, parts


def check_shard(
    path: Path,
    planned: Sequence[PlannedTensor],
    arranged: ArrangedSource,
    block: int,
    tell: Callable[[int], None] = lambda _: None,
) -> Iterator[Entry]:
    """Compare every tensor of a finished file with the source.

    `tell`: is called with the number of weights that were compared.
    """
    wanted = {a.name: (a.dtype, a.shape) for tensor in planned for a in tensor.arrays}
    reader = ShardReader(path, wanted)
    shapes = {name: (info.dtype, info.shape) for name, info in reader.tensors.items()}
    if wanted != shapes:
        names = sorted(n for n in wanted | shapes if wanted.get(n) != shapes.get(n))
        raise ConversionError(f"{path} does not contain {names[0]!r} as planned.")
    for tensor in planned:
        if tensor.packed:
            status, error = _check_copy(reader, tensor, arranged, block)
            tell(tensor.output.num_weights)
        else:
            error = total(_errors(reader, tensor, arranged, block, tell))
            lossless = error.largest == 0.0
            status = EXACT if lossless else CAST if tensor.form is None else REQUANTISED
        yield _entry(tensor, status, error, reader.checksums(tensor, block))


def _entry(tensor: PlannedTensor, status: str, error: ErrorStats, checksums: list[int]) -> Entry:
    """Figures are rounded, so that they do not depend on the order of sums."""
    return {
        "name": tensor.output.name,
        "format": tensor.format,
        "stored": tensor.output.stored,
        "status": status,
        "num_weights": tensor.output.num_weights,
        "num_bytes": tensor.num_bytes,
        "checksums": checksums,
        "relative": float(f"{error.relative:.5g}"),
        "largest": float(f"{error.largest:.5g}"),
    }


def _errors(
    reader: ShardReader,
    tensor: PlannedTensor,
    arranged: ArrangedSource,
    block: int,
    tell: Callable[[int], None],
) -> Iterator[ErrorStats]:
    row = 0
    for values in arranged.blocks(tensor.output, block):
        rows = slice(row, row + values.shape[0])
        wanted = np.asarray(as_numpy(values.astype(mx.float32)), dtype=np.float32)
        yield compare(reader.values(tensor, rows), wanted)
        tell(wanted.size)
        row = rows.stop


def _check_copy(
    reader: ShardReader, tensor: PlannedTensor, arranged: ArrangedSource, block: int
) -> tuple[str, ErrorStats]:
    """Codes must be the source's own; scales may be rounded."""
    errors, row, loss = [], 0, ScaleLoss()
    for packed in arranged.packed_blocks(tensor.output, block):
        rows = slice(row, row + prod(packed.scales.shape[:-1]))
        row = rows.stop
        narrowed = loss.narrowed(packed, tensor)
        for array, part in zip(tensor.arrays, narrowed, strict=True):
            written = reader.rows(array.name, rows)
            if not np.array_equal(written, as_numpy(part).reshape(written.shape)):
                raise ConversionError(f"{array.name} differs from the source.")
        errors.append(copy_error(packed, narrowed, tensor))
    loss.check(tensor)
    error = total(errors)
    return SCALES if error.largest else EXACT, error


def copy_error(
    packed: Packed, narrowed: Sequence[mx.array], tensor: PlannedTensor, every: int = 1
) -> ErrorStats:
    """The error of codes with rounded scales, in one row of `every`; 0 where none were rounded."""
    if packed.biases is None or packed.scales.dtype == packed.biases.dtype == narrowed[1].dtype:
        return ErrorStats()
    assert tensor.form is not None
    values = []
    for scales, biases in ((narrowed[1], narrowed[2]), (packed.scales, packed.biases)):
        wide = [part[::every].astype(mx.float32) for part in (scales, biases)]
        plain = as_numpy(dequantised(packed.weight[::every], wide[0], wide[1], tensor.form))
        values.append(np.asarray(plain, np.float32).reshape(-1, plain.shape[-1]))
    error = compare(*values)
    return error if error.largest or every == 1 else copy_error(packed, narrowed, tensor)


@dataclass(slots=True)
class ScaleLoss:
    """The loss from rounding the scales of a tensor, over all of its blocks."""

    largest: float = 0.0  # scale
    lost: float = 0.0  # of a scale, at most, where it is more than a share of that scale

    def narrowed(self, packed: Packed, tensor: PlannedTensor) -> list[mx.array]:
        """The source's own codes, and its scales and biases in the dtype of the plan."""
        if packed.biases is None:  # floating-point scales are kept as they are
            return [packed.weight, packed.scales]
        parts = [packed.weight]
        self.largest = max(self.largest, float(mx.abs(packed.scales).max()))
        for part in (packed.scales, packed.biases):
            rounded = part.astype(mx_dtype(tensor.dtype))
            lost = mx.abs(rounded.astype(mx.float32) - part.astype(mx.float32))
            within = lost <= mx.abs(part) * SCALE_LOSS
            self.lost = max(self.lost, float(mx.where(within, 0, lost).max()))
            parts.append(rounded)
        return parts

    def check(self, tensor: PlannedTensor) -> None:
        """Raise CheckpointError if the dtype is too small for the scales, or they overflow it."""
        if self.lost > self.largest * SCALE_LOSS / 16:
            raise CheckpointError(
                f"The scales of {tensor.output.name} do not fit into {tensor.dtype}. Quantise it "
                f"anew with --set {tensor.output.path}={tensor.format}."
            )


def confirm(entry: Entry, written: ErrorStats, checksums: list[int]) -> None:
    """Whether reading found what was written, and the error that writing left."""
    name, relative = entry["name"], entry["relative"]
    if entry["checksums"] != checksums:
        raise ConversionError(f"{name} on the disk is not what was written: it is damaged.")
    if entry["status"] in (SCALES, EXACT):
        return
    if not abs(relative - written.relative) <= TOLERANCE * max(written.relative, 1e-6):
        raise ConversionError(
            f"{name} was written with an error of {written.relative:.3g}, but has {relative:.3g} "
            "when it is read again: it is damaged."
        )


def as_written(tensor: PlannedTensor, error: ErrorStats, checksums: list[int]) -> Entry:
    """The entry of a tensor that is not read again, with the errors computed when writing."""
    if tensor.form is not None and not tensor.packed:
        return _entry(tensor, REQUANTISED, error, checksums)
    rounded = SCALES if tensor.packed else CAST
    return _entry(tensor, rounded if error.largest else EXACT, error, checksums)
