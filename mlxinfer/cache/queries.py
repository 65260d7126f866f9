"""What all ways to attend in plain MLX share: which queries are asked, and what of tails they see.

B segments, Q tokens each (padded), R = 2 * page_size: the ring of a tail.
"""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .pool import LayerPool
from .segments import Ints, Segments
from .window import AttentionWindow

HIDDEN = float(np.finfo(np.float32).min)  # additive mask of what must not be seen


@dataclass(frozen=True, slots=True)
class ShortQueries:
    """The queries of B short segments and their tails."""

    rows: mx.array | slice | None  # (B * Q,) flat rows of the queries; None: all of them
    shape: tuple[int, int]  # (B, Q)
    unpad: mx.array | None  # (T',) from the padded (B * Q) outputs back to flat order
    slots: mx.array | slice  # (B,) tails
    tail_mask: mx.array  # (B, 1, Q, R)

    def take(self, queries: mx.array) -> mx.array:
        """(T, heads, D) -> (B, Q, heads, D)."""
        own = queries if self.rows is None else queries[self.rows]
        return own.reshape(*self.shape, *queries.shape[1:])

    def tails(self, pool: LayerPool) -> tuple[mx.array, mx.array, mx.array]:
        """Keys and values (B, H, R, D) of the tails, and the mask (B, 1, Q, R)."""
        return *pool.read_tails(self.slots), self.tail_mask

    def flat(self, outputs: mx.array) -> mx.array:
        """(B, Q, heads, D) -> (T', heads * D)."""
        flat = outputs.reshape(self.shape[0] * self.shape[1], -1)
        return flat if self.unpad is None else flat[self.unpad]


def plan_queries(
    short: Segments, window: AttentionWindow, page_size: int, num_rows: int
) -> tuple[ShortQueries, Ints]:
    """The queries of some segments of a step of `num_rows` tokens, and their positions (B, Q)."""
    step, unpad = short.memoised("padding", lambda: _padding(short))
    positions = short.starts[:, None] + step
    everything = step.size == num_rows and unpad is None
    queries = ShortQueries(
        rows=None if everything else short.memoised("rows", lambda: _rows(short, step)),
        shape=(len(short), short.width),
        unpad=unpad,
        slots=short.memoised("slots", lambda: _as_index(short.slots)),
        tail_mask=_tail_mask(short, positions, window, page_size),
    )
    return queries, positions


def _padding(short: Segments) -> tuple[Ints, mx.array | None]:
    """(B, Q) the token of its segment at each place, the last one repeated; and how to undo it."""
    step = np.minimum(np.arange(short.width, dtype=np.int32), short.counts[:, None] - 1)
    real = np.arange(short.width) < short.counts[:, None]  # (B, Q)
    return step, None if real.all() else mx.array(np.flatnonzero(real))


def _rows(short: Segments, step: Ints) -> mx.array | slice:
    return _as_index((short.rows[:, None] + step).ravel())


def _as_index(rows: Ints) -> mx.array | slice:
    """Consecutive rows as a slice, which costs no copy; any others as an array."""
    start, stop = int(rows[0]), int(rows[-1]) + 1
    if stop - start == len(rows) and bool((np.diff(rows) == 1).all()):
        return slice(start, stop)
    return mx.array(rows)


def _tail_mask(
    short: Segments, positions: Ints, window: AttentionWindow, page_size: int
) -> mx.array:
    """(B, 1, Q, R) additive: ring slot j holds the one position p >= sealed with p % R == j."""
    ring, sealed = 2 * page_size, short.sealed[:, None]
    if window.size is None or window.size >= ring:  # a token sees all of the tail before it
        begins = short.memoised(  # rows of the masks, but for the positions
            "tail masks", lambda: (sealed // page_size % 2 * ring - sealed)[:, None]
        )
        return _ring_masks(page_size)[mx.array(positions[:, None] + begins)]
    slots = np.arange(ring, dtype=np.int32)[None]
    held = sealed + (slots - sealed) % ring  # (B, R)
    return mx.array(additive(window.sees(positions[:, :, None], held[:, None]))[:, None])


@cache
def _ring_masks(page_size: int) -> mx.array:
    """(2 * R, R) additive: row h * R + t for the t-th token of a tail that begins in half h."""
    begins = page_size * np.arange(2)[:, None, None]
    places = np.arange(2 * page_size)
    seen = (places - begins) % (2 * page_size) <= places[:, None]
    return mx.array(additive(seen).reshape(-1, 2 * page_size))


def additive(visible: NDArray[np.bool_]) -> NDArray[np.float32]:
    """0 where something is visible, else as low as can be."""
    return np.where(visible, np.float32(0.0), np.float32(HIDDEN))
