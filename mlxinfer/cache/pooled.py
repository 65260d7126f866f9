"""Index keys of which one stands for a block of tokens, and the choice of the best blocks.

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

from ..core import PooledSpec
from ..errors import InvalidRequestError
from ..metal_kernels.stored import KVFormat
from .chunks import cut_runs
from .index import ChosenTokens, IndexLayer, numbers_of
from .latent import ranked
from .paged import SequencePlace


@dataclass(frozen=True, slots=True)
class PooledFormat(KVFormat):
    """Keys of blocks, an r-th of a key for each token.

    Attributes:
        raw_dim, rope_axes: as of `PooledSpec`.
    """

    raw_dim: int = 0
    rope_axes: int = 1
    names: ClassVar[tuple[str, ...]] = ("keys",)
    in_kernels: ClassVar[bool] = False

    def tail_parts(self, dim: int, dtype: mx.Dtype) -> list[tuple[int, mx.Dtype]]:
        """What a token brings, and its positions."""
        return [(self.raw_dim, dtype), (self.rope_axes, mx.int32)]


class PooledLayer(IndexLayer):
    """The index of one attention layer. It ranks blocks; attention itself is another layer's.

    A block ranks by the sum over heads of weight * max(query · key, 0), and of equal ranks the
    earlier counts. A token sees the best of the blocks that are complete with it, and those of the
    open block up to itself.

    Keys are in the activations' dtype, whatever format keys and values have: fewer bits would
    choose other tokens.
    """

    spec: PooledSpec
    whole_pages = True

    def __init__(self, spec: PooledSpec, dtype: mx.Dtype) -> None:
        fmt = PooledFormat(raw_dim=spec.raw_dim, rope_axes=spec.rope_axes)
        kinds = [(fmt, spec.dim // spec.ratio)]
        super().__init__(spec, dtype, kinds)

    def take_from(self, mixer: Any) -> None:
        """Take the function that makes keys of blocks: tokens (N, r, raw), positions -> (N, d)."""
        self.pool = mixer.pool

    def allocate(self, page_size: int, num_pages: int, num_slots: int) -> None:
        """As of `PagedLayer`; raises InvalidRequestError: pages do not hold whole blocks."""
        if page_size % self.spec.ratio:
            raise InvalidRequestError(
                f"page_size is {page_size}; this model needs a multiple of {self.spec.ratio}.",
                param="page_size",
            )
        super().allocate(page_size, num_pages, num_slots)

    # -- a step ---------------------------------------------------------------------------------

    def choose(
        self, queries: mx.array, weights: mx.array, raw: mx.array, positions: mx.array
    ) -> "PooledChoice | None":
        """Store this step's tokens, and rank the blocks that they may see.

        Args:
            queries: (T, Hi, d), position-encoded.
            weights: (T, Hi) of the heads.
            raw: (T, raw) what tokens bring to the keys of their blocks.
            positions: (T,), or (3, T) with M-RoPE, by which they turn.

        Returns:
            None: every token sees all tokens before it.
        """
        axes = mx.broadcast_to(positions, (self.spec.rope_axes, len(raw)))
        stored = [raw[:, None], axes.T[:, None]]  # (T, 1, W) each
        for place in self.prepared.sequences() if self.prepared.chunks else ():
            if place.pages is None:
                self._write_chunk(place, stored)
        self.write([stored], self.prepared.place)
        all_seen = (self.spec.num_ranked + 1) * self.spec.ratio - 1
        if int(self.prepared.metadata.positions.max()) < all_seen:
            return None
        return PooledChoice(self, queries, weights)

    def _write_chunk(self, place: SequencePlace, stored: Sequence[mx.array]) -> None:
        """Store the keys of the blocks that a prefill chunk completes, before its tail is written.

        The first tokens of the first one may have come before: they are in the tail.
        """
        ratio, [plane] = self.spec.ratio, self.planes
        first, stop = (at - at % ratio for at in (place.start, place.stop))
        if first == stop:
            return
        rows = slice(place.rows.start, place.rows.stop - (place.stop - stop))
        parts = [part[rows, 0] for part in stored]
        if first < place.start:
            offsets = mx.arange(first, place.start) % (2 * self.page_size)
            tails = [part[place.slot, 0][offsets] for part in plane.own_tails(self.page_size)]
            parts = [mx.concatenate([*pair]) for pair in zip(tails, parts, strict=True)]
        raw, axes = (mx.unflatten(part, 0, (-1, ratio)) for part in parts)
        keys = self._keys(raw, axes[:, 0]).reshape(stop - first, 1, -1)
        plane.write_pages(cut_runs(place.runs, first, stop), 0, [keys])

    def _keys(self, raw: mx.array, axes: mx.array) -> mx.array:
        """Keys (N, d) of blocks' tokens (N, r, raw) and the positions (N, axes) of the first."""
        return self.pool(raw, axes[:, 0] if self.spec.rope_axes == 1 else axes.T)

    def read_keys(self, place: SequencePlace) -> mx.array:
        """(S // r, d) the keys of a sequence's complete blocks; if there is none, one of zeros."""
        ratio, [plane], found = self.spec.ratio, self.planes, []
        if place.runs:
            pieces = plane.read_runs(place.runs)[0]
            whole = len(pieces) - len(pieces) % ratio
            found.append(pieces[:whole].reshape(-1, self.spec.dim))
        whole = len(place.tail) - len(place.tail) % ratio
        if whole:
            offsets = mx.array(place.tail[:whole].reshape(-1, ratio))
            raw, axes = (part[place.slot, 0][offsets] for part in plane.own_tails(self.page_size))
            found.append(self._keys(raw, axes[:, 0]))
        if not found:
            return mx.zeros((1, self.spec.dim), self.dtype)
        return found[0] if len(found) == 1 else mx.concatenate(found)

    def seal(self, slots: mx.array, offsets: mx.array, targets: mx.array) -> None:
        """As of `PagedLayer`: keys of the tokens' blocks; those of an open block are not read."""
        ratio, [plane] = self.spec.ratio, self.planes
        part = offsets % ratio  # (N,) of a block
        block = (offsets - part)[:, None] + mx.arange(ratio)  # (N, r)
        raw, axes = (tails[slots[:, None], 0, block] for tails in plane.own_tails(self.page_size))
        keys = mx.unflatten(self._keys(raw, axes[:, 0]), -1, (ratio, -1))  # (N, r, d / r)
        plane.pages[0][0, targets] = mx.take_along_axis(keys, part[:, None, None], axis=1)[:, 0]


class PooledChoice(ChosenTokens):
    """The blocks of the best keys.

    Args:
        layer: the index.
        queries, weights: as of `PooledLayer.choose`.
    """

    __slots__ = ("_queries", "_weights")

    layer: PooledLayer

    def __init__(self, layer: PooledLayer, queries: mx.array, weights: mx.array) -> None:
        super().__init__(layer)
        self._queries, self._weights = queries, weights

    def _best(self, place: SequencePlace, own: slice, keys: mx.array) -> tuple[mx.array, mx.array]:
        """For rows `own` (n) of the step: blocks that each sees (n, S // r), positions (n, 1)."""
        spec, positions = self.layer.spec, place.positions(own)
        complete = mx.arange(len(keys)) < (positions + 1) // spec.ratio
        queries, weights = self._queries[own], self._weights[own]
        return ranked(queries, weights, keys, complete, spec.num_ranked), positions

    def mask(self, place: SequencePlace, own: slice, keys: mx.array) -> mx.array:
        """As of `ChosenTokens`, (n, S)."""
        blocks, positions = self._best(place, own, keys)
        ratio, tokens = self.layer.spec.ratio, mx.arange(place.stop)
        by_token = mx.repeat(blocks, ratio, axis=1)[:, : place.stop]
        seen = mx.pad(by_token, [(0, 0), (0, place.stop - by_token.shape[1])])
        is_open = tokens // ratio == (positions + 1) // ratio
        return seen | (is_open & (tokens <= positions))

    def tokens(self, place: SequencePlace, keys: mx.array) -> tuple[mx.array, mx.array]:
        """As of `ChosenTokens`, (n, K) and (n, 1, 1, K)."""
        blocks, positions = self._best(place, place.rows, keys)
        spec = self.layer.spec
        chosen = numbers_of(blocks, spec.num_ranked)
        chosen = mx.concatenate([chosen, (positions + 1) // spec.ratio], axis=1)
        tokens = (chosen[..., None] * spec.ratio + mx.arange(spec.ratio)).flatten(1)
        return tokens, (tokens <= positions)[:, None, None]
