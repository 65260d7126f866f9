"""One prefill chunk in plain MLX: it reads pages alone, at once or in blocks.

n = query tokens of a chunk, H = KV heads, S = keys that a chunk reads, V = value dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..metal_kernels.paged_attention import Softmax
from ..metal_kernels.prompt_attention import (
    BLOCKS,
    KEY_BLOCK,
    QUERY_BLOCK,
    WHOLE,
    Read,
    attend_over_blocks,
    attend_to_all,
    ways_over_all,
)
from ..metal_kernels.stored import Runs
from ..metal_kernels.variants import ANY_ROWS
from .inputs import Ints, Segments, StepMetadata, ints
from .paged import PagedLayer
from .pages import AttentionWindow, PageGroup

Block = tuple[slice, slice, mx.array | str]
"""Some rows of a chunk, the keys that they can see among those that the chunk reads, and which of
these: "causal", or bool (queries, keys)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One prefill chunk: where its tokens go, and what they see."""

    rows: slice  # of the step's flat list
    writes: list[tuple[int, int]]  # page slots of the new tokens
    reads: list[tuple[int, int]]  # page slots that its tokens read, as ranges
    start: int  # position of the first token
    ranges: Sequence[tuple[int, int]]  # positions of `reads`, in order
    window: AttentionWindow  # of the group
    # (2, n) positions from, and up to, of the span of each token; None: all are alone
    spans: Ints | None = None
    _blocks: list[Block] = field(default_factory=list)  # of queries, where keys are one block

    @staticmethod
    def of(segment: Segments, metadata: StepMetadata, group: PageGroup) -> "Chunk":
        row, start, count = int(segment.rows[0]), int(segment.starts[0]), segment.num_tokens
        table, window, stop = segment.tables[0][group.number], group.window, start + count
        ranges = window.ranges(start, stop)
        return Chunk(
            rows=slice(row, row + count),
            writes=table.runs(start, stop),
            reads=[run for part in ranges for run in table.runs(*part)],
            start=start,
            ranges=ranges,
            window=window,
            spans=metadata.spans_of(row, count),
        )

    @property
    def num_keys(self) -> int:
        return sum([stop - start for start, stop in self.ranges])

    @property
    def num_queries(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def sees_all_before(self) -> bool:
        return self.window.size is None and self.spans is None

    def ways(self, dims: tuple[int, int], token_bytes: int, softmax: Softmax) -> tuple[str, ...]:
        """The ways to attend in plain MLX, the first where nothing was timed.

        Args:
            dims: D and V.
            token_bytes: of a token's keys and values, where they are not read as they are stored.
        """
        if not self.sees_all_before or not mx.metal.is_available():
            return (BLOCKS,)
        return ways_over_all(dims, self.num_queries, self.num_keys * token_bytes, softmax)

    def ways_of(self, layer: PagedLayer, key_dim: int, softmax: Softmax) -> tuple[str, ...]:
        as_stored = layer.keys.as_stored and layer.values.as_stored
        dims = key_dim, layer.values.read_dim
        return self.ways(dims, 0 if as_stored else layer.read_bytes, softmax)

    def attend(self, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
        """Attention of queries (n, heads, D), (n, heads * V)."""

        def read(start: int, stop: int, after: mx.array | None) -> tuple[mx.array, mx.array]:
            runs = cut_runs(self.reads, start, stop)
            keys = layer.keys.read_runs(runs, after)
            return keys, layer.values.read_runs(runs, after=keys)  # never both half decoded

        ways = self.ways_of(layer, queries.shape[-1], softmax)
        way = layer.fastest_prompt(ANY_ROWS, self.num_queries, ways)
        output = self.attend_to(queries.swapaxes(0, 1), read, softmax, way)
        return output.swapaxes(0, 1).flatten(1)

    def attend_to(self, queries: mx.array, read: Read, softmax: Softmax, way: str) -> mx.array:
        """Attention of the chunk's queries (heads, n, D) over the keys that it reads.

        Args:
            read: of tokens counted in `reads`.
            way: one of `ways`.

        Returns:
            (heads, n, V).
        """
        if way == WHOLE:
            keys, values = read(0, self.num_keys, None)
            return attend_to_all(queries, keys, values, softmax)
        if self.num_keys <= KEY_BLOCK and softmax.soft_cap is None:
            return self._over_one_block(queries, read, softmax.scale, softmax.sinks)
        return attend_over_blocks(queries, read, self._key_positions(), self._seen, softmax)

    def _over_one_block(
        self, queries: mx.array, read: Read, scale: float, sinks: mx.array | None
    ) -> mx.array:
        keys, values = read(0, self.num_keys, None)
        if not self._blocks:
            self._blocks.extend(self._query_blocks())
        outputs: list[mx.array] = []
        for rows, columns, mask in self._blocks:
            heads = queries[None, :, rows]
            heads = mx.depends(heads, outputs[-1]) if outputs else heads  # one block's scores only
            seen = keys[None, :, columns], values[None, :, columns]
            outputs.append(
                mx.fast.scaled_dot_product_attention(
                    heads, *seen, scale=scale, mask=mask, sinks=sinks
                )
            )
        return outputs[0][0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)[0]

    def _key_positions(self) -> Ints:
        """(S,) positions of the keys that are read."""
        return np.concatenate([np.arange(*part, dtype=np.int32) for part in self.ranges])

    def _visible(self, place: slice, keys: Ints) -> NDArray[np.bool_]:
        """(queries, keys) bool: the keys (S,) that each query sees, by position."""
        queries = np.arange(self.start + place.start, self.start + place.stop, dtype=np.int32)
        spans = None if self.spans is None else self.spans[:, place, None]
        return self.window.sees(queries[:, None], keys[None], spans)

    def _seen(self, place: slice, keys: Ints) -> mx.array | bool:
        """Which of some queries see which keys: (queries, keys) bool, or all, or none of them."""
        first, last = self.start + place.start, self.start + place.stop - 1
        if self.window.size is None and keys[-1] <= first:
            return True
        if self.spans is None and keys[0] > last:
            return False
        seen = self._visible(place, keys)
        return mx.array(seen) if seen.any() else False

    def _query_blocks(self) -> list[Block]:
        keys, count = self._key_positions(), self.rows.stop - self.rows.start
        blocks = []
        for first in range(0, count, QUERY_BLOCK):
            queries = slice(first, min(first + QUERY_BLOCK, count))
            if self.spans is None:  # an old end leaves, a new one comes
                edges = ints([self.start + queries.start, self.start + queries.stop - 1])
                seen = self.window.sees(edges[:, None], keys[None])
            else:
                seen = self._visible(queries, keys)
            columns = np.flatnonzero(seen.any(axis=0))
            low, high = int(columns[0]), int(columns[-1]) + 1
            mask: mx.array | str = "causal"
            if self.spans is not None or not seen[-1, low:high].all():
                mask = mx.array(self._visible(queries, keys[low:high]))
            blocks.append((queries, slice(low, high), mask))
        return blocks


def cut_runs(runs: Runs, start: int, stop: int) -> list[tuple[int, int]]:
    """The runs that hold tokens [start, stop) of those in `runs`, counted one after another."""
    cut, first = [], 0
    for low, high in runs:
        begin, end = max(low, low + start - first), min(high, low + stop - first)
        if begin < end:
            cut.append((begin, end))
        first += high - low
    return cut
