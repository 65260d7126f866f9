"""The KV cache of a model: a list of groups within a budget. Knows no queue.

A group is layers that keep one kind of thing under one rule: vectors of each token in pages, of all
positions or of a window (`page_group.LayerGroup`), or one thing of a whole sequence: recurrent
states (`state.RecurrentGroup`) or caches that a model keeps by itself (`own.OwnCacheGroup`).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import mlx.core as mx

from .budget import MAX_BARE_PAGES, check_memory, page_counts
from .groups import ENDLESS, AttentionWindow
from .inputs import CacheWork, Spill, StepMetadata
from .layout import LayerCache, paged_of, sequence_layers
from .page_group import LayerGroup
from .paged import GroupKey, PagedLayer, TailPlace
from .pages import PageAllocator
from .state import SequenceGroup

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
        page_bytes = [layer.token_bytes * page_size for layer in paged]
        # A running sequence has tails, a state, and another one while a step makes it.
        running_bytes = 2 * (sum(page_bytes) + sum(layer.state_bytes for layer in here))
        most = budget_bytes // MAX_RUNNING_SHARE // max(running_bytes, 1)
        self.max_batch = max(1, min(max_batch, most))
        # While tails of a layer grow they are there twice, and that counts too.
        growing = 2 * max(page_bytes, default=0)
        room = budget_bytes - self.max_batch * (running_bytes + growing)
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
        prefix tree.
        """
        members: dict[GroupKey, list[PagedLayer]] = {}
        for layer in paged_of(self.layers):
            own = members.setdefault(layer.group_key, [])
            own += [layer] if layer in paged else []
        found = sorted(members.items(), key=lambda item: item[0])
        windows = [AttentionWindow(key[1] or None, *key[2:]) for key, _ in found]
        groups = [own for _, own in found]
        costs = [[layer.token_bytes * self.page_size for layer in own] for own in groups]
        # The keys or values of one are there twice.
        prices = [sum(cost) + max(cost, default=0) for cost in costs]
        totals = [sum(cost) for cost in costs]
        if not found:
            windows, groups = [AttentionWindow()], [[]]
            totals = prices = [sum(layer.token_bytes for layer in self.layers) * self.page_size]
            num_pages = num_pages or (None if totals[0] else MAX_BARE_PAGES)
        held = [self._max_held(window, prefill_chunk) for window in windows]
        counts = page_counts(prices, budget_bytes, max_held=held, num_pages=num_pages)
        sizes = self.page_size, prefill_chunk
        return [
            LayerGroup(
                window, PageAllocator(count), *sizes, total, number, own, max_slots=self.max_batch
            )
            for number, (window, count, total, own) in enumerate(
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
        """What is stored of each layer, for keys of pages on disk."""
        return str([(layer.spec, layer.formats) for layer in self.layers])

    # -- capacity -------------------------------------------------------------------------------

    def lower(self, max_batch: int, pages: Sequence[tuple[int, int]], max_snapshots: int) -> None:
        """Have room as the rank with the least: of each group, pages and the most bytes of one."""
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
        """Bytes of all arrays."""
        return sum(group.bytes_allocated for group in self._all)

    @property
    def bytes_grown(self) -> int:
        """Bytes copied while arrays grew."""
        return sum(group.bytes_grown for group in self.groups)

    def reserve(self, num_bytes: int, lengths: Sequence[int]) -> bool:
        """Set how many bytes of the budget are for something else than pages.

        Only what the arrays have not grown into can be left, and what no sequence may yet need.
        Where the number of pages is fixed, only what the budget has beside them can be.

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
        return any(group.must_grow(num_slots) for group in self.groups)

    def make_room(self, num_slots: int) -> None:
        """Grow the arrays until all pages handed out and `num_slots` tails are there."""
        for group in self.groups:
            group.make_room(num_slots)

    def count_copies(self) -> None:
        """A step was launched while another held the tails: they are copied as they are written."""
        self.bytes_copied += sum(
            group.num_slots * 2 * group.page_bytes for group in self.groups if group.layers
        )

    # -- one step -------------------------------------------------------------------------------

    def carry_out(
        self, work: CacheWork, *, new_slots: Sequence[int] = ()
    ) -> list[tuple[Spill, bytes]]:
        """Do what must be done before a step; returns the payloads of the pages that are read out.

        Only behind a barrier where `work.writes_pages`.

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
            group.load([load.page for load in some], [load.payload for load in some])
        reused = [slot for slot in new_slots if slot in self._used_slots]
        self._used_slots.update(new_slots)
        for group in self._all:
            group.after_load(work, reused)
        return spilled

    def read_out(self, spills: Sequence[Spill]) -> list[tuple[Spill, bytes]]:
        """The payloads of pages and snapshots; only behind a barrier, after seals."""
        spilled: list[tuple[Spill, bytes]] = []
        for number, group in enumerate(self._all):
            some = [spill for spill in spills if spill.group == number]
            payloads = group.read_out([spill.page for spill in some])
            spilled += zip(some, payloads, strict=True)
        return spilled

    def begin_step(self, metadata: StepMetadata) -> None:
        """Let the layers see a step, until the next one begins."""
        place = TailPlace.of(metadata, self.page_size, by_position=self._by_position)
        for group in self._all:
            group.begin_step(metadata, place)

    def commit(self, num_kept: Mapping[int, int]) -> None:
        """Take back rejected tokens of the oldest step that verifies and was not committed.

        Of each tail slot in `num_kept` so many of its first tokens stay. Pages and tails need
        nothing: what lies behind a sequence's end is never read.
        """
        if self.state_group is not None:
            self.state_group.take_back(num_kept)

    def held(self, slot: int) -> Any:
        """The state of the sequence in a slot: a value, which later steps do not change."""
        assert self.state_group is not None
        return self.state_group.held(slot)

    def put_back(self, slot: int, state: Any) -> None:
        """Let a slot go on from a state that `held` gave."""
        assert self.state_group is not None
        self.state_group.put_back(slot, state)

    def step_outputs(self) -> list[mx.array]:
        """Arrays that the last step makes and no later layer reads, to be evaluated with it."""
        return [] if self.state_group is None else self.state_group.step_outputs()
