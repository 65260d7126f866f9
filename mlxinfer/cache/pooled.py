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

from ..config import KVOptions
from ..core import PooledSpec
from ..errors import InvalidRequestError
from ..metal_kernels.attention_plan import AttentionPlan
from ..metal_kernels.paged_attention import AttentionCall, Softmax
from ..metal_kernels.stored import PLAIN, KVFormat
from .attention import Prepared
from .chunks import cut_runs
from .latent import MOST_SCORES, ranked
from .paged import Formats, PagedLayer, SequencePlace

NOWHERE = 1 << 24  # a block that no sequence has


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


class PooledLayer(PagedLayer):
    """The index of one attention layer. It ranks blocks; attention itself is another layer's.

    A block ranks by the sum over heads of weight * max(query · key, 0), and of equal ranks the
    earlier counts. A token sees the best of the blocks that are complete with it, and those of the
    open block up to itself.

    Keys are in the activations' dtype, whatever format keys and values have: fewer bits would
    choose other tokens.
    """

    spec: PooledSpec
    prepared: Prepared
    whole_pages = True

    def __init__(self, spec: PooledSpec, formats: Formats, dtype: mx.Dtype) -> None:
        fmt = PooledFormat(raw_dim=spec.raw_dim, rope_axes=spec.rope_axes)
        kinds = [(fmt, spec.dim // spec.ratio)]
        super().__init__(spec, (PLAIN, PLAIN), dtype, kinds, heads=1)
        self.ready = lambda rows: True  # no kernel waits for it

    @classmethod
    def of(cls, spec: PooledSpec, formats: Formats, dtype: mx.Dtype) -> "PooledLayer":
        """The one kind of layer there is for the spec."""
        return cls(spec, formats, dtype)

    @staticmethod
    def windowed(spec: PooledSpec, options: KVOptions) -> PooledSpec:
        """Raise InvalidRequestError where a window is asked for."""
        if options.window is not None:
            raise InvalidRequestError(
                f"kv_window is {options.window}, and this model chooses the tokens that it sees by "
                "itself, among all. Leave kv_window out.",
                param="kv_window",
            )
        return spec

    @staticmethod
    def check(spec: PooledSpec, formats: Formats, *, key_bias: bool) -> None:
        """Nothing: an index is kept as it is, whatever the format of keys and values."""

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
    ) -> "BlockChoice | None":
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
        return BlockChoice(self, queries, weights)

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

    # -- kernels --------------------------------------------------------------------------------

    def plan_heads(self, num_heads: int, width: int) -> int:
        """Never called: no kernel reads an index."""
        raise AssertionError("no kernel reads an index")

    def kernel(self, queries: mx.array, plan: AttentionPlan, softmax: Softmax) -> AttentionCall:
        """Never called, as `plan_heads`."""
        raise AssertionError("no kernel reads an index")

    def kernel_arrays(self) -> list[mx.array]:
        """Nothing, as `plan_heads`."""
        return []


class BlockChoice:
    """The blocks that each token of a step sees; see `paged.Choice`.

    Args:
        layer: the index.
        queries, weights: as of `PooledLayer.choose`.
    """

    __slots__ = ("_layer", "_queries", "_weights")

    def __init__(self, layer: PooledLayer, queries: mx.array, weights: mx.array) -> None:
        self._layer, self._queries, self._weights = layer, queries, weights

    def attend(self, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
        """As of `Choice`. Short segments read what they see alone, chunks all before them."""
        assert softmax.soft_cap is None, "no model with an index has one"
        outputs: list[mx.array] = []
        for place in self._layer.prepared.sequences():
            blocks = self._layer.read_keys(place)  # (S // r, d)
            if place.pages is not None:
                tokens, seen = self._tokens(place, blocks)
                pair = [layer.read_tokens(plane, place, tokens) for plane in layer.views()]
                keys, values = (part.swapaxes(0, 1) for part in pair)  # (n, H, K, D)
                some, mask = queries[place.rows][:, :, None], seen[:, None, None]
                found = _attention(some, keys, values, softmax, mask)  # (n, heads, 1, V)
                outputs.append(found.flatten(1))
                continue
            keys, values = (layer.read_whole(plane, place)[None] for plane in layer.views())
            rows = max(1, MOST_SCORES // (queries.shape[1] * place.stop))
            for first in range(place.rows.start, place.rows.stop, rows):
                own = slice(first, min(first + rows, place.rows.stop))
                some = queries[own].swapaxes(0, 1)[None]  # (1, heads, n, D)
                some = mx.depends(some, outputs[-1]) if outputs else some  # one block's scores only
                found = _attention(some, keys, values, softmax, self._mask(place, own, blocks))
                outputs.append(found[0].swapaxes(0, 1).flatten(1))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _best(self, place: SequencePlace, own: slice, keys: mx.array) -> tuple[mx.array, mx.array]:
        """For rows `own` (n) of the step: blocks that each sees (n, S // r), positions (n, 1)."""
        spec = self._layer.spec
        first = place.start + own.start - place.rows.start
        positions = first + mx.arange(own.stop - own.start)[:, None]
        complete = mx.arange(len(keys)) < (positions + 1) // spec.ratio
        queries, weights = self._queries[own], self._weights[own]
        return ranked(queries, weights, keys, complete, spec.num_ranked), positions

    def _mask(self, place: SequencePlace, own: slice, keys: mx.array) -> mx.array:
        """(n, S) whether rows `own` of the step see each token of their sequence."""
        blocks, positions = self._best(place, own, keys)
        ratio, tokens = self._layer.spec.ratio, mx.arange(place.stop)
        by_token = mx.repeat(blocks, ratio, axis=1)[:, : place.stop]
        seen = mx.pad(by_token, [(0, 0), (0, place.stop - by_token.shape[1])])
        is_open = tokens // ratio == (positions + 1) // ratio
        return seen | (is_open & (tokens <= positions))

    def _tokens(self, place: SequencePlace, keys: mx.array) -> tuple[mx.array, mx.array]:
        """Positions (n, K) of what a sequence's tokens in the step see, and which of them count."""
        blocks, positions = self._best(place, place.rows, keys)
        spec = self._layer.spec
        numbers = mx.where(blocks, mx.arange(len(keys)), NOWHERE)
        best = mx.sort(numbers, axis=-1)[:, : spec.num_ranked]
        best = mx.concatenate([best, (positions + 1) // spec.ratio], axis=1)
        tokens = (best[..., None] * spec.ratio + mx.arange(spec.ratio)).flatten(1)
        return tokens, tokens <= positions


def _attention(
    queries: mx.array, keys: mx.array, values: mx.array, softmax: Softmax, mask: mx.array
) -> mx.array:
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=softmax.scale, sinks=softmax.sinks, mask=mask
    )
