"""Attention of one step: what the layers of a group share, and how its segments attend.

An attention backend has `prepare(metadata, group, place) -> Prepared`, once a step and group. There
are two: `plain.PlainAttention` in MLX's own operations, and `metal.MetalAttention` with kernels.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx
import numpy as np

from ..metal_kernels.paged_attention import Softmax
from .inputs import Ints, StepMetadata
from .paged import PagedLayer, Stored, TailPlace

if TYPE_CHECKING:
    from .plain import Chunk


class Part(Protocol):
    """Some rows of a step that attend together."""

    @property
    def rows(self) -> slice | mx.array | None:
        """Which rows of the flat list the queries are; None: all, in order."""
        ...

    def attend(self, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
        """Queries (N, heads, D) of `rows` -> what these rows see, (T', heads * V)."""
        ...


class Prepared:
    """All that the layers of a group share in one step.

    Args:
        metadata: of the step.
        number: which of the page tables is the group's.
        place: where tokens go in tails.
        short: rows of each part of short segments in the flat list, and how they attend.
        chunks: prefill chunks, which come last in the flat list, in plain MLX.
        tiles: the same chunks through a kernel, for layers that have one.
    """

    __slots__ = ("_order", "_parts", "_tiled", "chunks", "metadata", "number", "place", "short")

    def __init__(
        self,
        metadata: StepMetadata,
        number: int,
        place: TailPlace,
        short: Sequence[tuple[Ints, Part]],
        chunks: Sequence["Chunk"],
        tiles: Part | None = None,
    ) -> None:
        self.metadata, self.number, self.place = metadata, number, place
        self.short = [part for _, part in short]
        self.chunks = chunks
        self._parts: list[Part] = [*self.short, *chunks]
        self._tiled = self._parts if tiles is None else [*self.short, tiles]
        self._order = _order([rows for rows, _ in short], len(metadata.positions))

    @property
    def num_short(self) -> int:
        """Rows of short segments, which come first in the flat list."""
        chunks = self.metadata.long
        return chunks[0].row if chunks else len(self.metadata.positions)

    def write(self, layer: PagedLayer, stored: Stored) -> None:
        """Write the parts (T, heads, W) of the step's tokens: chunks to pages, others to tails."""
        for chunk in self.chunks:
            layer.write_pages(chunk.writes, chunk.rows.start, stored)
        place = self.place
        if len(place.slots):
            if place.rows is not None:
                stored = [[part[place.rows] for part in parts] for parts in stored]
            layer.write_tails(place, stored)

    def attend(self, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
        """Queries (T, heads, D) of all rows over what is stored, (T, heads * V)."""
        parts = self._tiled if layer.kernels.prefill else self._parts
        if len(parts) == 1:
            return attend_rows(parts[0], layer, queries, softmax)
        return self.joined([attend_rows(part, layer, queries, softmax) for part in parts])

    def joined(self, outputs: Sequence[mx.array]) -> mx.array:
        """Outputs of all parts, (T, ...) in flat order."""
        joined = outputs[0] if len(outputs) == 1 else mx.concatenate([*outputs])
        return joined if self._order is None else joined[self._order]


def attend_rows(part: Part, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
    """What the rows of one part see, (T', heads * V); queries (T, heads, D) of all rows."""
    return part.attend(layer, queries if part.rows is None else queries[part.rows], softmax)


def _order(parts: Sequence[Ints], num_rows: int) -> mx.array | None:
    """(T,) where each row of the step stands when those of `parts` come first; None: in place."""
    if len(parts) < 2:
        return None
    rows = np.concatenate(parts)
    if (np.diff(rows) > 0).all():
        return None
    order = np.arange(num_rows, dtype=np.int32)
    order[rows] = np.arange(len(rows), dtype=np.int32)
    return mx.array(order)
