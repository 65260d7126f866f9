"""Compressed vectors of blocks of tokens, attended together with a window of tokens themselves.

r = tokens of a block, D = numbers of its vector, which is key and value in one, T = tokens of the
step, n = tokens of one sequence in the step, E = its complete blocks, W = tokens of its window.

A block's vector follows from what its tokens bring, and maybe from what those of the block before
it brought. Tails keep that; pages keep vectors, and index keys by which they rank. So that a
sequence can go on behind a page, the page keeps what the next block needs of the last one, too.
Source: DeepSeek V4 (CSA and HCA), as transformers has it.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..cache_specs import CompressedSpec
from ..metal_kernels.paged_attention import Softmax
from .chunks import cut_runs
from .index import NOWHERE, attention, numbers_of
from .latent import MOST_SCORES, ranked
from .paged import PagedLayer, SequencePlace
from .pooled import BlocksLayer


class CompressedLayer(BlocksLayer):
    """The compressed vectors of one layer; its window is another layer's."""

    spec: CompressedSpec

    def __init__(self, spec: CompressedSpec, dtype: mx.Dtype) -> None:
        super().__init__(spec, dtype, [width for width in spec.widths if width])
        self.own_part = int(spec.index_dim > 0)  # among the parts of pages

    def choose(
        self, queries: mx.array | None, weights: mx.array | None, raw: mx.array, positions: mx.array
    ) -> "CompressedChoice | None":
        """Store this step's tokens, and rank the vectors that they may see.

        Args:
            queries: (T, Hi, d) of the index, position-encoded; None: all vectors are seen.
            weights: (T, Hi) of its heads.
            raw, positions: see `store`.

        Returns:
            None: no token sees a vector.
        """
        self.store(raw, positions)
        if int(self.prepared.metadata.positions.max()) < self.spec.ratio - 1:
            return None
        return CompressedChoice(self, queries, weights)

    def vectors(
        self, place: SequencePlace, numbers: mx.array, tail: Sequence[mx.array] | None
    ) -> mx.array:
        """(n, K, D) some vectors of a short segment's sequence, gathered by their numbers (n, K).

        `tail`: see `of_tail`. A number that is no block's gives any vector.
        """
        ratio, dim = self.spec.ratio, self.spec.dim
        num_sealed, per_page = place.sealed // ratio, self.page_size // ratio
        unsealed = None
        if tail is not None:
            tail_vectors = tail[self.own_part]
            unsealed = tail_vectors[mx.clip(numbers - num_sealed, 0, len(tail_vectors) - 1)]
        if not num_sealed:
            assert unsealed is not None, "some vector is seen"
            return unsealed
        assert place.pages is not None, "chunks read all vectors"
        sealed = mx.minimum(numbers, num_sealed - 1)
        rows = place.pages[sealed // per_page] * per_page + sealed % per_page
        pages = self.planes[0].pages[self.own_part].reshape(-1, dim)[rows]
        return (
            pages
            if unsealed is None
            else mx.where((numbers < num_sealed)[..., None], pages, unsealed)
        )

    # -- what the block before brought ----------------------------------------------------------

    def _of_chunk(
        self, place: SequencePlace, first: int, raw: mx.array, axes: mx.array
    ) -> list[mx.array]:
        """See `BlocksLayer`. What later blocks need is written before it is read: in place."""
        unit, carried = self.spec.unit, self.spec.carried
        if not carried:
            return super()._of_chunk(place, first, raw, axes)
        stop = first + len(raw) * self.spec.ratio
        low, high = first - first % unit, stop - stop % unit
        if low < high:
            ends = slice((low + unit - first) // self.spec.ratio - 1, None, unit // self.spec.ratio)
            self._put(
                -1, cut_runs(place.runs, low, high), raw[ends, :, :carried].reshape(high - low, -1)
            )
        return self._after(raw, axes, self._before(place, first))

    def _in_tail(self, place: SequencePlace, raw: mx.array, axes: mx.array) -> list[mx.array]:
        if not self.spec.carried:
            return super()._in_tail(place, raw, axes)
        return self._after(raw, axes, self._before(place, place.sealed))

    def _after(self, raw: mx.array, axes: mx.array, before: mx.array) -> list[mx.array]:
        """As `_pooled`, of consecutive blocks behind one that brought `before` (r, carried)."""
        earlier = mx.concatenate([before[None], raw[:-1, :, : self.spec.carried]])
        return self._pooled(raw, axes, earlier)

    def _before(self, place: SequencePlace, first: int) -> mx.array:
        """(r, carried) what the block before position `first` brought; zeros: there is none."""
        ratio, unit, carried = self.spec.ratio, self.spec.unit, self.spec.carried
        if first % self.page_size:
            return self._read_tail(place.slot, mx.arange(first - ratio, first))[0][:, :carried]
        if not first:
            return mx.zeros((ratio, carried), self.dtype)
        [(start, stop)] = cut_runs(place.runs, first - unit, first)
        return self.planes[0].pages[-1][0, start:stop].reshape(ratio, carried)

    def _of_sealed(self, last: Sequence[mx.array], raw: mx.array, axes: mx.array) -> list[mx.array]:
        if not self.spec.carried:
            return super()._of_sealed(last, raw, axes)
        ratio, unit, carried = self.spec.ratio, self.spec.unit, self.spec.carried
        slots, offsets, targets, before = last
        pages, numbers = self.planes[0].pages, np.array(offsets)
        ends = mx.array(np.flatnonzero(numbers % unit == unit - 1))
        if len(ends):
            places = (targets[ends][:, None] - mx.arange(unit)[::-1]).flatten()
            pages[-1][0, places] = raw[ends, :, :carried].reshape(len(places), -1)
        block = offsets[:, None] - mx.arange(ratio, 2 * ratio)[::-1]
        earlier = self._read_tail(slots[:, None], block)[0][..., :carried]
        firsts = np.flatnonzero(numbers % self.page_size == ratio - 1)
        if len(firsts):  # of pages
            rows = mx.array(firsts)
            stops = mx.maximum(before[rows] - (ratio - 1), 0) + self.page_size
            units = stops[:, None] - mx.arange(1, unit + 1)[::-1]
            read = pages[-1][0, units].reshape(-1, ratio, carried)
            earlier[rows] = mx.where(before[rows][:, None, None] < 0, 0, read)  # never a stale NaN
        return self._pooled(raw, axes, earlier)

    def _pooled(
        self, raw: mx.array, axes: mx.array, before: mx.array | None = None
    ) -> list[mx.array]:
        """See `BlocksLayer`; `before` (N, r, carried): what the block before each brought."""
        pooled: list[mx.array] = self.pool(raw, before, axes[:, 0])
        return pooled


class CompressedChoice:
    """The vectors and the tokens that each token of a step sees; see `paged.Choice`.

    Args:
        queries, weights: see `CompressedLayer.choose`.
    """

    __slots__ = ("_queries", "_weights", "layer")

    def __init__(
        self, layer: CompressedLayer, queries: mx.array | None, weights: mx.array | None
    ) -> None:
        self.layer, self._queries, self._weights = layer, queries, weights

    def attend(self, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
        """See `Choice`; `layer` keeps the tokens of the window."""
        assert softmax.soft_cap is None, "no model with compressed vectors has one"
        pairs = zip(layer.prepared.sequences(), self.layer.prepared.sequences(), strict=True)
        outputs: list[mx.array] = []
        for near, place in pairs:
            attend = self._attend_chunk if place.pages is None else self._attend_short
            outputs.append(attend(layer, near, place, queries, softmax))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _seen(
        self, place: SequencePlace, rows: slice, keys: mx.array | None, count: int
    ) -> mx.array:
        """(n, count) whether rows `own` of the step see each vector; `keys`: of the index."""
        complete = mx.arange(count) < (place.positions(rows) + 1) // self.layer.spec.ratio
        if keys is None:
            return complete
        assert self._queries is not None
        assert self._weights is not None
        ranks = self._queries[rows], self._weights[rows], keys
        return ranked(*ranks, complete, self.layer.spec.num_ranked)

    def _keys(self, place: SequencePlace, tail: Sequence[mx.array] | None) -> mx.array | None:
        return None if self._queries is None else self.layer.read_part(0, place, tail)

    def _attend_short(
        self,
        layer: PagedLayer,
        near: SequencePlace,
        place: SequencePlace,
        queries: mx.array,
        softmax: Softmax,
    ) -> mx.array:
        rows, (window, most) = place.rows, (layer.spec.window, self.layer.spec.num_ranked)
        assert window is not None
        positions, heads = place.positions(rows), queries[rows]
        tokens = mx.arange(max(place.start - window + 1, 0), place.stop)[None]
        in_window = (tokens <= positions) & (tokens > positions - window)
        pair = [layer.read_tokens(plane, near, tokens) for plane in layer.views()]  # (1, 1, W, D)
        tail = self.layer.of_tail(place)
        keys, count = self._keys(place, tail), place.stop // self.layer.spec.ratio
        if keys is None or count <= most:
            vectors = self.layer.read_part(self.layer.own_part, place, tail)[None]
            seen = self._seen(place, rows, keys, vectors.shape[1])
            mask = mx.concatenate([in_window, seen], axis=1)
            heads = heads.swapaxes(0, 1)[None]  # (1, heads, n, D)
            output = self._over(layer, pair, vectors, heads, mask, softmax)
            return output[0].swapaxes(0, 1).flatten(1)
        numbers = numbers_of(self._seen(place, rows, keys, count), most)
        vectors = self.layer.vectors(place, numbers, tail)  # (n, K, D)
        mask = mx.concatenate([in_window, numbers < NOWHERE], axis=1)[:, None, None]
        pair = [mx.broadcast_to(part, (len(vectors), *part.shape[1:])) for part in pair]
        return self._over(layer, pair, vectors, heads[:, :, None], mask, softmax).flatten(1)

    def _attend_chunk(
        self,
        layer: PagedLayer,
        near: SequencePlace,
        place: SequencePlace,
        queries: mx.array,
        softmax: Softmax,
    ) -> mx.array:
        window = layer.spec.window
        assert window is not None
        outputs: list[mx.array] = []
        pair = [layer.read_whole(plane, near)[None] for plane in layer.views()]  # (1, 1, W, D)
        vectors = self.layer.read_part(self.layer.own_part, place, None)[None]
        keys = self._keys(place, None)
        heads = max(queries.shape[1], 0 if self._queries is None else self._queries.shape[1])
        block = max(1, MOST_SCORES // (heads * (vectors.shape[1] + pair[0].shape[2])))
        for first in range(place.rows.start, place.rows.stop, block):
            rows = slice(first, min(first + block, place.rows.stop))
            positions, block_queries = place.positions(rows), queries[rows].swapaxes(0, 1)[None]
            if outputs:  # one block's scores only
                block_queries = mx.depends(block_queries, outputs[-1])
            low = max(place.start + first - place.rows.start - window + 1, near.first) - near.first
            high = place.start + rows.stop - place.rows.start - near.first
            tokens = mx.arange(near.first + low, near.first + high)
            in_window = (tokens <= positions) & (tokens > positions - window)
            seen = self._seen(place, rows, keys, vectors.shape[1])
            mask = mx.concatenate([in_window, seen], axis=1)
            part = [plane[:, :, low:high] for plane in pair]
            output = self._over(layer, part, vectors, block_queries, mask, softmax)
            outputs.append(output[0].swapaxes(0, 1).flatten(1))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _over(
        self,
        layer: PagedLayer,
        pair: Sequence[mx.array],
        vectors: mx.array,
        queries: mx.array,
        mask: mx.array,
        softmax: Softmax,
    ) -> mx.array:
        """Attention of (B, heads, n, D) over keys and values (B, 1, W, D) and vectors (B, K, D)."""
        compressed = vectors[:, None]
        keys = mx.concatenate([pair[0], layer.rotate(compressed)], axis=2)
        values = mx.concatenate([pair[1], layer.rotate_values(compressed)], axis=2)
        return attention(queries, keys, values, softmax, mask)
