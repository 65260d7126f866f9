"""A page group with the arrays of its layers: growth, sealing, copies, and pages as bytes.

The payload of a page is, for each layer of its group, the parts of each of its planes (keys and
then values, or latent vectors), each (H, P, W) in the layer's own format: what comes back is what
was there, bit for bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import mlx.core as mx
import numpy as np

from ..metal_kernels.variants import never
from .budget import FIRST_PAGES, grown
from .groups import PageGroup
from .inputs import CacheWork, StepMetadata, seal_index
from .metal import MetalAttention
from .paged import PagedLayer, Plane, TailPlace
from .plain import PlainAttention

FIRST_SLOTS = 4
CHUNK_BYTES = 64 * 2**20  # payloads that are gathered at once

Payload = bytes | memoryview


@dataclass(slots=True)
class LayerGroup(PageGroup):
    """A page group with its layers, those that this rank has.

    Attributes:
        number: of the group among the page tables of a sequence.
        layers: that keep the same positions.
        max_slots: sequences that may run at once.
        cost: bytes of a page on the rank where they are most; this rank's until ranks agree.
        limit: pages that there may be, before any is reserved for something else.
        bytes_grown: copied while arrays grew.
    """

    number: int
    layers: Sequence[PagedLayer]
    max_slots: int
    cost: int = 0
    limit: int = 0
    bytes_grown: int = 0
    _attention: PlainAttention | MetalAttention = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.cost, self.limit = self.page_bytes, self.allocator.num_pages
        plain = PlainAttention(
            max([layer.spec.numbers * layer.dtype.size for layer in self.layers], default=1)
        )
        self._attention = plain
        ready = list(dict.fromkeys(layer.ready for layer in self.layers)) or [never]
        tiles = any(layer.tiles for layer in self.layers)
        if tiles or never not in ready:
            self._attention = MetalAttention(plain, ready, tiles=tiles)

    # -- arrays ---------------------------------------------------------------------------------

    def reset(self, *, at_once: bool) -> None:
        """Make empty arrays; `at_once`: for all pages that there may be."""
        total = self.allocator.num_pages
        count = total if at_once else min(total, max(FIRST_PAGES, self.allocator.extent))
        for layer in self.layers:
            layer.allocate(self.page_size, count, min(FIRST_SLOTS, self.max_slots))
        mx.eval([layer.arrays() for layer in self.layers])
        self.allocator.num_present = self.num_pages or total

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for layer in self.layers for array in layer.arrays())

    @property
    def planes(self) -> list[Plane]:
        """What the layers keep, in order."""
        return [plane for layer in self.layers for plane in layer.planes]

    @property
    def num_slots(self) -> int:
        """Tails that there are."""
        return self.layers[0].num_slots if self.layers else self.max_slots

    @property
    def num_pages(self) -> int:
        """Pages that the arrays have; 0: there are no arrays here."""
        return self.layers[0].num_pages if self.layers else 0

    def must_grow(self, num_slots: int) -> bool:
        """Whether a step needs more pages or tails than the arrays have."""
        lacks_pages = self.allocator.extent > self.num_pages
        return bool(self.layers) and (lacks_pages or num_slots > self.num_slots)

    def make_room(self, num_slots: int) -> None:
        """Grow the arrays until all pages handed out and `num_slots` tails are there."""
        pages, slots, extent = self.num_pages, self.num_slots, self.allocator.extent
        if not self.layers:
            return
        if extent > pages:
            self.bytes_grown += pages * self.page_bytes
            for layer in self.layers:
                layer.grow_pages(grown(pages, extent, self.allocator.num_pages))
            self.allocator.num_present = self.num_pages
        if num_slots > slots:
            self.bytes_grown += slots * 2 * self.page_bytes
            for layer in self.layers:
                layer.grow_tails(min(max(2 * slots, num_slots), self.max_slots))

    # -- steps ----------------------------------------------------------------------------------

    def begin_step(self, metadata: StepMetadata, place: TailPlace) -> None:
        """Prepare the attention of a step for all layers."""
        prepared = self._attention.prepare(metadata, self, self.number, place)
        for layer in self.layers:
            layer.prepared = prepared
            layer.heads = None if place.positions is None else layer.write_heads

    def before_step(self, work: CacheWork) -> None:
        """Move tail pages into the page arrays.

        Only behind a barrier. Pages that a window recycled already are left out.
        """
        found = seal_index(work.seal, self.number, self.page_size) if work.seal else None
        if found is not None:
            slots, offsets, targets = (mx.array(part) for part in found)
            for layer in self.layers:
                layer.seal(slots, offsets, targets)

    def after_load(self, work: CacheWork, reused: Sequence[int]) -> None:
        """Clear reused tails, then copy beginnings of shared pages into pages and tails.

        Masked entries are multiplied by 0, so a stale NaN would spread. All copies are read before
        any is written.
        """
        there = [slot for slot in reused if slot < self.num_slots]  # others come as zeros
        for layer in self.layers if there else ():
            layer.clear_tails(there)
        taken = []
        for tables, slot, start, stop, pages in work.copies:
            page = pages[self.number]
            if page is not None:
                (target, _), *_ = tables[self.number].runs(start, stop)
                place = target, slot, start % (2 * self.page_size)
                source = page * self.page_size
                taken += [
                    (plane, plane.copy_out(source, source + stop - start), place)
                    for plane in self.planes
                ]
        if taken:
            mx.eval([parts for _, parts, _ in taken])  # before their pages are written
        for plane, parts, place in taken:
            plane.copy_in(parts, *place)

    # -- pages as bytes -------------------------------------------------------------------------

    def read_out(self, pages: Sequence[int]) -> list[bytes]:
        """The payloads of pages, in order. Waits for whatever writes them."""
        if not self.layers:
            return [b""] * len(pages)
        return [payload for some in self._chunks(pages) for payload in self._read(some)]

    def load(self, pages: Sequence[int], payloads: Sequence[Payload]) -> None:
        """Put payloads into pages. Only behind a barrier."""
        start = 0
        for some in self._chunks(pages) if self.layers else ():
            self._write(some, payloads[start : start + len(some)])
            start += len(some)

    def _chunks(self, pages: Sequence[int]) -> Iterator[Sequence[int]]:
        count = max(CHUNK_BYTES // max(self.page_bytes, 1), 1)
        for start in range(0, len(pages), count):
            yield pages[start : start + count]

    def _read(self, pages: Sequence[int]) -> list[bytes]:
        size, parts = self.page_size, []
        starts = np.array(pages, dtype=np.int32)[:, None] * size
        slots = mx.array((starts + np.arange(size, dtype=np.int32)).reshape(-1))  # (N * P,)
        for plane in self.planes:
            for array in plane.pages:
                taken = mx.unflatten(array[:, slots], 1, (len(pages), size))  # (H, N, P, W)
                taken = mx.contiguous(taken.swapaxes(0, 1))  # (N, H, P, W)
                parts.append(taken.view(mx.uint8).flatten(1))
        rows = mx.concatenate(parts, axis=1)  # (N, bytes of a page)
        mx.eval(rows)
        return [row.tobytes() for row in np.array(rows, copy=False)]

    def _write(self, pages: Sequence[int], payloads: Sequence[Payload]) -> None:
        rows = mx.array(np.stack([np.frombuffer(payload, dtype=np.uint8) for payload in payloads]))
        runs, size, start = _runs(pages), self.page_size, 0
        for plane in self.planes:
            kinds = [(len(part), part.shape[-1], part.dtype) for part in plane.pages]
            for i, (heads, width, dtype) in enumerate(kinds):  # no other name holds the arrays
                shape = heads, size, width
                stop = start + prod(shape) * dtype.size
                part = mx.contiguous(rows[:, start:stop]).view(dtype)
                part = mx.unflatten(part, 1, shape).swapaxes(0, 1)  # (H, N, P, W)
                for row, page, count in runs:
                    tokens = part[:, row : row + count].flatten(1, 2)
                    plane.pages[i][:, page * size : (page + count) * size] = tokens
                start = stop
        assert start == rows.shape[1], "a payload of another format"
        mx.eval([plane.pages for plane in self.planes])


def _runs(pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """Consecutive pages as (place of the first in `pages`, its id, how many)."""
    runs: list[tuple[int, int, int]] = []
    for row, page in enumerate(pages):
        if runs and page == runs[-1][1] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((row, page, 1))
    return runs
