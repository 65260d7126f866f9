"""Rejection sampling of proposals that were drawn: the distribution of the model, more accepted.

A proposal x that was drawn from q is taken with probability min(1, p(x) / q(x)); else a token is
drawn from what p has more of than q. Then tokens have the distribution p, whatever q is (Leviathan
et al., "Fast inference from transformers via speculative decoding", 2023, appendix A.1). Of a
proposal without a distribution, such as an n-gram's, q is a point mass, and the rule becomes: draw
from p, and take x where that gives x. That is what the sampler does of every other row.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .draw import DrawRanks, draw, total_weight, uniforms
from .plan import Drawn, SamplingPlan
from .sampler import PlainChoice
from .truncation import kept_weights

# Streams of their own for each kind of number, so that what is proposed is independent of the rest.
PROPOSING = np.uint64(0x6A09E667F3BCC908)
RESIDUAL = np.uint64(0xBB67AE8584CAA73B)


class DrawnProposals:
    """Proposals and the weights that they were drawn with, until their places are sampled."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], tuple[int, mx.array]] = {}

    def clear(self) -> None:
        """Forget all."""
        self._found.clear()

    def put(self, slot: int, count: int, token_id: int, weights: mx.array) -> None:
        """Keep a proposal for the token with index `count` of a slot's answer.

        Args:
            slot, count: of the place.
            token_id: drawn from these weights.
            weights: (n,) float32, at least 0, not normalised; tokens beyond n have none.
        """
        self._found[slot, count] = token_id, weights

    def places(self, slots: Sequence[int], counts: NDArray[np.int64]) -> list[int]:
        """Which of the rows have a proposal."""
        if not self._found:
            return []
        pairs = zip(slots, counts.tolist(), strict=True)
        return [row for row, pair in enumerate(pairs) if pair in self._found]

    def choose(
        self,
        weights: mx.array,
        keys: Sequence[tuple[int, int]],
        streams: NDArray[np.uint64],
        vocab_size: int,
    ) -> mx.array:
        """Tokens of E rows that have a proposal.

        Args:
            weights: (E, width) float32 of the model's tokens, not normalised.
            keys: (slot, count) of each row.
            streams: (E,) of random numbers.
            vocab_size: of the model; the proposals are in it.

        Returns:
            (E,) uint32
        """
        found = [self._found[key] for key in keys]
        counts = np.array([count for _, count in keys], dtype=np.int64)
        proposed = mx.array([token_id for token_id, _ in found], mx.uint32)[:, None]  # (E, 1)
        width = weights.shape[-1]
        drawn = mx.stack([_fitted(some, vocab_size, width) for _, some in found])
        p, q = weights / total_weight(weights), drawn / total_weight(drawn)
        chances = mx.take_along_axis(p, proposed, axis=1)[:, 0]
        drawn_chances = mx.take_along_axis(q, proposed, axis=1)[:, 0]
        taken = mx.array(uniforms(streams, counts)) * drawn_chances < chances
        random = mx.array(uniforms(streams ^ RESIDUAL, counts)[:, None, None])
        rest = draw(mx.maximum(p - q, 0), random, DrawRanks.of(*weights.shape))
        return mx.where(taken, proposed[:, 0], rest)


def _fitted(weights: mx.array, vocab_size: int, width: int) -> mx.array:
    """(width,) the weights of tokens that the model has, and 0 for the others."""
    kept = weights[:vocab_size]
    return mx.pad(kept, (0, width - len(kept)))


class RejectionChoice(PlainChoice):
    """Chooses tokens at places with a drawn proposal by rejection, all others as always.

    Args:
        proposals: filled before a step that verifies them.
        vocab_size: of the model.
    """

    def __init__(self, proposals: DrawnProposals, vocab_size: int) -> None:
        super().__init__()
        self._proposals = proposals
        self._vocab_size = vocab_size

    def _drawn(
        self, plan: SamplingPlan, drawn: Drawn, rows: mx.array, counts: NDArray[np.int64]
    ) -> mx.array:
        """(D,) uint32, some of them proposals."""
        weights = kept_weights(rows, drawn.by_weight, drawn.by_rank)
        places = drawn.places.tolist()
        slots, own_counts = [plan.slots[place] for place in places], counts[drawn.places]
        usual = self._draw(weights, drawn.streams, own_counts)
        some = self._proposals.places(slots, own_counts)
        if not some:
            return usual
        keys = [(slots[row], int(own_counts[row])) for row in some]
        chosen = self._proposals.choose(
            weights[mx.array(some)], keys, drawn.streams[some], self._vocab_size
        )
        source = np.arange(len(places), dtype=np.int32)
        source[some] = len(places) + np.arange(len(some), dtype=np.int32)
        return mx.concatenate([usual, chosen])[mx.array(source)]


class ProposingChoice(PlainChoice):
    """Draws proposals with random numbers of their own, and keeps what they were drawn with.

    Attributes:
        weights: (row of the batch, (width,) weights) of the rows of the last step that were drawn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[int, mx.array] = {}

    def choose(
        self, plan: SamplingPlan, logits: mx.array, counts: NDArray[np.int64], mask: mx.array | None
    ) -> mx.array:
        """As of `PlainChoice`; `weights` are those of this step afterwards."""
        self.weights = {}
        return super().choose(plan, logits, counts, mask)

    def _drawn(
        self, plan: SamplingPlan, drawn: Drawn, rows: mx.array, counts: NDArray[np.int64]
    ) -> mx.array:
        weights = kept_weights(rows, drawn.by_weight, drawn.by_rank)
        self.weights = {place: weights[row] for row, place in enumerate(drawn.places.tolist())}
        return self._draw(weights, drawn.streams ^ PROPOSING, counts[drawn.places])
