"""How the next token of every row is chosen: in plain MLX, or by one Metal kernel.

Knows logits that were penalised and biased already, and the plan of the batch; no requests.
"""

from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..metal_kernels.bitmask import bitmask
from ..metal_kernels.sample import sample, settings_array
from .bitmask import apply_bitmask
from .blocks import pad_rows
from .draw import DrawRanks, draw
from .plan import Drawn, Plan
from .randomness import uniforms
from .truncation import kept_weights


class Choice(Protocol):
    """A way to choose."""

    def masked(self, logits: mx.array, mask: mx.array) -> mx.array:
        """(R, V) without the tokens that a mask (R, ceil(V / 32)) forbids."""
        ...

    def choose(
        self, plan: Plan, logits: mx.array, counts: NDArray[np.int64], mask: mx.array | None
    ) -> mx.array:
        """(R,) int32 a token of each row.

        Args:
            plan: of the batch.
            logits: (R, V), or padded rows (R, width).
            counts: (R,) index of each token that is chosen.
            mask: (R, ceil(V / 32)) uint32 tokens that are allowed, of rows that are not padded;
                None: all.
        """
        ...


class PlainChoice:
    """MLX's own operations.

    Args:
        mask_kernel: masks are applied by a Metal kernel all the same.
    """

    def __init__(self, *, mask_kernel: bool = False) -> None:
        self._mask = bitmask if mask_kernel else apply_bitmask
        self._ranks: dict[tuple[int, ...], DrawRanks] = {}  # by shape: one for each number of rows

    def masked(self, logits: mx.array, mask: mx.array) -> mx.array:
        """(R, V) without the tokens that a mask forbids."""
        return self._mask(logits, mask)

    def choose(
        self, plan: Plan, logits: mx.array, counts: NDArray[np.int64], mask: mx.array | None
    ) -> mx.array:
        """Rows that need the same work together, then in order again."""
        if mask is not None:
            logits = self._mask(logits, mask)
        if plan.drawn is None:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        rows = logits if logits.shape[-1] == plan.width else pad_rows(logits, plan.padding)
        if plan.order is not None:
            rows = rows[plan.order]
        if plan.num_greedy:
            greedy, rows = mx.split(rows, [plan.num_greedy])
            tokens = [mx.argmax(greedy, axis=-1), self._drawn(plan.drawn, rows, counts)]
            chosen = mx.concatenate(tokens)
        else:
            chosen = self._drawn(plan.drawn, rows, counts)
        if plan.places is not None:
            chosen = mx.take_along_axis(chosen, plan.places, axis=0)
        return chosen.view(mx.int32)

    def _drawn(self, drawn: Drawn, rows: mx.array, counts: NDArray[np.int64]) -> mx.array:
        """(D,) uint32 tokens of padded rows (D, width); counts (R,) of the whole batch."""
        weights = kept_weights(rows, drawn.by_weight, drawn.by_rank)
        random = uniforms(drawn.streams, counts[drawn.places])
        ranks = self._ranks.get(rows.shape)
        if ranks is None:
            ranks = self._ranks[rows.shape] = DrawRanks.of(*rows.shape)
        return draw(weights, mx.array(random[:, None, None]), ranks)


class KernelChoice(PlainChoice):
    """One dispatch for all rows, whatever their settings, mask included."""

    def choose(
        self, plan: Plan, logits: mx.array, counts: NDArray[np.int64], mask: mx.array | None
    ) -> mx.array:
        """Through `metal_kernels.sample`; a batch that is all greedy is one operation anyway."""
        if mask is None and plan.drawn is None:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        settings = plan.settings.copy()
        settings["count"] = counts
        return sample(logits, settings_array(settings), mask)
