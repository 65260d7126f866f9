"""The KV cache of a model: a list of groups within a budget. Knows no queue.

The layers of a group keep one kind of thing under one rule. A `LayerGroup` keeps vectors of each
token in pages, for all positions or a window. Other groups keep one thing for each sequence:
recurrent states (`state.RecurrentGroup`), or caches that a model manages itself
(`state.OwnCaches`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..metal_kernels.stored import Plane
from .attention import prepare
from .budget import (
    FIRST_PAGES,
    SNAPSHOT_SHARE,
    GroupPlan,
    check_memory,
    grown,
    plan_groups,
    running_sequences,
)
from .disk.entry import Entry
from .inputs import CacheWork, PageTransfer, StepMetadata, seal_index
from .layout import LayerCache, paged_of, sequence_layers
from .paged import PagedLayer, Payload, TailPlace, finish, read_payloads, write_payloads
from .pages import ENDLESS, PageAllocator, PageGroup
from .state import SequenceGroup

FIRST_SLOTS = 4
CHUNK_BYTES = 64 * 2**20  # payloads that are gathered at once


@dataclass(slots=True)
class LayerGroup(PageGroup):
    """A page group with its layers, those that this rank has.

    The payload of a page is, for each layer of its group, the parts of each of its planes (keys and
    then values, or latent vectors). Each part is (H, P, W) in the layer's own format, so a payload
    that is loaded equals the one that was read, bit for bit.
    """

    layers: Sequence[PagedLayer] = ()  # that keep the same positions
    max_slots: int = 1  # sequences that may run at once
    cost: int = 0  # bytes of a page on the rank where they are most; this rank's until ranks agree
    limit: int = 0  # pages that there may be, before any is reserved for something else
    bytes_grown: int = 0  # copied while arrays grew
    num_pages: int = 0  # that the arrays have; 0: there are no arrays here
    num_slots: int = 0  # tails that there are

    def __post_init__(self) -> None:
        super(LayerGroup, self).__post_init__()
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
        return [plane for layer in self.layers for plane in layer.planes]

    def make_room(self, num_slots: int, *, shrink: bool = False) -> None:
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
        prepared = prepare(metadata, self, self.layers, place)
        for layer in self.layers:
            layer.prepared = prepared
            layer.step_head_writer = None if place.positions is None else layer.head_writer

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
        payloads = [] if self.layers else [b""] * len(pages)
        for chunk in self._chunks(len(pages)):
            payloads += read_payloads(self.planes, pages[chunk], self.page_size)
        return payloads

    def load(self, pages: Sequence[int], payloads: Sequence[Payload]) -> None:
        """Put payloads into pages. Only behind a barrier."""
        for chunk in self._chunks(len(pages)):
            write_payloads(self.planes, pages[chunk], payloads[chunk], self.page_size)

    def _chunks(self, num_pages: int) -> Iterator[slice]:
        """Pages whose payloads are gathered at once; none where there are no arrays."""
        count = max(CHUNK_BYTES // max(self.page_bytes, 1), 1)
        for start in range(0, num_pages if self.layers else 0, count):
            yield slice(start, start + count)


class KVCache:
    """Pages and tails of all layers, and states of sequences.

    Args:
        max_batch: sequences that may run at once; lowered where tails would take over the budget.
        prefill_chunk: tokens of a step's prefill; windows hold that much more for a moment.
        num_pages: pages of every full group instead of as many as the budget holds.
        absent: places of layers that another rank has: pages are counted for them, and nothing is
            kept.

    Attributes:
        layers: of the whole model: the same objects serve all steps.
        state_group: what is kept of whole sequences; None: nothing is.
        tail_bytes: of all tails: what a step copies that is launched while another one holds them.

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
        self.max_batch, room = running_sequences(paged, here, page_size, max_batch, budget_bytes)
        self.state_group: SequenceGroup | None = None
        of_sequences = sequence_layers(layers)
        if of_sequences:  # on some rank
            make_group = of_sequences[0].make_group
            self.state_group = make_group(sequence_layers(here), room // SNAPSHOT_SHARE)
            room -= self.state_group.max_snapshots * self.state_group.num_bytes
        every = paged_of(layers)
        elsewhere = 0 if every else sum(layer.token_bytes for layer in layers)
        plans = plan_groups(
            every, paged, page_size, prefill_chunk, self.max_batch, room, num_pages, elsewhere
        )
        whole_pages = any(layer.whole_pages for layer in every)
        self.groups = self._groups_of(plans, prefill_chunk, whole_pages=whole_pages)
        self._paged_budget = room
        self._reserved = 0  # bytes of the budget that are left to something else
        states = [] if self.state_group is None else [self.state_group]
        self._all: list[LayerGroup | SequenceGroup] = [*self.groups, *states]
        self._by_position = any(layer.by_position for layer in paged)
        if self._fixed:
            check_memory(sum(g.allocator.num_pages * g.page_bytes for g in self.groups))
        self.reset()

    def _groups_of(
        self, plans: Sequence[GroupPlan], prefill_chunk: int, *, whole_pages: bool
    ) -> list[LayerGroup]:
        return [
            LayerGroup(
                window=plan.window,
                allocator=PageAllocator(plan.num_pages),
                page_size=self.page_size,
                prefill_chunk=prefill_chunk,
                page_bytes=plan.page_bytes,
                number=number,
                whole_pages=whole_pages,
                layers=plan.layers,
                max_slots=self.max_batch,
            )
            for number, plan in enumerate(plans)
        ]

    def reset(self) -> None:
        """Fresh arrays: after a failed step nothing in the old ones can be trusted."""
        for group in self.groups:
            group.reset(at_once=self._fixed)
        if self.state_group is not None:
            self.state_group.reset()
        self._used_slots: set[int] = set()
        self.make_room(0)

    @property
    def identity(self) -> str:
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
        return sum(group.bytes_grown for group in self.groups)

    def reserve(self, num_bytes: int, lengths: Sequence[int]) -> bool:
        """Set aside some bytes of the budget for other things than pages.

        Only memory can be set aside that the arrays have not grown into and that no sequence may
        still need. If the number of pages is fixed, only the rest of the budget can be.

        Args:
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
        for group in self.groups:
            lacks_pages = group.allocator.extent > group.num_pages
            if group.layers and (lacks_pages or num_slots > group.num_slots):
                return True
        return False

    def make_room(self, num_slots: int, *, shrink: bool = False) -> None:
        """Grow the arrays until all pages handed out and `num_slots` tails are there.

        Args:
            shrink: no later slot is held, so the arrays shrink to the next power of two if they
                have four times as many tails. Every step copies all tails that there are.
        """
        self.tail_bytes = 0
        for group in self.groups:
            group.make_room(num_slots, shrink=shrink)
            self.tail_bytes += 2 * group.num_slots * group.page_bytes if group.layers else 0

    # -- one step -------------------------------------------------------------------------------

    def carry_out(self, work: CacheWork, *, new_slots: Sequence[int] = ()) -> list[Entry]:
        """Do the work that is due before a step; returns the entries of pages that are read out.

        Only behind a barrier if `work.writes_pages`.
        """
        for group in self._all:
            group.before_step(work)
        spilled = self.read_out(work.spill) if work.spill else []
        for number, group in enumerate(self._all) if work.load else ():
            loads = [load for load in work.load if load.group == number]
            group.load([load.page for load in loads], [load.entry.payload for load in loads])
        reused = [slot for slot in new_slots if slot in self._used_slots]
        self._used_slots.update(new_slots)
        for group in self._all:
            group.after_load(work, reused)
        return spilled

    def read_out(self, spills: Sequence[PageTransfer]) -> list[Entry]:
        """The entries of pages and snapshots; only behind a barrier, after seals."""
        entries: list[Entry] = []
        for number, group in enumerate(self._all):
            group_spills = [spill for spill in spills if spill.group == number]
            payloads = group.read_out([spill.page for spill in group_spills])
            pairs = zip(group_spills, payloads, strict=True)
            entries += [spill.filled(payload) for spill, payload in pairs]
        return entries

    def begin_step(self, metadata: StepMetadata) -> None:
        place = TailPlace.of(metadata, self.page_size, by_position=self._by_position)
        for group in self._all:
            group.begin_step(metadata, place)
