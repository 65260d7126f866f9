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
from .draw import draw
from .plan import Plan
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

    def masked(self, logits: mx.array, mask: mx.array) -> mx.array:
        """(R, V) without the tokens that a mask forbids."""
        return self._mask(logits, mask)

    def choose(
        self, plan: Plan, logits: mx.array, counts: NDArray[np.int64], mask: mx.array | None
    ) -> mx.array:
        """Rows that need the same work together, then in order again."""
        if mask is not None:
            logits = self._mask(logits, mask)
        if plan.all_greedy:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        rows = logits if logits.shape[-1] == plan.width else pad_rows(logits)
        tokens = []
        if plan.greedy is not None:
            tokens.append(mx.argmax(_take(rows, plan.greedy), axis=-1).astype(mx.int32))
        if plan.drawn:
            weights = [kept_weights(_take(rows, group.rows), group.cuts) for group in plan.drawn]
            joined = weights[0] if len(weights) == 1 else mx.concatenate(weights)
            random = uniforms(plan.streams, counts[plan.drawn_places])[:, None]
            tokens.append(draw(joined, mx.array(random)))
        return tokens[0] if plan.order is None else mx.concatenate(tokens)[plan.order]


class KernelChoice(PlainChoice):
    """One dispatch for all rows, whatever their settings, mask included."""

    def choose(
        self, plan: Plan, logits: mx.array, counts: NDArray[np.int64], mask: mx.array | None
    ) -> mx.array:
        """Through `metal_kernels.sample`; a batch that is all greedy is one operation anyway."""
        if mask is None and plan.all_greedy:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        settings = plan.settings.copy()
        settings["count"] = counts
        return sample(logits, settings_array(settings), mask)


def _take(rows: mx.array, places: mx.array | slice) -> mx.array:
    """The rows of a group; all of them cost nothing."""
    return rows if isinstance(places, slice) else rows[places]
