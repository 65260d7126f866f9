"""An index that ranks blocks of tokens by their best token, for each group of query heads.

r = tokens of a block, B = blocks of a sequence, d = numbers of a key, T = tokens of the step, Hi =
heads of the index, each of a KV head, n = tokens of one sequence in the step, S = its tokens.
Source: transformers' MiniMax M3.
"""

import mlx.core as mx

from ..core import BlockSpec
from ..metal_kernels.stored import PLAIN
from .index import ChosenTokens, IndexLayer, numbers_of
from .latent import best
from .paged import SequencePlace


class BlockLayer(IndexLayer):
    """The index keys of all tokens, in pages as keys and values are.

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
    """The blocks of the best tokens.

    Args:
        layer: the index.
        queries, served: as of `BlockLayer.choose`.
    """

    __slots__ = ("_queries", "_served")

    layer: BlockLayer

    def __init__(self, layer: BlockLayer, queries: mx.array, served: int) -> None:
        super().__init__(layer)
        self._queries, self._served = queries, served

    def _best(self, place: SequencePlace, own: slice, keys: mx.array) -> tuple[mx.array, mx.array]:
        """For rows `own` (n) of the step: blocks that each sees (Hi, n, B), positions (n, 1)."""
        spec, positions = self.layer.spec, place.positions(own)
        queries = self._queries[own].swapaxes(0, 1).astype(mx.float32)  # (Hi, n, d)
        scores = queries @ keys.astype(mx.float32).T  # (Hi, n, S)
        scores = mx.where(mx.arange(len(keys)) <= positions, scores, -mx.inf)
        rest = [(0, 0), (0, 0), (0, -len(keys) % spec.block)]
        scores = mx.pad(scores, rest, constant_values=-mx.inf)
        ranks = mx.unflatten(scores, -1, (-1, spec.block)).max(axis=-1)  # (Hi, n, B)
        numbers, last = mx.arange(ranks.shape[-1]), positions // spec.block
        visible = numbers <= last
        ranks = mx.where(visible & (numbers > last - spec.num_near), mx.inf, ranks)
        return best(ranks, visible, spec.num_ranked), positions

    def mask(self, place: SequencePlace, own: slice, keys: mx.array) -> mx.array:
        """As of `ChosenTokens`, (heads, n, S)."""
        blocks, positions = self._best(place, own, keys)
        seen = mx.repeat(blocks, self.layer.spec.block, axis=-1)[..., : place.stop]
        return mx.repeat(seen & (mx.arange(place.stop) <= positions), self._served, axis=0)

    def tokens(self, place: SequencePlace, keys: mx.array) -> tuple[mx.array, mx.array]:
        """As of `ChosenTokens`, (Hi, n, K) and (n, heads, 1, K)."""
        blocks, positions = self._best(place, place.rows, keys)
        spec = self.layer.spec
        chosen = numbers_of(blocks, spec.num_ranked)[..., None] * spec.block
        tokens = (chosen + mx.arange(spec.block)).flatten(2)
        seen = (tokens <= positions).swapaxes(0, 1)[:, :, None]  # (n, Hi, 1, K)
        return tokens, mx.repeat(seen, self._served, axis=1)
