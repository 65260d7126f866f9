"""Layers that keep the keys of an index, and attention over the tokens that an index chose.

n = queries of one sequence in a step, S = its tokens, K = tokens that one of them sees, H = KV
heads. An index layer ranks; attention itself is another layer's.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx

from ..config import KVOptions
from ..core import BlockSpec, PooledSpec
from ..errors import InvalidRequestError
from ..metal_kernels.attention_plan import AttentionPlan
from ..metal_kernels.paged_attention import AttentionCall, Softmax
from ..metal_kernels.stored import PLAIN, KVFormat
from .attention import Prepared
from .latent import MOST_SCORES
from .paged import Formats, PagedLayer, SequencePlace

NOWHERE = 1 << 23  # a block that no sequence has


class IndexLayer(PagedLayer):
    """The index of one attention layer.

    Keys are in the activations' dtype, whatever format keys and values have: fewer bits would
    choose other tokens.
    """

    prepared: Prepared

    def __init__(self, spec: Any, dtype: mx.Dtype, kinds: Sequence[tuple[KVFormat, int]]) -> None:
        super().__init__(spec, (PLAIN, PLAIN), dtype, kinds, heads=1)
        self.ready = lambda rows: True  # no kernel waits for it

    @classmethod
    def of(cls, spec: Any, formats: Formats, dtype: mx.Dtype) -> Self:
        """The one kind of layer there is for the spec."""
        return cls(spec, dtype)  # type: ignore[call-arg]  # subclasses know their planes

    @staticmethod
    def windowed(spec: Any, options: KVOptions) -> Any:
        """Raise InvalidRequestError where a window is asked for."""
        if options.window is not None:
            raise InvalidRequestError(
                f"kv_window is {options.window}, and this model chooses the tokens that it sees by "
                "itself, among all. Leave kv_window out.",
                param="kv_window",
            )
        return spec

    @staticmethod
    def check(spec: PooledSpec | BlockSpec, formats: Formats, *, key_bias: bool) -> None:
        """Nothing: an index is kept as it is, whatever the format of keys and values."""

    @abstractmethod
    def read_keys(self, place: SequencePlace) -> mx.array:
        """The keys of a sequence's tokens or blocks, in order."""

    def plan_heads(self, num_heads: int, width: int) -> int:
        """Never called: no kernel reads an index."""
        raise AssertionError("no kernel reads an index")

    def kernel(self, queries: mx.array, plan: AttentionPlan, softmax: Softmax) -> AttentionCall:
        """Never called, as `plan_heads`."""
        raise AssertionError("no kernel reads an index")

    def kernel_arrays(self) -> list[mx.array]:
        """Nothing, as `plan_heads`."""
        return []


class ChosenTokens:
    """The tokens that each token of a step sees; see `paged.Choice`.

    Args:
        layer: the index.
    """

    __slots__ = ("layer",)

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    @abstractmethod
    def mask(self, place: SequencePlace, own: slice, keys: mx.array) -> mx.array:
        """(n, S) or (heads, n, S) whether rows `own` of the step see each token of a sequence.

        `keys`: of the index, as of `IndexLayer.read_keys`.
        """

    @abstractmethod
    def tokens(self, place: SequencePlace, keys: mx.array) -> tuple[mx.array, mx.array]:
        """Positions that a sequence's tokens in the step see, and which of them count.

        Returns:
            (n, K) or (H, n, K), and (n, 1 or heads, 1, K).
        """

    def attend(self, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
        """As of `Choice`. Short segments read what they see alone, chunks all before them."""
        assert softmax.soft_cap is None, "no model with an index has one"
        outputs: list[mx.array] = []
        for place in self.layer.prepared.sequences():
            index = self.layer.read_keys(place)
            if place.pages is not None:
                tokens, seen = self.tokens(place, index)
                pair = [layer.read_tokens(plane, place, tokens) for plane in layer.views()]
                keys, values = (part.swapaxes(0, 1) for part in pair)  # (n, H, K, D)
                some = queries[place.rows][:, :, None]
                found = _attention(some, keys, values, softmax, seen)  # (n, heads, 1, V)
                outputs.append(found.flatten(1))
                continue
            keys, values = (layer.read_whole(plane, place)[None] for plane in layer.views())
            rows = max(1, MOST_SCORES // (queries.shape[1] * place.stop))
            for first in range(place.rows.start, place.rows.stop, rows):
                own = slice(first, min(first + rows, place.rows.stop))
                some = queries[own].swapaxes(0, 1)[None]  # (1, heads, n, D)
                some = mx.depends(some, outputs[-1]) if outputs else some  # one block's scores only
                found = _attention(some, keys, values, softmax, self.mask(place, own, index))
                outputs.append(found[0].swapaxes(0, 1).flatten(1))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def numbers_of(blocks: mx.array, count: int) -> mx.array:
    """(..., count) numbers of the chosen of blocks (..., B), in order; NOWHERE for none."""
    return mx.sort(mx.where(blocks, mx.arange(blocks.shape[-1]), NOWHERE), axis=-1)[..., :count]


def _attention(
    queries: mx.array, keys: mx.array, values: mx.array, softmax: Softmax, mask: mx.array
) -> mx.array:
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=softmax.scale, sinks=softmax.sinks, mask=mask
    )
