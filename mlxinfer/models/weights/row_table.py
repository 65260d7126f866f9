"""Tables whose rows stay in their files: of embeddings that have more rows than memory holds."""

from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import asdict
from itertools import accumulate

import mlx.core as mx
import numpy as np

from ...layers.ngrams import Int64s
from ..quantization import QuantFormat
from .files import READERS, Span
from .tensors import FileTensor, Tensor

TOGETHER = 64  # rows: fewer are read on the caller's thread


class FileRows:
    """Rows of a table in files; see `layers.ngrams.RowTable`.

    Rows are read with the system's calls, so its cache keeps those that were read lately, and a
    file that became shorter raises instead of ending the process.

    Args:
        fields: (rows, ...) weights, or packed weights with their scales and biases.
        form: of packed weights; None: they are as they are.

    Attributes:
        row_bytes: of a row, all fields.
        rows_read: so far, the same one once a step.
    """

    __slots__ = ("dtype", "fields", "form", "num_rows", "row_bytes", "rows_read", "widths")

    def __init__(self, fields: Sequence[Tensor], form: QuantFormat | None, dtype: mx.Dtype) -> None:
        self.fields = [field for field in fields if isinstance(field, FileTensor)]
        self.form = form
        self.dtype = dtype
        self.num_rows = fields[0].shape[0]
        self.widths = [(field.shape[1] * field.dtype.size, field.dtype) for field in fields]
        self.row_bytes = sum(width for width, _ in self.widths)
        self.rows_read = 0

    def read(self, rows: Int64s, memory: memoryview) -> None:
        once, places = np.unique(rows, return_inverse=True)
        self.rows_read += len(once)
        stored = np.empty((len(once), self.row_bytes), np.uint8)
        first = 0
        for field, (width, _) in zip(self.fields, self.widths, strict=True):
            _read_rows(field.spans, once, stored[:, first : first + width])
            first += width
        np.frombuffer(memory, np.uint8).reshape(-1, self.row_bytes)[:] = stored[places]

    def decode(self, stored: mx.array) -> mx.array:
        parts, first = [], 0
        for width, dtype in self.widths:
            parts.append(mx.contiguous(stored[:, first : first + width]).view(dtype))
            first += width
        if self.form is None:
            return parts[0].astype(self.dtype)
        weight, scales, *biases = parts
        rows = mx.dequantize(weight, scales, biases[0] if biases else None, **asdict(self.form))
        return rows.astype(self.dtype)


def _read_rows(spans: Sequence[Span], rows: Int64s, out: np.ndarray) -> None:
    """Read ascending rows (N,) of bytes that lie in spans one behind the other, to (N, width)."""
    width = out.shape[1]
    starts = np.array([0, *accumulate(span.size for span in spans)])
    which = np.searchsorted(starts, rows * width, side="right") - 1
    within = rows * width - starts[which]

    def run(first: int, stop: int) -> None:
        for i in range(first, stop):
            span = spans[which[i]]
            view = bytearray(width)
            span.file.read_into([memoryview(view)], span.start + int(within[i]))
            out[i] = np.frombuffer(view, np.uint8)

    if len(rows) <= TOGETHER:
        return run(0, len(rows))
    step = -(-len(rows) // READERS)
    pool = spans[0].file.pool
    tasks = [pool.submit(run, i, min(i + step, len(rows))) for i in range(0, len(rows), step)]
    wait(tasks)
    for task in tasks:
        task.result()
