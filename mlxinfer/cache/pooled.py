"""Index keys, one for each block of tokens, and the choice of the best blocks.

r = tokens of a block, d = numbers of a key, T = tokens of the step, Hi = heads of the index,
n = tokens of one sequence in the step, S = its tokens, P = page_size, a multiple of r.

A key can be computed when all tokens of its block are there. So tails keep what each token brings,
and where its block turns to, as it came; pages have the keys alone. A token has an r-th of a key
there, so that the pages of an index are as those of other layers. The open block at the end of a
sequence lies in the tail: whatever is taken back of it, nothing has to be undone. What the first
tokens of an open block brought is not in pages, so a sequence goes on only where a page ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from ..cache_specs import CompressedSpec, PooledSpec
from ..errors import InvalidRequestError
from ..metal_kernels.stored import KVFormat, Runs
from .chunks import cut_runs
from .index import ChosenTokens, IndexLayer, numbers_of
from .latent import ranked
from .paged import SequencePlace


@dataclass(frozen=True, slots=True)
class PooledFormat(KVFormat):
    """Keys of blocks and what else a block has in pages, for each token a part of it.

    Attributes:
        widths: numbers of a token in pages, of each kind.
        raw_dim, rope_axes: see `PooledSpec`.
    """

    widths: tuple[int, ...] = ()
    raw_dim: int = 0
    rope_axes: int = 1
    names: ClassVar[tuple[str, ...]] = ("keys",)
    in_kernels: ClassVar[bool] = False

    def parts(self, dim: int, dtype: mx.Dtype) -> list[tuple[int, mx.Dtype]]:
        return [(width, dtype) for width in self.widths]

    def tail_parts(self, dim: int, dtype: mx.Dtype) -> list[tuple[int, mx.Dtype]]:
        return [(self.raw_dim, dtype), (self.rope_axes, mx.int32)]


class BlocksLayer(IndexLayer):
    """Vectors of blocks of tokens, computed from the numbers that the tokens of a block bring.

    They are in the activations' dtype, whatever format keys and values have: fewer bits would
    choose other tokens.

    Args:
        widths: see `PooledFormat`.
    """

    spec: PooledSpec | CompressedSpec
    whole_pages = True

    def __init__(self, spec: Any, dtype: mx.Dtype, widths: Sequence[int]) -> None:
        fmt = PooledFormat(widths=(*widths,), raw_dim=spec.raw_dim, rope_axes=spec.rope_axes)
        super().__init__(spec, dtype, [(fmt, widths[0])])

    def take_from(self, mixer: Any) -> None:
        self.pool = mixer.pool

    def allocate(self, page_size: int, num_pages: int, num_slots: int) -> None:
        """See `PagedLayer`; raises InvalidRequestError: pages do not hold whole blocks."""
        if page_size % self.spec.unit:
            raise InvalidRequestError.of(
                "page_size", f"is {page_size}; this model needs a multiple of {self.spec.unit}."
            )
        super().allocate(page_size, num_pages, num_slots)

    # -- a step ---------------------------------------------------------------------------------

    def store(self, raw: mx.array, positions: mx.array) -> None:
        """Store what the tokens of a step bring, and the vectors of the blocks that chunks end.

        Args:
            raw: (T, raw) what tokens bring to their blocks.
            positions: (T,), or (3, T) with M-RoPE, by which they rotate.
        """
        axes = mx.broadcast_to(positions, (self.spec.rope_axes, len(raw)))
        stored = [raw[:, None], axes.T[:, None]]  # (T, 1, W) each
        for place in self.prepared.sequences() if self.prepared.chunks else ():
            if place.pages is None:
                self._write_chunk(place, stored)
        self.write([stored], self.prepared.place)

    def _write_chunk(self, place: SequencePlace, stored: Sequence[mx.array]) -> None:
        """Store the vectors of the blocks that a prefill chunk ends, before its tail is written.

        The first tokens of the first one may have come before: they are in the tail.
        """
        ratio = self.spec.ratio
        first, stop = (at - at % ratio for at in (place.start, place.stop))
        if first == stop:
            return
        rows = slice(place.rows.start, place.rows.stop - (place.stop - stop))
        parts = [part[rows, 0] for part in stored]
        if first < place.start:
            tails = self._read_tail(place.slot, mx.arange(first, place.start))
            parts = [mx.concatenate([*pair]) for pair in zip(tails, parts, strict=True)]
        raw, axes = (mx.unflatten(part, 0, (-1, ratio)) for part in parts)
        for i, blocks in enumerate(self._of_chunk(place, first, raw, axes[:, 0])):
            self._put(i, cut_runs(place.runs, first, stop), blocks.reshape(stop - first, -1))

    def _put(self, part: int, runs: Runs, values: mx.array) -> None:
        """Store a part (N, W) of N tokens in the page slots of `runs`."""
        row, pages = 0, self.planes[0].pages
        for start, stop in runs:
            pages[part][0, start:stop] = values[row : row + stop - start]
            row += stop - start

    def _read_tail(self, slots: int | mx.array, positions: mx.array) -> list[mx.array]:
        """Numbers that tokens at places (...) of tails brought; their positions (..., axes)."""
        [plane], offsets = self.planes, positions % (2 * self.page_size)
        return [part[slots, 0, offsets] for part in plane.own_tails(self.page_size)]

    def of_tail(self, place: SequencePlace) -> list[mx.array] | None:
        """The vectors of a sequence's complete blocks that are in its tail; None: there are none.

        (n, dim) each.
        """
        ratio = self.spec.ratio
        whole = len(place.tail) - len(place.tail) % ratio
        if not whole:
            return None
        raw, axes = self._read_tail(place.slot, mx.array(place.tail[:whole].reshape(-1, ratio)))
        return self._in_tail(place, raw, axes[:, 0])

    def read_part(
        self, part: int, place: SequencePlace, tail: Sequence[mx.array] | None
    ) -> mx.array:
        """(S // r, dim) one vector of each block of a sequence; without a block, one row of zeros.

        `tail`: see `of_tail`.
        """
        ratio, parts, pages = self.spec.ratio, [], self.planes[0].pages[part]
        if place.runs:
            pieces = [pages[0, start:stop] for start, stop in place.runs]
            joined = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)
            parts.append(
                joined[: len(joined) - len(joined) % ratio].reshape(-1, ratio * joined.shape[1])
            )
        if tail is not None:
            parts.append(tail[part])
        if not parts:
            return mx.zeros((1, ratio * pages.shape[-1]), self.dtype)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def read_keys(self, place: SequencePlace) -> mx.array:
        """The first vector of all blocks, see `read_part`."""
        return self.read_part(0, place, self.of_tail(place))

    def seal(self, slots: mx.array, offsets: mx.array, targets: mx.array, before: mx.array) -> None:
        """See `PagedLayer`, of the blocks whose last token is among these."""
        ratio, pages = self.spec.ratio, self.planes[0].pages
        ends = np.flatnonzero(np.array(offsets) % ratio == ratio - 1)
        if not len(ends):
            return
        last = [part[mx.array(ends)] for part in (slots, offsets, targets, before)]
        slots, offsets, targets, before = last
        block = offsets[:, None] - mx.arange(ratio)[::-1]  # (N, r)
        raw, axes = self._read_tail(slots[:, None], block)
        vectors = self._of_sealed(last, raw, axes[:, 0])
        places = (targets[:, None] - mx.arange(ratio)[::-1]).flatten()
        for i, blocks in enumerate(vectors):
            pages[i][0, places] = blocks.reshape(len(places), -1)

    # -- vectors of blocks ----------------------------------------------------------------------

    def _pooled(self, raw: mx.array, axes: mx.array) -> list[mx.array]:
        """Vectors (N, dim) of N blocks.

        Args:
            raw: (N, r, raw) what their tokens bring.
            axes: (N, axes) the positions of their first tokens.
        """
        return [self.pool(raw, axes[:, 0] if self.spec.rope_axes == 1 else axes.T)]

    def _of_chunk(
        self, place: SequencePlace, first: int, raw: mx.array, axes: mx.array
    ) -> list[mx.array]:
        return self._pooled(raw, axes)

    def _in_tail(self, place: SequencePlace, raw: mx.array, axes: mx.array) -> list[mx.array]:
        return self._pooled(raw, axes)

    def _of_sealed(self, last: Sequence[mx.array], raw: mx.array, axes: mx.array) -> list[mx.array]:
        """As `_pooled`, of blocks that are sealed; `last`: see `seal`, of their last tokens."""
        return self._pooled(raw, axes)


class PooledLayer(BlocksLayer):
    """The index of one attention layer. It ranks blocks; another layer attends.

    A block ranks by the sum over heads of weight * max(query · key, 0), and of equal ranks the
    earlier counts. A token sees the best of the blocks that are complete with it, and those of the
    open block up to itself.
    """

    spec: PooledSpec

    def __init__(self, spec: PooledSpec, dtype: mx.Dtype) -> None:
        super().__init__(spec, dtype, [spec.dim // spec.ratio])

    def choose(
        self, queries: mx.array, weights: mx.array, raw: mx.array, positions: mx.array
    ) -> "PooledChoice | None":
        """Store this step's tokens, and rank the blocks that they may see.

        Args:
            queries: (T, Hi, d), position-encoded.
            weights: (T, Hi) of the heads.
            raw, positions: see `store`.

        Returns:
            None: every token sees all tokens before it.
        """
        self.store(raw, positions)
        all_seen = (self.spec.num_ranked + 1) * self.spec.ratio - 1
        if int(self.prepared.metadata.positions.max()) < all_seen:
            return None
        return PooledChoice(self, queries, weights)


class PooledChoice(ChosenTokens):
    """The blocks of the best keys. They are ranked once for all layers that share the choice.

    Args:
        queries, weights: see `PooledLayer.choose`.
    """

    __slots__ = ("_blocks", "_queries", "_weights")

    layer: PooledLayer

    def __init__(self, layer: PooledLayer, queries: mx.array, weights: mx.array) -> None:
        super().__init__(layer)
        self._queries, self._weights = queries, weights
        self._blocks: dict[tuple[int, int], mx.array] = {}  # by rows of the step

    def _best(self, place: SequencePlace, rows: slice, keys: mx.array) -> tuple[mx.array, mx.array]:
        """For rows `own` (n) of the step: blocks that each sees (n, S // r), positions (n, 1)."""
        spec, positions, key = self.layer.spec, place.positions(rows), (rows.start, rows.stop)
        if key not in self._blocks:
            complete = mx.arange(len(keys)) < (positions + 1) // spec.ratio
            queries, weights = self._queries[rows], self._weights[rows]
            self._blocks[key] = ranked(queries, weights, keys, complete, spec.num_ranked)
        return self._blocks[key], positions

    def mask(self, place: SequencePlace, rows: slice, keys: mx.array) -> mx.array:
        """See `ChosenTokens`, (n, S)."""
        blocks, positions = self._best(place, rows, keys)
        ratio, tokens = self.layer.spec.ratio, mx.arange(place.stop)
        by_token = mx.repeat(blocks, ratio, axis=1)[:, : place.stop]
        seen = mx.pad(by_token, [(0, 0), (0, place.stop - by_token.shape[1])])
        is_open = tokens // ratio == (positions + 1) // ratio
        return seen | (is_open & (tokens <= positions))

    def tokens(self, place: SequencePlace, keys: mx.array) -> tuple[mx.array, mx.array]:
        """See `ChosenTokens`, (n, K) and (n, 1, 1, K)."""
        blocks, positions = self._best(place, place.rows, keys)
        spec = self.layer.spec
        chosen = numbers_of(blocks, spec.num_ranked)
        chosen = mx.concatenate([chosen, (positions + 1) // spec.ratio], axis=1)
        tokens = (chosen[..., None] * spec.ratio + mx.arange(spec.ratio)).flatten(1)
        return tokens, (tokens <= positions)[:, None, None]
