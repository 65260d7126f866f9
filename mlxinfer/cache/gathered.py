"""Short segments that attend in plain MLX: the twin of the kernels, and the path without Metal.

The pages of several segments are gathered into one padded array, and their tails are read beside
them. B = segments, Q = tokens of each (padded), R = 2 * page_size, the ring of a tail, n = gathered
pages of each (padded), V = value dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..metal_kernels.attention_plan import Numbers, joined
from ..metal_kernels.gathered_attention import (
    FUSED,
    GATHERED,
    gathered_attention,
    gathered_fused,
    gathered_pages,
    whole_mask,
)
from ..metal_kernels.paged_attention import HIDDEN, Softmax
from ..metal_kernels.variants import first_way
from .inputs import Ints, Segments, StepMetadata
from .paged import PagedLayer
from .pages import AttentionWindow, PageGroup

BLOCK_BYTES = 1 << 25  # gathered together for a layer, where more than one segment is


def gathered_parts(
    segments: Segments, metadata: StepMetadata, group: PageGroup, layers: Sequence[PagedLayer]
) -> "list[Gathered]":
    if group.window.size is None:  # all sealed pages are seen
        blocks = segments.memoised(
            ("blocks", group.number), lambda: _blocks(segments, group, layers)
        )
    else:
        blocks = _blocks(segments, group, layers)
    if len(blocks) == 1:
        return [_gathered_part(segments, metadata, group)]
    parts = segments.memoised(
        ("parts", *[block.tobytes() for block in blocks]),
        lambda: [segments.some(block) for block in blocks],
    )
    together = [part.at(segments.starts[block]) for part, block in zip(parts, blocks, strict=True)]
    return [_gathered_part(part, metadata, group) for part in together]


def _blocks(
    segments: Segments, group: PageGroup, layers: Sequence[PagedLayer]
) -> list[NDArray[np.int64]]:
    pages = num_visible(segments, group.window, group.page_size)
    token_bytes = max([layer.read_bytes for layer in layers], default=1)
    return gather_blocks(pages, BLOCK_BYTES // (token_bytes * group.page_size))


def num_visible(short: Segments, window: AttentionWindow, page_size: int) -> Ints:
    """(B,) the number of sealed pages that each segment sees at least a part of."""
    pages = short.sealed // page_size
    if window.size is None:
        return pages
    first = window.lowest_of(short.starts) // page_size
    num_sinks = np.minimum(window.kept_pages(page_size), first)
    return np.minimum(num_sinks, pages) + np.maximum(pages - first, 0)


def gather_blocks(num_pages: Ints, most: int) -> list[NDArray[np.int64]]:
    """Which of B segments are gathered together: places among the B, in order.

    Those of like length are together, since shorter ones are padded. Segments that see no page
    have a block of their own: there is nothing to pad them with.

    Args:
        num_pages: (B,) that each segment sees.
        most: pages of a block, padding included, unless it is one segment.
    """
    if num_pages.min() > 0 and num_pages.max() * len(num_pages) <= most:  # most steps
        return [np.arange(len(num_pages))]
    order = np.argsort(num_pages, kind="stable")
    blocks: list[list[int]] = []
    shortest = 0
    for place, count in zip(order.tolist(), num_pages[order].tolist(), strict=True):
        together = blocks and (not count or (shortest and (len(blocks[-1]) + 1) * count <= most))
        if together:
            blocks[-1].append(place)
        else:
            blocks.append([place])
            shortest = count
    return [np.array(sorted(block)) for block in blocks]


@dataclass(slots=True)
class Gathered:
    """B short segments that attend together over gathered pages and tails."""

    segments: Segments  # the B segments
    # (B * Q,) flat rows of the queries; None: all of the step, in order
    rows: slice | mx.array | None
    # (T',) from the padded (B * Q) outputs back to flat order; None: nothing is padded
    unpad: mx.array | None
    slots: mx.array | slice  # (B,) of the tails
    tail_mask: mx.array  # (B, 1, Q, R) additive
    page_ids: mx.array | None  # (B, n) of the pages that are gathered; None: no segment sees any
    mask: mx.array | None  # (B, 1, 1 or Q, n * page_size) additive; None: all of the pages is seen
    # of both, for MLX's own attention, once a layer asked for it
    _whole_mask: mx.array | None = None

    def attend(self, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
        """Queries (B * Q, heads, D) -> what the segments see, (T', heads * V)."""
        pages = None
        if self.page_ids is not None:
            # Without the dependency all layers might gather first.
            ids = mx.depends([self.page_ids], [queries])[0]
            keys, values = gathered_pages(layer.keys, layer.values, ids, layer.page_size)
            pages = keys.swapaxes(0, 1), values.swapaxes(0, 1)
        tails = layer.read_tails(self.slots)
        can_fuse = layer.fastest is not first_way and softmax.soft_cap is None
        size = self.tail_mask.shape  # (B, 1, Q, R)
        if can_fuse and layer.fastest(size[2], size[0], (GATHERED, FUSED)) == FUSED:
            if self._whole_mask is None:
                self._whole_mask = whole_mask(self.mask, self.tail_mask, pages)
            outputs = gathered_fused(queries, pages, tails, self._whole_mask, softmax)
        else:
            masks = self.mask, self.tail_mask
            outputs = gathered_attention(queries, pages, tails, masks, softmax)
        return outputs if self.unpad is None else outputs[self.unpad]


def _gathered_part(segments: Segments, metadata: StepMetadata, group: PageGroup) -> Gathered:
    """How segments attend. All segments see at least one page, or none sees any."""
    step, rows, unpad, slots, tail_begins = segments.memoised(
        "queries", lambda: _queries(segments, group.page_size)
    )
    positions = segments.starts[:, None] + step  # (B, Q)
    whole = positions.size == len(metadata.positions) and unpad is None
    spans = None if metadata.spans is None else metadata.spans[:, segments.rows[:, None] + step]
    tail_mask = _tail_mask(segments, positions, tail_begins, spans, group)
    if group.window.size is None:
        pages = segments.memoised(("gather", group.number), lambda: _all_pages(segments, group))
    else:
        pages = _window_pages(segments, group, positions)
    return Gathered(segments, None if whole else rows, unpad, slots, tail_mask, *pages)


def _queries(
    short: Segments, page_size: int
) -> tuple[Ints, mx.array | slice, mx.array | None, mx.array | slice, Ints]:
    """Where queries and tails of segments are, whatever their positions.

    Returns:
        (B, Q) the token of its segment at each place: the last one is repeated; `rows`, `unpad` and
        `slots`, see `Gathered`; and rows (B, 1, 1) of `_ring_masks`, less the positions.
    """
    ring, sealed = 2 * page_size, short.sealed[:, None]
    step = np.minimum(np.arange(short.width, dtype=np.int32), short.counts[:, None] - 1)
    real = np.arange(short.width) < short.counts[:, None]  # (B, Q)
    unpad = None if real.all() else mx.array(np.flatnonzero(real))
    begins = (sealed // page_size % 2 * ring - sealed)[:, None]
    rows = _as_index((short.rows[:, None] + step).ravel())
    return step, rows, unpad, _as_index(short.slots), begins


def _as_index(rows: Ints) -> mx.array | slice:
    """Consecutive rows as a slice, which costs no copy; any others as an array."""
    start, stop = int(rows[0]), int(rows[-1]) + 1
    if stop - start == len(rows) and bool((np.diff(rows) == 1).all()):
        return slice(start, stop)
    return mx.array(rows)


def _tail_mask(
    segments: Segments, positions: Ints, begins: Ints, spans: Ints | None, group: PageGroup
) -> mx.array:
    """(B, 1, Q, R) additive: what queries at `positions` (B, Q) see of their tails.

    Args:
        begins: rows of `_ring_masks`, less the positions.
        spans: (2, B, Q) of the queries; None: they see no later token.
    """
    window, size = group.window, group.page_size
    sees_tail = window.size is None or (window.size >= 2 * size and not window.chunked)
    if sees_tail and spans is None:  # a token sees all of the tail before it
        return _ring_masks(size)[mx.array(positions[:, None] + begins)]
    # Ring slot j holds the one position p >= sealed with p % R == j.
    sealed, places = segments.sealed[:, None], np.arange(2 * size, dtype=np.int32)
    held = sealed + (places - sealed) % (2 * size)  # (B, R)
    also = None if spans is None else spans[..., None]
    return mx.array(additive(window.sees(positions[..., None], held[:, None], also))[:, None])


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


def _all_pages(short: Segments, group: PageGroup) -> tuple[mx.array | None, mx.array | None]:
    """Ids (B, n) of all sealed pages, and the mask (B, 1, 1, n * page_size) of the padding."""
    if not short.sealed.any():
        return None, None
    ids, real = _padded(short.sealed_pages(group.number))
    if real.all():
        return mx.array(ids), None
    mask = np.repeat(additive(real), group.page_size, axis=1)
    return mx.array(ids), mx.array(mask[:, None, None])


def _window_pages(
    short: Segments, group: PageGroup, positions: Ints
) -> tuple[mx.array | None, mx.array | None]:
    """Ids (B, n) of the pages that anything is seen of, and the mask (B, 1, Q, n * page_size).

    A span lies in the step that computes it, and so never in a page of an earlier step.
    """
    window, page_size = group.window, group.page_size
    if not num_visible(short, window, page_size).any():
        return None, None
    tables, numbers = [], []
    for row, start, sealed in zip(
        short.tables, short.starts.tolist(), short.sealed.tolist(), strict=True
    ):
        first = window.first_page(start, page_size)
        stop = sealed // page_size
        sinks = np.arange(min(window.kept_pages(page_size), first, stop), dtype=np.int32)
        seen = np.concatenate([sinks, np.arange(first, stop, dtype=np.int32)])
        numbers.append(seen)
        tables.append(np.asarray(row[group.number].numbers_before(sealed))[seen])
    ids, real = _padded(tables)
    keys = _padded(numbers)[0][:, :, None] * page_size + np.arange(page_size)  # (B, n, P)
    visible = window.sees(positions[:, :, None], keys.reshape(len(short), 1, -1))
    visible &= np.repeat(real, page_size, axis=1)[:, None]
    return mx.array(ids), mx.array(additive(visible)[:, None])


def _padded(rows: Sequence[Numbers]) -> tuple[Ints, NDArray[np.bool_]]:
    """(B, n) rows, each padded with its own last number, and which numbers are real.

    Its own: what another sequence has computed must not reach this one, not even times zero.
    """
    numbers, lengths = joined(rows)
    assert lengths.all()
    first = np.cumsum(lengths) - lengths
    places = np.arange(lengths.max())
    last = lengths[:, None] - 1
    return numbers[first[:, None] + np.minimum(places, last)], places <= last
