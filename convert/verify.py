"""Compares what lies on the disk with the source, tensor by tensor.

Headers are parsed again, codes are unpacked by MLX and errors are computed again, independently of
the code that wrote them: a wrong offset, a wrong code or a flipped bit is found.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
from .read.stored import FLOATS, NUMPY

Progress = Callable[[str, int, int], None]  # step, how far, of how much
TOLERANCE = 1e-3  # between the error that writing found and the one that reading finds
EXACT, SCALES, REQUANTISED, CAST = "exact", "scales rounded", "requantised", "rounded"


@dataclass(frozen=True, slots=True)
class CheckedTensor:
    """One tensor, as it was found on the disk."""

    name: str
    format: str
    stored: str  # in the source
    status: str
    num_weights: int
    num_bytes: int
    checksums: list[int]  # CRC-32 of weight, scales and biases
    relative: float  # root mean square of the differences over that of the values
    largest: float  # difference

    def as_dict(self) -> dict[str, Any]:
        """For JSON; figures are rounded, so that they do not depend on the order of sums."""
        figures = {key: float(f"{getattr(self, key):.5g}") for key in ("relative", "largest")}
        return {field.name: getattr(self, field.name) for field in fields(self)} | figures


class ShardReader:
    """Rows of a safetensors file, without holding the rest.

    Args:
        path: of the file.
        stacks: names of tensors that may lie there expert by expert, and of any others; they are
            read as if they lay in one.
    """

    def __init__(self, path: Path, stacks: Iterable[str] = ()) -> None:
        self.path = path
        self._stored = read_header(path)
        self.tensors, self._parts = with_stacks(self._stored, stacks)
        with path.open("rb") as file:
            self._start = 8 + int.from_bytes(file.read(8), "little")

    def rows(self, name: str, rows: slice | None = None) -> NDArray[np.generic]:
        """(R, …) rows of a tensor, its leading axes flattened; bfloat16 as uint16."""
        info = self._info(name)
        width = info.shape[-1] if info.shape else 1
        dtype = np.dtype(NUMPY[info.dtype])
        count = prod(info.shape[:-1])
        first, last = (rows.start, min(rows.stop, count)) if rows else (0, count)
        if parts := self._parts.get(name):
            each = count // len(parts)
            spans = [slice(max(first - i * each, 0), last - i * each) for i in range(len(parts))]
            joined = [
                self.rows(part, span)
                for part, span in zip(parts, spans, strict=True)
                if span.start < min(span.stop, each)
            ]
            return np.concatenate(joined)
        offset = self._start + info.start + first * width * dtype.itemsize
        found = np.fromfile(self.path, dtype, (last - first) * width, offset=offset)
        return found.reshape(-1, width)

    def values(self, tensor: PlannedTensor, rows: slice) -> NDArray[np.float32]:
        """(R, in_dims) float32, as MLX unpacks them."""
        output, form = tensor.output, tensor.form
        if form is None:
            info = self._info(output.name)
            return widen(self.rows(output.name, rows), FLOATS[info.dtype])
        weight, scales, *biases = (self._array(array.name, rows) for array in tensor.arrays)
        plain = dequantised(weight, scales, biases[0] if biases else None, form)
        return np.asarray(as_numpy(plain), dtype=np.float32)

    def places(self, name: str) -> list[int]:
        """Where the parts of a tensor begin in the file, in bytes; they have equal sizes."""
        parts = self._parts.get(name, [name])
        return [self._start + self._stored[part].start for part in parts]

    def checksums(self, tensor: PlannedTensor, block: int) -> list[int]:
        """CRC-32 of each array of a tensor, read `block` numbers at a time."""
        return [self._checksum(array.name, block) for array in tensor.arrays]

    def _checksum(self, name: str, block: int) -> int:
        found, shape = 0, self._info(name).shape
        count, width = prod(shape[:-1]), shape[-1] if shape else 1
        step = max(1, block // max(1, width))
        for start in range(0, count, step):
            rows = self.rows(name, slice(start, start + step))
            found = crc32(rows.reshape(-1).view(np.uint8).data, found)
        return found

    def _array(self, name: str, rows: slice) -> mx.array:
        info, raw = self._info(name), self.rows(name, rows)
        if info.dtype in FLOATS:
            return mx.array(widen(raw, FLOATS[info.dtype]))
        return mx.array(raw)

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name) or self._stored.get(name)
        if info is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}.")
        return info


def with_stacks(
    header: Mapping[str, TensorInfo], names: Iterable[str]
) -> tuple[dict[str, TensorInfo], dict[str, list[str]]]:
    """A header as if its stacks were not taken apart, and the parts of each.

    Raises:
        CheckpointError: an expert's part is not as the first one's.
    """
    whole, parts = dict(header), dict[str, list[str]]()
    for name in names:
        found: list[str] = []
        while name not in header and (single := single_name(name, len(found))) in header:
            found.append(str(single))
        if not found:
            continue
        first, parts[name] = header[found[0]], found
        whole[name] = replace(first, shape=(len(found), *first.shape))
        for single in found:
            info = whole.pop(single)
            if (info.dtype, info.shape) != (first.dtype, first.shape):
                raise CheckpointError(
                    f"Tensor {single!r} is {info.dtype} {info.shape}; expected {first.dtype} "
                    f"{first.shape}, as {found[0]!r}: convert the model again."
                )
    return whole, parts


def check_shard(
    path: Path, planned: Sequence[PlannedTensor], arranged: ArrangedSource, block: int
) -> Iterator[CheckedTensor]:
    """Compare every tensor of a finished file with the source.

    Raises:
        CheckpointError: the file is no sound safetensors file.
        ConversionError: it does not hold the arrays that were planned.
    """
    wanted = {a.name: (a.dtype, a.shape) for tensor in planned for a in tensor.arrays}
    reader = ShardReader(path, wanted)
    found = {name: (info.dtype, info.shape) for name, info in reader.tensors.items()}
    if wanted != found:
        names = sorted(n for n in wanted | found if wanted.get(n) != found.get(n))
        raise ConversionError(f"{path} does not hold {names[0]!r} as it was planned.")
    for tensor in planned:
        yield _check(reader, tensor, arranged, block)


def _check(
    reader: ShardReader, tensor: PlannedTensor, arranged: ArrangedSource, block: int
) -> CheckedTensor:
    if tensor.packed:
        status, error = _check_copy(reader, tensor, arranged)
    else:
        error = total(_errors(reader, tensor, arranged, block))
        lossless = error.largest == 0.0
        status = EXACT if lossless else CAST if tensor.form is None else REQUANTISED
    return _checked(tensor, status, error, reader.checksums(tensor, block))


def _checked(
    tensor: PlannedTensor, status: str, error: ErrorStats, checksums: list[int]
) -> CheckedTensor:
    output = tensor.output
    return CheckedTensor(
        output.name,
        tensor.format,
        output.stored,
        status,
        output.num_weights,
        tensor.num_bytes,
        checksums,
        error.relative,
        error.largest,
    )


def _errors(
    reader: ShardReader, tensor: PlannedTensor, arranged: ArrangedSource, block: int
) -> Iterator[ErrorStats]:
    row = 0
    for values in arranged.blocks(tensor.output, block):
        rows = slice(row, row + values.shape[0])
        wanted = np.asarray(as_numpy(values.astype(mx.float32)), dtype=np.float32)
        yield compare(reader.values(tensor, rows), wanted)
        row = rows.stop


def _check_copy(
    reader: ShardReader, tensor: PlannedTensor, arranged: ArrangedSource
) -> tuple[str, ErrorStats]:
    """Codes must be the source's own; scales may be rounded."""
    status, errors, row = EXACT, [], 0
    per_source = prod(tensor.output.shape[:-1]) // len(tensor.output.sources)
    for name in tensor.output.sources:
        packed = arranged.source.read_packed(name)
        rows = slice(row, row + per_source)
        row = rows.stop
        weight = reader.rows(tensor.arrays[0].name, rows)
        if not np.array_equal(weight, as_numpy(packed.weight).reshape(weight.shape)):
            raise ConversionError(f"{tensor.output.name} is not what the source holds.")
        if _same_scales(reader, tensor, rows, [packed.scales, packed.biases]):
            errors.append(ErrorStats(energy=1.0))
            continue
        status = SCALES
        values = reader.values(tensor, rows)
        errors.append(compare(values, _unpacked(tensor, packed).reshape(values.shape)))
    return status, total(errors)


def _same_scales(
    reader: ShardReader, tensor: PlannedTensor, rows: slice, parts: Sequence[mx.array | None]
) -> bool:
    """Raises ConversionError where they are neither the same nor the same rounded."""
    same = True
    for array, part in zip(tensor.arrays[1:], parts, strict=False):
        assert part is not None
        found = reader.rows(array.name, rows)
        affine = array.dtype in FLOATS
        as_kept = part.astype(mx_dtype(tensor.dtype)) if affine else part
        if not np.array_equal(found, as_numpy(as_kept).reshape(found.shape)):
            raise ConversionError(f"{array.name} is not what the source holds.")
        same = same and not (affine and mx.any(as_kept.astype(mx.float32) != part).item())
    return same


def _unpacked(tensor: PlannedTensor, packed: Packed) -> NDArray[np.float32]:
    form = tensor.form
    assert form is not None
    assert packed.biases is not None  # floating-point scales are kept as they are
    scales, biases = (a.astype(mx.float32) for a in (packed.scales, packed.biases))
    plain = dequantised(packed.weight, scales, biases, form)
    return np.asarray(as_numpy(plain), dtype=np.float32)


def confirm(checked: CheckedTensor, written: ErrorStats, checksums: list[int]) -> None:
    """Whether reading found what was written, and the error that writing left.

    Raises:
        ConversionError: it did not.
    """
    if checked.checksums != checksums:
        raise ConversionError(f"{checked.name} is not on the disk as it was written: damaged.")
    if checked.status in (SCALES, EXACT):
        return
    if not abs(checked.relative - written.relative) <= TOLERANCE * max(written.relative, 1e-6):
        raise ConversionError(
            f"{checked.name} was written with an error of {written.relative:.3g}, but what the "
            f"disk holds has {checked.relative:.3g}: it is damaged."
        )


def as_written(tensor: PlannedTensor, error: ErrorStats, checksums: list[int]) -> CheckedTensor:
    """The entry of a tensor that is not read again, with the errors computed when writing."""
    status = REQUANTISED if tensor.form else CAST if error.largest else EXACT
    return _checked(tensor, SCALES if tensor.packed else status, error, checksums)
