"""The KV cache of a model: a list of groups within a budget. Knows no queue.

The layers of a group keep one kind of thing under one rule. A `LayerGroup` keeps vectors of each
token in pages, for all positions or a window. Other groups keep one thing for each sequence:
recurrent states (`state.RecurrentGroup`), or caches that a model manages itself
(`state.OwnCaches`).
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import InsufficientMemoryError
from ..memory import human_bytes, total_memory_bytes
from ..metal_kernels.stored import Plane
from .attention import prepare
from .disk.entry import Entry
from .inputs import CacheWork, PageTransfer, StepMetadata, seal_index
from .layout import LayerCache, paged_of, sequence_layers
from .paged import GroupKey, PagedLayer, TailPlace, finish
from .pages import ENDLESS, AttentionWindow, PageAllocator, PageGroup
from .state import SequenceGroup

MAX_BARE_PAGES = 1 << 16  # of models that keep nothing in pages: page numbers only
# Pages of layers that only other ranks have; those ranks say how many they have room for.
MAX_ABSENT_PAGES = 1 << 20
FIRST_PAGES = 16  # arrays start small: a first question takes little memory
# Smaller arrays double. Larger ones have a multiple of so many pages, so that their bytes fill
# whole pages of the machine's memory (16 KB). Otherwise MLX may reuse a buffer that is much larger
# than the array, and then the next write copies the array instead of writing in place.
DOUBLED = 128
GROWTH = 4  # larger arrays grow by a quarter: copies stay rare, and little memory is unused
FIRST_SLOTS = 4
CHUNK_BYTES = 64 * 2**20  # payloads that are gathered at once

Payload = bytes | memoryview


@dataclass(slots=True)
class LayerGroup(PageGroup):
    """A page group with its layers, those that this rank has.

    The payload of a page is, for each layer of its group, the parts of each of its planes (keys and
    then values, or latent vectors). Each part is (H, P, W) in the layer's own format, so a payload
    that is loaded equals the one that was read, bit for bit.

    Attributes:
        layers: that keep the same positions.
        max_slots: sequences that may run at once.
        cost: bytes of a page on the rank where they are most; this rank's until ranks agree.
        limit: pages that there may be, before any is reserved for something else.
        bytes_grown: copied while arrays grew.
        num_pages: that the arrays have; 0: there are no arrays here.
        num_slots: tails that there are.
    """

    layers: Sequence[PagedLayer] = ()
    max_slots: int = 1
    cost: int = 0
    limit: int = 0
    bytes_grown: int = 0
    num_pages: int = 0
    num_slots: int = 0

    def __post_init__(self) -> None:
        self.cost, self.limit = self.page_bytes, self.allocator.num_pages

    # -- arrays ---------------------------------------------------------------------------------

    def reset(self, *, at_once: bool) -> None:
        """Make empty arrays; `at_once`: for all pages that there may be."""
        total = self.allocator.num_pages
        count = total if at_once else grown(min(FIRST_PAGES, total), self.allocator.extent, total)
        self.num_slots = min(FIRST_SLOTS, self.max_slots) if self.layers else self.max_slots
        for layer in self.layers:
            layer.allocate(self.page_size, count, self.num_slots)
        mx.eval([layer.arrays() for layer in self.layers])
        self.num_pages = count if self.layers else 0
        self.allocator.num_present = self.num_pages or total

    @property
    def bytes_allocated(self) -> int:
        return sum(array.nbytes for layer in self.layers for array in layer.arrays())

    @property
    def planes(self) -> list[Plane]:
        """The planes of all layers, in order."""
        return [plane for layer in self.layers for plane in layer.planes]

    def make_room(self, num_slots: int, *, shrink: bool = False) -> None:
        """As `KVCache.make_room`."""
        pages, slots, extent = self.num_pages, self.num_slots, self.allocator.extent
        if not self.layers:
            return
        if extent > pages:
            self.bytes_grown += pages * self.page_bytes
            self.num_pages = grown(pages, extent, self.allocator.num_pages)
            for layer in self.layers:
                layer.grow_pages(self.num_pages)
                mx.clear_cache()  # MLX keeps what larger arrays replaced; nothing has that size
            self.allocator.num_present = self.num_pages
        if num_slots > slots:
            self.bytes_grown += slots * 2 * self.page_bytes
            self._resize_tails(min(max(2 * slots, num_slots), self.max_slots))
        elif shrink and slots >= 4 * (fewest := 1 << max(num_slots - 1, 0).bit_length()):
            self._resize_tails(fewest)

    def _resize_tails(self, num_slots: int) -> None:
        self.num_slots = num_slots
        for layer in self.layers:
            layer.resize_tails(num_slots)

    # -- steps ----------------------------------------------------------------------------------

    def begin_step(self, metadata: StepMetadata, place: TailPlace) -> None:
        """Prepare the attention of a step for all layers."""
        prepared = prepare(metadata, self, self.layers, place)
        for layer in self.layers:
            layer.prepared = prepared
            layer.heads = None if place.positions is None else layer.write_heads

    def before_step(self, work: CacheWork) -> None:
        """Move tail pages into the page arrays. Only behind a barrier.

        Pages that a window has already recycled are left out.
        """
        index = seal_index(work.seal, self.number, self.page_size) if work.seal else None
        if index is not None:
            places = [mx.array(part) for part in index]
            for layer in self.layers:
                layer.seal(*places)

    def after_load(self, work: CacheWork, reused: Sequence[int]) -> None:
        """Clear reused tails, then copy beginnings of shared pages into pages and tails.

        Masked entries are multiplied by 0, so a stale NaN would spread. All copies are read before
        any is written.
        """
        stale = [slot for slot in reused if slot < self.num_slots]  # others come as zeros
        for layer in self.layers if stale else ():
            layer.clear_tails(stale)
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
            finish([parts for _, parts, _ in taken])  # before their pages are written
        for plane, parts, place in taken:
            plane.copy_in(parts, *place, self.page_size)

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

    def _slots(self, pages: Sequence[int]) -> mx.array:
        """(N * P,) page slots of N pages, in order."""
        starts = np.array(pages, dtype=np.int32)[:, None] * self.page_size
        return mx.array((starts + np.arange(self.page_size, dtype=np.int32)).reshape(-1))

    def _read(self, pages: Sequence[int]) -> list[bytes]:
        slots, parts = self._slots(pages), []
        for plane in self.planes:
            for array in plane.pages:
                taken = mx.unflatten(array[:, slots], 1, (len(pages), -1))  # (H, N, P, W)
                taken = mx.contiguous(taken.swapaxes(0, 1))  # (N, H, P, W)
                parts.append(taken.view(mx.uint8).flatten(1))
        rows = mx.concatenate(parts, axis=1)  # (N, bytes of a page)
        finish(rows)  # others may be written next
        return [row.tobytes() for row in np.array(rows, copy=False)]

    def _write(self, pages: Sequence[int], payloads: Sequence[Payload]) -> None:
        rows = mx.array(np.stack([np.frombuffer(payload, dtype=np.uint8) for payload in payloads]))
        slots, start = self._slots(pages), 0
        for plane in self.planes:
            for i in range(len(plane.pages)):  # in place: no other name holds an array
                heads, _, width = plane.pages[i].shape
                shape, dtype = (heads, self.page_size, width), plane.pages[i].dtype
                stop = start + prod(shape) * dtype.size
                part = mx.unflatten(mx.contiguous(rows[:, start:stop]).view(dtype), 1, shape)
                plane.pages[i][:, slots] = part.swapaxes(0, 1).flatten(1, 2)  # (H, N * P, W)
                start = stop
        assert start == rows.shape[1], "a payload of another format"
        mx.eval([plane.pages for plane in self.planes])


MAX_RUNNING_SHARE = 4  # tails and states may take one part in so many of the budget
SNAPSHOT_SHARE = 4  # snapshots of states take one part in so many of what is left


class KVCache:
    """Pages and tails of all layers, and states of sequences.

    Args:
        layers: of the whole model.
        page_size: tokens a page.
        max_batch: sequences that may run at once; lowered where tails would take over the budget.
        prefill_chunk: tokens of a step's prefill; windows hold that much more for a moment.
        budget_bytes: for all arrays together.
        num_pages: pages of every full group instead of as many as the budget holds.
        absent: places of layers that another rank has: pages are counted for them, and nothing is
            kept.

    Attributes:
        layers: of the whole model: the same objects serve all steps.
        paged: layers that have pages, here.
        groups: those of pages.
        state_group: what is kept of whole sequences; None: nothing is.

    Raises:
        InsufficientMemoryError: the budget does not hold one sequence of a page.
    """

    def __init__(
        self,
        layers: Sequence[LayerCache],
        *,
        page_size: int,
        max_batch: int,
        prefill_chunk: int,
        budget_bytes: int,
        num_pages: int | None = None,
        absent: Collection[int] = (),
    ) -> None:
        self.layers = list(layers)
        self.page_size = page_size
        self.bytes_copied = 0  # tails copied because a step was in flight
        self._fixed = num_pages is not None
        here = [layer for i, layer in enumerate(layers) if i not in absent]
        self.paged = paged = paged_of(here)
        # A running sequence has tails of two pages, and a state. While a step makes new ones, the
        # old ones are there too.
        tails_bytes = 2 * page_size * sum(layer.tail_bytes_each for layer in paged)
        state_bytes = sum(layer.state_bytes for layer in here)
        most = budget_bytes // MAX_RUNNING_SHARE // max(tails_bytes + 2 * state_bytes, 1)
        self.max_batch = max(1, min(max_batch, most))
        room = budget_bytes - self.max_batch * 2 * (tails_bytes + state_bytes)
        self.state_group: SequenceGroup | None = None
        of_sequences = sequence_layers(layers)
        if of_sequences:  # on some rank
            make_group = of_sequences[0].make_group
            self.state_group = make_group(sequence_layers(here), room // SNAPSHOT_SHARE)
            room -= self.state_group.max_snapshots * self.state_group.num_bytes
        self.groups = self._page_groups(paged, prefill_chunk, room, num_pages)
        self._paged_budget = room
        self._reserved = 0  # bytes of the budget that are left to something else
        states = [] if self.state_group is None else [self.state_group]
        self._all: list[LayerGroup | SequenceGroup] = [*self.groups, *states]
        self._by_position = any(layer.by_position for layer in paged)
        if self._fixed:
            check_memory(sum(g.allocator.num_pages * g.page_bytes for g in self.groups))
        self.reset()

    def _page_groups(
        self,
        paged: Sequence[PagedLayer],
        prefill_chunk: int,
        budget_bytes: int,
        num_pages: int | None,
    ) -> list[LayerGroup]:
        """Groups of the layers that have pages, with as many pages each as there is room for.

        Where no layer has pages, a group of no layers counts what lies elsewhere, and makes the
        prefix cache.
        """
        members: dict[GroupKey, list[PagedLayer]] = {}
        for layer in paged_of(self.layers):
            in_group = members.setdefault(layer.group_key, [])
            in_group += [layer] if layer in paged else []
        keyed = sorted(members.items(), key=lambda item: item[0])
        windows = [AttentionWindow(key[0] or None, *key[1:]) for key, _ in keyed]
        groups = [layers for _, layers in keyed]
        costs = [[layer.token_bytes * self.page_size for layer in layers] for layers in groups]
        # The keys or values of one are there twice.
        prices = [sum(cost) + max(cost, default=0) for cost in costs]
        totals = [sum(cost) for cost in costs]
        if not keyed:
            windows, groups = [AttentionWindow()], [[]]
            totals = prices = [sum(layer.token_bytes for layer in self.layers) * self.page_size]
            num_pages = num_pages or (None if totals[0] else MAX_BARE_PAGES)
        held = [self._max_held(window, prefill_chunk) for window in windows]
        counts = page_counts(prices, budget_bytes, max_held=held, num_pages=num_pages)
        sizes = self.page_size, prefill_chunk
        whole = any(layer.whole_pages for layer in paged_of(self.layers))
        return [
            LayerGroup(
                *(window, PageAllocator(count), *sizes, total, number, whole, layers),
                max_slots=self.max_batch,
            )
            for number, (window, count, total, layers) in enumerate(
                zip(windows, counts, totals, groups, strict=True)
            )
        ]

    def _max_held(self, window: AttentionWindow, prefill_chunk: int) -> int | None:
        """Pages of a window that `max_batch` sequences can hold; None: bound by their length."""
        if window.size is None:
            return None
        held = -(-(window.size - 1) // self.page_size) + 2 + window.kept_pages(self.page_size)
        return self.max_batch * held + prefill_chunk // self.page_size

    def reset(self) -> None:
        """Fresh arrays: after a failed step nothing in the old ones can be trusted."""
        for group in self.groups:
            group.reset(at_once=self._fixed)
        if self.state_group is not None:
            self.state_group.reset()
        self._used_slots: set[int] = set()

    @property
    def identity(self) -> str:
        """The spec and the formats of each layer, for keys of pages on disk."""
        return str([(layer.spec, layer.formats) for layer in self.layers])

    # -- capacity -------------------------------------------------------------------------------

    def lower(self, max_batch: int, pages: Sequence[tuple[int, int]], max_snapshots: int) -> None:
        """Lower the limits to those of the rank with the least room.

        `pages`: for each group, how many pages, and the most bytes that one takes on any rank.
        """
        self.max_batch = max_batch
        for group, (count, cost) in zip(self.groups, pages, strict=True):
            group.allocator.resize(count)
            group.limit, group.cost = count, cost
        if self.state_group is not None:
            self.state_group.max_snapshots = max_snapshots

    @property
    def max_tokens(self) -> int:
        """Positions that one sequence may ever have, if it runs alone."""
        short = [
            group.allocator.num_pages * self.page_size
            for group in self.groups
            if group.allocator.num_pages < group.max_pages(ENDLESS)
        ]
        return min(short, default=ENDLESS)

    @property
    def bytes_allocated(self) -> int:
        return sum(group.bytes_allocated for group in self._all)

    @property
    def bytes_grown(self) -> int:
        """Bytes copied while arrays grew."""
        return sum(group.bytes_grown for group in self.groups)

    def reserve(self, num_bytes: int, lengths: Sequence[int]) -> bool:
        """Set aside some bytes of the budget for other things than pages.

        Only memory can be set aside that the arrays have not grown into and that no sequence may
        still need. If the number of pages is fixed, only the rest of the budget can be.

        Args:
            num_bytes: in all, at every call.
            lengths: that unfinished sequences may come to have, tokens.

        Returns:
            False: there is not so much; then nothing changes.
        """
        endless = ENDLESS // self.page_size
        full = [group for group in self.groups if group.max_pages(ENDLESS) >= endless]
        if self._fixed or not full:
            paged = sum(group.limit * group.cost for group in self.groups)
            return num_bytes <= max(self._paged_budget - paged, 0)
        if self._reserved == num_bytes:
            return True
        num_left = -(-num_bytes // max(sum(group.cost for group in full), 1))
        for group in full:
            longest = max([group.max_pages(length) for length in lengths], default=2)
            needed = max(longest, group.allocator.extent, group.num_pages)
            if group.limit - num_left < min(needed, group.allocator.num_pages):
                return False
        for group in full:
            group.allocator.resize(group.limit - num_left)
        self._reserved = num_bytes
        return True

    def must_grow(self, num_slots: int) -> bool:
        """Whether a step needs more pages or tails than the arrays have."""
        for group in self.groups:
            lacks_pages = group.allocator.extent > group.num_pages
            if group.layers and (lacks_pages or num_slots > group.num_slots):
                return True
        return False

    def make_room(self, num_slots: int, *, shrink: bool = False) -> None:
        """Grow the arrays until all pages handed out and `num_slots` tails are there.

        Args:
            num_slots: tails that are needed.
            shrink: no later slot is held, so the arrays shrink to the next power of two if they
                have four times as many tails. Every step copies all tails that there are.
        """
        for group in self.groups:
            group.make_room(num_slots, shrink=shrink)

    def count_copies(self) -> None:
        """Count copied tails: a step was launched while another one held them."""
        for group in self.groups:
            if group.layers:
                self.bytes_copied += group.num_slots * 2 * group.page_bytes

    # -- one step -------------------------------------------------------------------------------

    def carry_out(self, work: CacheWork, *, new_slots: Sequence[int] = ()) -> list[Entry]:
        """Do the work that is due before a step; returns the entries of pages that are read out.

        Only behind a barrier if `work.writes_pages`.

        Args:
            work: of the step.
            new_slots: have a new owner in this step.
        """
        if work.is_empty and not new_slots:
            return []
        for group in self._all:
            group.before_step(work)
        spilled = self.read_out(work.spill) if work.spill else []
        for number, group in enumerate(self._all) if work.load else ():
            some = [load for load in work.load if load.group == number]
            group.load([load.page for load in some], [load.entry.payload for load in some])
        reused = [slot for slot in new_slots if slot in self._used_slots]
        self._used_slots.update(new_slots)
        for group in self._all:
            group.after_load(work, reused)
        return spilled

    def read_out(self, spills: Sequence[PageTransfer]) -> list[Entry]:
        """The entries of pages and snapshots; only behind a barrier, after seals."""
        entries: list[Entry] = []
        for number, group in enumerate(self._all):
            some = [spill for spill in spills if spill.group == number]
            payloads = group.read_out([spill.page for spill in some])
            pairs = zip(some, payloads, strict=True)
            entries += [spill.filled(payload) for spill, payload in pairs]
        return entries

    def begin_step(self, metadata: StepMetadata) -> None:
        """Let the layers see a step, until the next one begins."""
        place = TailPlace.of(metadata, self.page_size, by_position=self._by_position)
        for group in self._all:
            group.begin_step(metadata, place)

    def commit(self, num_kept: Mapping[int, int]) -> None:
        """Take back rejected tokens of the oldest step that has proposals and was not committed.

        Of each tail slot in `num_kept`, that many of the first tokens stay. Pages and tails need no
        work, because nothing reads them behind the end of a sequence.
        """
        if self.state_group is not None:
            self.state_group.take_back(num_kept)

    def held(self, slot: int) -> Any:
        """The state of the sequence in a slot. It is a value: later steps do not change it."""
        assert self.state_group is not None
        return self.state_group.held(slot)

    def put_back(self, slot: int, state: Any) -> None:
        """Let a slot go on from a state that `held` gave."""
        assert self.state_group is not None
        self.state_group.put_back(slot, state)

    def step_outputs(self) -> list[mx.array]:
        """Arrays that the last step makes and no later layer reads, to be evaluated with it."""
        return [] if self.state_group is None else self.state_group.step_outputs()


# -- how many pages -------------------------------------------------------------------------------


def page_counts(
    costs: Sequence[int],
    budget_bytes: int,
    *,
    max_held: Sequence[int | None],
    num_pages: int | None,
) -> list[int]:
    """Pages of each group: as many full pages as fit, and enough for all windows.

    A window group never needs more pages than its sequences can hold, nor more than the full groups
    have. Its size makes sure that it never runs out before them.

    Args:
        costs: bytes of a page of each group.
        budget_bytes: for all pages.
        max_held: pages that all sequences together can hold of each group; None: bound by their
            length alone.
        num_pages: of every full group, instead of as many as the budget holds.

    Raises:
        InsufficientMemoryError: it does not hold two pages.
    """

    def counts(full: int) -> list[int]:
        return [full if held is None else min(full, held) for held in max_held]

    if num_pages is not None:
        return counts(num_pages)
    least = min(filter(None, costs), default=0)
    if not least:  # layers that would have pages are all on other ranks
        return counts(MAX_ABSENT_PAGES)
    most = max(budget_bytes, 0) // least
    if not all(costs):
        most = min(most, MAX_ABSENT_PAGES)

    def bytes_of(full: int) -> int:
        return sum(c * n for c, n in zip(costs, counts(full), strict=True))

    fitting = bisect_right(range(1, most + 1), budget_bytes, key=bytes_of)
    if fitting < 2:
        raise _too_little(2 * sum(costs), max(0, budget_bytes))
    return counts(fitting)


def _too_little(needed: int, left: int) -> InsufficientMemoryError:
    return InsufficientMemoryError(
        f"Two pages of the KV cache take {human_bytes(needed)}, and {human_bytes(left)} are left "
        "for them beside what each request takes; raise max_memory or lower max_batch.",
        param="max_memory",
    )


def check_memory(num_bytes: int) -> None:
    """Check that pages of a stated number fit: they are allocated at once.

    Raises:
        InsufficientMemoryError: this machine has less than `num_bytes`.
    """
    total = total_memory_bytes()
    if num_bytes > total:
        raise InsufficientMemoryError(
            f"num_pages asks for {human_bytes(num_bytes)} of KV cache, and this machine has "
            f"{human_bytes(total)}; ask for fewer.",
            param="num_pages",
        )


def grown(pages: int, extent: int, limit: int) -> int:
    """The pages that arrays of `pages` are to have, `pages` itself where they need not grow.

    Args:
        extent: one more than the highest page handed out.
        limit: that there may ever be.
    """
    while pages < extent:
        if pages < DOUBLED:
            pages = min(2 * pages, DOUBLED, limit)
        else:
            pages = min((pages + max(pages // GROWTH, DOUBLED)) // DOUBLED * DOUBLED, limit)
    return pages
