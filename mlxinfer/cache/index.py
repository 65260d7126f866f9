"""Layers that keep the keys of an index, and attention over the tokens that the index chose.

An index layer only ranks tokens. Another layer attends to them. n = queries of one sequence in a
step, S = tokens of the sequence, K = tokens that one query attends to, H = KV heads.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from ..cache_specs import BlockSpec, CompressedSpec, PooledSpec
from ..config import KVOptions
from ..metal_kernels.paged_attention import Softmax
from ..metal_kernels.stored import PLAIN, KVFormat
from .attention import Prepared
from .latent import MOST_SCORES, best, chooses_itself
from .paged import Formats, PagedLayer, SequencePlace

NOWHERE = 1 << 23  # a block that no sequence has


class IndexLayer(PagedLayer, ABC):
    """The index of one attention layer.

    Its keys have the activations' dtype, even if keys and values are quantised: with fewer bits the
    index would choose other tokens.
    """

    prepared: Prepared

    def __init__(self, spec: Any, dtype: mx.Dtype, kinds: Sequence[tuple[KVFormat, int]]) -> None:
        super().__init__(spec, (PLAIN, PLAIN), dtype, kinds, heads=1)
        self.ready = lambda *_: True  # no kernel waits for it

    @classmethod
    def of(cls, spec: Any, formats: Formats, dtype: mx.Dtype) -> Self:
        return cls(spec, dtype)  # type: ignore[call-arg]  # subclasses know their planes

    @staticmethod
    def windowed(spec: Any, options: KVOptions) -> Any:
        """Raise InvalidRequestError: a window is asked for."""
        raise chooses_itself(options)

    @staticmethod
    def check(
        spec: PooledSpec | CompressedSpec | BlockSpec, formats: Formats, *, key_bias: bool
    ) -> None:
        """Nothing to check: the format of keys and values does not change an index."""

    @abstractmethod
    def read_keys(self, place: SequencePlace) -> mx.array:
        """The keys of a sequence's tokens or blocks, in order."""


@dataclass(slots=True, eq=False)
class ChosenTokens:
    """The tokens that each token of a step sees; see `paged.Choice`."""

    layer: Any  # the index

    @abstractmethod
    def mask(self, place: SequencePlace, rows: slice, keys: mx.array) -> mx.array:
        """Whether rows `own` of the step see each token of a sequence, (n, S) or (heads, n, S).

        `keys`: of the index, see `IndexLayer.read_keys`.
        """

    @abstractmethod
    def tokens(self, place: SequencePlace, keys: mx.array) -> tuple[mx.array, mx.array]:
        """Positions that a sequence's tokens in the step see, and which of them count.

        Returns:
            (n, K) or (H, n, K), and (n, 1 or heads, 1, K).
        """

    def attend(self, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
        """See `Choice`. Short segments read only the chosen tokens; chunks mask the others."""
        assert softmax.soft_cap is None, "no model with an index has one"
        outputs: list[mx.array] = []
        for place in self.layer.prepared.sequences():
            index = self.layer.read_keys(place)
            if place.pages is not None:
                tokens, seen = self.tokens(place, index)
                pair = [layer.read_tokens(plane, place, tokens) for plane in layer.views()]
                keys, values = (part.swapaxes(0, 1) for part in pair)  # (n, H, K, D)
                heads = queries[place.rows][:, :, None]
                output = attention(heads, keys, values, softmax, seen)  # (n, heads, 1, V)
                outputs.append(output.flatten(1))
                continue
            keys, values = (layer.read_whole(plane, place)[None] for plane in layer.views())
            rows = max(1, MOST_SCORES // (queries.shape[1] * place.stop))
            for first in range(place.rows.start, place.rows.stop, rows):
                block = slice(first, min(first + rows, place.rows.stop))
                heads = queries[block].swapaxes(0, 1)[None]  # (1, heads, n, D)
                if outputs:  # one block's scores only
                    heads = mx.depends(heads, outputs[-1])
                output = attention(heads, keys, values, softmax, self.mask(place, block, index))
                outputs.append(output[0].swapaxes(0, 1).flatten(1))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def numbers_of(blocks: mx.array, count: int) -> mx.array:
    """(..., count) numbers of the chosen ones of blocks (..., B), in order, then NOWHERE."""
    return mx.sort(mx.where(blocks, mx.arange(blocks.shape[-1]), NOWHERE), axis=-1)[..., :count]


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, softmax: Softmax, mask: mx.array
) -> mx.array:
    """Queries (B, heads, n, D) over the keys and values (B, H, S, D) that the mask shows."""
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=softmax.scale, sinks=softmax.sinks, mask=mask
    )


class BlockIndexLayer(IndexLayer):
    """The index keys of all tokens, in pages as keys and values are (transformers' MiniMax M3).

    A block ranks by the highest product of a query and a key of its tokens, and of equal ranks the
    earlier counts. A token's own block comes first.
    """

    spec: BlockSpec

    def __init__(self, spec: BlockSpec, dtype: mx.Dtype) -> None:
        super().__init__(spec, dtype, [(PLAIN, spec.dim)])

    def choose(self, queries: mx.array, keys: mx.array, served: int) -> "BlockChoice | None":
        """Store this step's keys, and rank the blocks that its tokens may see.

        Args:
            queries: (T, Hi, d), position-encoded.
            keys: (T, d), position-encoded.
            served: query heads that see what a head of the index chooses.

        Returns:
            None: every token sees all tokens before it.
        """
        place = self.prepared.place
        self.write([PLAIN.encode(keys[:, None])], place, self.prepared.page_writes)
        last = int(self.prepared.metadata.positions.max())
        if last < self.spec.num_ranked * self.spec.block:
            return None
        return BlockChoice(self, queries, served)

    def read_keys(self, place: SequencePlace) -> mx.array:
        """(S, d)."""
        return self.read_whole(self.planes[0], place)[0]


class BlockChoice(ChosenTokens):
    """The blocks of the best tokens, chosen for each group of query heads.

    B = blocks of a sequence, S = its tokens, n = its tokens in the step, T = tokens of the step,
    Hi = heads of the index, one for each KV head, d = numbers of a key.

    Args:
        queries, served: see `BlockIndexLayer.choose`.
    """

    __slots__ = ("_queries", "_served")

    layer: BlockIndexLayer

    def __init__(self, layer: BlockIndexLayer, queries: mx.array, served: int) -> None:
        super().__init__(layer)
        self._queries, self._served = queries, served

    def _best(self, place: SequencePlace, rows: slice, keys: mx.array) -> tuple[mx.array, mx.array]:
        """For rows `own` (n) of the step: blocks that each sees (Hi, n, B), positions (n, 1)."""
        spec, positions = self.layer.spec, place.positions(rows)
        queries = self._queries[rows].swapaxes(0, 1).astype(mx.float32)  # (Hi, n, d)
        scores = queries @ keys.astype(mx.float32).T  # (Hi, n, S)
        scores = mx.where(mx.arange(len(keys)) <= positions, scores, -mx.inf)
        rest = [(0, 0), (0, 0), (0, -len(keys) % spec.block)]
        scores = mx.pad(scores, rest, constant_values=-mx.inf)
        ranks = mx.unflatten(scores, -1, (-1, spec.block)).max(axis=-1)  # (Hi, n, B)
        numbers, last = mx.arange(ranks.shape[-1]), positions // spec.block
        visible = numbers <= last
        ranks = mx.where(visible & (numbers > last - spec.num_near), mx.inf, ranks)
        return best(ranks, visible, spec.num_ranked), positions

    def mask(self, place: SequencePlace, rows: slice, keys: mx.array) -> mx.array:
        """See `ChosenTokens`, (heads, n, S)."""
        blocks, positions = self._best(place, rows, keys)
        seen = mx.repeat(blocks, self.layer.spec.block, axis=-1)[..., : place.stop]
        return mx.repeat(seen & (mx.arange(place.stop) <= positions), self._served, axis=0)

    def tokens(self, place: SequencePlace, keys: mx.array) -> tuple[mx.array, mx.array]:
        """See `ChosenTokens`, (Hi, n, K) and (n, heads, 1, K)."""
        blocks, positions = self._best(place, place.rows, keys)
        spec = self.layer.spec
        chosen = numbers_of(blocks, spec.num_ranked)[..., None] * spec.block
        tokens = (chosen + mx.arange(spec.block)).flatten(2)
        seen = (tokens <= positions).swapaxes(0, 1)[:, :, None]  # (n, Hi, 1, K)
        return tokens, mx.repeat(seen, self._served, axis=1)
