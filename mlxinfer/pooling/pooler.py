"""Hidden states of a pass to one vector or score a row: pooling, projections, heads.

Source: sentence-transformers 6 (its modules Pooling, Dense, LayerNorm, Normalize, LogitScore), and
the heads of transformers' BertForSequenceClassification and its kin. N = rows, d = numbers of each.
"""

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from ..layers.linear import Projection
from ..layers.mlp import PLAIN, Activation
from .segments import RowGroup

Vectors = Callable[[mx.array], mx.array]  # (N, d) -> (N, e)
OfGroup = Callable[[mx.array], mx.array]  # (n, L, hidden) -> (n, hidden)

ACTIVATIONS: dict[str, Activation] = {**PLAIN, "identity": lambda x: x, "sigmoid": mx.sigmoid}
TINY = 1e-12  # least length that a vector is divided by


class Pooler:
    """Pools, then applies what comes behind.

    Args:
        modes: of `config.MODES`; their vectors stand side by side.
        behind: applied one after the other.
    """

    def __init__(self, modes: Sequence[str], behind: Sequence[Vectors]) -> None:
        self._modes = [_MODES[mode] for mode in modes]
        self.behind = list(behind)

    def __call__(
        self, hidden: mx.array, groups: Sequence[RowGroup], num_prompt: Sequence[int]
    ) -> mx.array:
        """hidden (T, hidden_size) of a pass -> (N, d) float32 in the order of its rows.

        Args:
            hidden: behind the last norm.
            groups: of the pass.
            num_prompt: (N,) tokens at the beginning of each row that do not count.
        """
        pooled, row = [], 0
        for group in groups:
            states = group.of(hidden).astype(mx.float32)
            skipped = num_prompt[row : row + group.count]
            row += group.count
            pooled.append(self._of_group(states, skipped))
        vectors = pooled[0] if len(pooled) == 1 else mx.concatenate(pooled)
        for module in self.behind:
            vectors = module(vectors)
        return vectors

    def _of_group(self, states: mx.array, skipped: Sequence[int]) -> mx.array:
        """(n, L, hidden) -> (n, modes * hidden)."""
        if len(set(skipped)) > 1:
            count = range(len(skipped))
            each = [self._of_group(states[i : i + 1], skipped[i : i + 1]) for i in count]
            return mx.concatenate(each)
        found = [mode(states, min(skipped[0], states.shape[1] - 1)) for mode in self._modes]
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=-1)


def _mean(states: mx.array, skipped: int) -> mx.array:
    return states[:, skipped:].mean(axis=1)


def _scaled_sum(states: mx.array, skipped: int) -> mx.array:
    kept = states[:, skipped:]
    return kept.sum(axis=1) / kept.shape[1] ** 0.5


def _weighted_mean(states: mx.array, skipped: int) -> mx.array:
    weights = mx.arange(skipped + 1, states.shape[1] + 1, dtype=mx.float32)[:, None]
    return (states[:, skipped:] * weights).sum(axis=1) / weights.sum()


_MODES: dict[str, Callable[[mx.array, int], mx.array]] = {
    "cls": lambda states, skipped: states[:, skipped],
    "lasttoken": lambda states, skipped: states[:, -1],
    "max": lambda states, skipped: states[:, skipped:].max(axis=1),
    "mean": _mean,
    "mean_sqrt_len_tokens": _scaled_sum,
    "weightedmean": _weighted_mean,
}


def normalised(vectors: mx.array) -> mx.array:
    """(N, d) to length 1."""
    lengths = mx.sqrt(mx.square(vectors).sum(axis=-1, keepdims=True))
    return vectors / mx.maximum(lengths, TINY)


class Projected:
    """A projection and an activation: (N, d) -> (N, e)."""

    __slots__ = ("activation", "dtype", "projection")

    def __init__(self, projection: Projection, activation: str, dtype: mx.Dtype) -> None:
        self.projection = projection
        self.activation = ACTIVATIONS[activation]
        self.dtype = dtype  # of the projection's weights

    def __call__(self, vectors: mx.array) -> mx.array:
        """(N, d) -> (N, e) float32."""
        return self.activation(self.projection(vectors.astype(self.dtype)).astype(mx.float32))


def layer_normed(weight: mx.array, bias: mx.array) -> Vectors:
    """A layer norm with torch's epsilon."""
    return partial(mx.fast.layer_norm, weight=weight, bias=bias, eps=1e-5)


def token_scores(logits: Vectors, yes: int, no: int | None, dtype: mx.Dtype) -> Vectors:
    """Scores of rows by the logits of tokens that would come next: (N, hidden) -> (N, 1) float32.

    Args:
        logits: (N, hidden) -> (N, vocab).
        yes: token with the logit that counts.
        no: token with the logit that is taken off; None: none is.
        dtype: of hidden states.
    """

    def scores(vectors: mx.array) -> mx.array:
        found = logits(vectors.astype(dtype))
        score = found[:, yes : yes + 1]
        score = score if no is None else score - found[:, no : no + 1]
        return score.astype(mx.float32)

    return scores
