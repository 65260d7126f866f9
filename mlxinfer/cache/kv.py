"""The KV cache of a model: layer groups, their pages and pools, within a budget. Knows no queue."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..core import CacheSpec, KVSpec, LatentSpec, OwnCacheSpec, StateSpec
from ..metal_kernels.heads import Heads
from .budget import FIRST_PAGES, check_memory, growth_threshold, layers_to_grow
from .formats import PLAIN, Bits, KeyBias
from .groups import ENDLESS, StateGroup
from .inputs import CacheWork, Load, Move, PartialCopy, Spill, StepSegments, seal_index
from .joint import JointPool
from .kernel_attention import ReadyFor
from .latent import LatentPool, LatentStep
from .layer_groups import GroupMaker, LayerGroup
from .own import OwnCachePool, OwnStep
from .payload import read_pages, write_pages
from .pool import LayerPool, Plane
from .ranked import RankedPool
from .state import StatePool, StateStep
from .step import GroupPlan, StepKV, padded_positions, plan_group

FIRST_SLOTS = 4
NO_KERNELS: Mapping[int, ReadyFor] = {}
MAX_RUNNING_SHARE = 4  # tails and states may take one part in so many of the budget
SNAPSHOT_SHARE = 4  # snapshots of states take one part in so many of what is left

LayerStep = StepKV | LatentStep | StateStep | OwnStep  # what a layer sees of a step


class KVCache:
    """Pages and tails of all layers.

    Args:
        specs: what each layer keeps: vectors of tokens, or a state; or one spec of a model that
            keeps caches of its own.
        dtype: of keys and values.
        page_size: tokens a page.
        max_batch: sequences that may run at once; lowered where tails would take over the budget.
        prefill_chunk: tokens of a step's prefill; windows hold that much more for a moment.
        budget_bytes: for pages and tails together.
        num_pages: pages of every full group instead of as many as the budget holds.
        bits: of keys and values, for each layer; None: all in `dtype`.
        kernel_layers: layers that attend over pages through Metal kernels, as far as these are
            ready for so many tokens.
        prefill_layers: layers in which prefill chunks attend through a Metal kernel.
        heads: of layers with keys and values written by the Metal kernel.
        tail_layers: those of them that write to their tails with a kernel where all decode.
        key_biases: of layers with one in their spec.
        absent: layers that another rank has: pages are counted for them, and nothing is kept.

    Raises:
        InsufficientMemoryError: the budget does not hold one sequence of a page.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        *,
        dtype: mx.Dtype,
        page_size: int,
        max_batch: int,
        prefill_chunk: int,
        budget_bytes: int,
        num_pages: int | None = None,
        bits: Sequence[Bits] | None = None,
        kernel_layers: Mapping[int, ReadyFor] = NO_KERNELS,
        prefill_layers: frozenset[int] = frozenset(),
        heads: Mapping[int, Heads] | None = None,
        tail_layers: frozenset[int] = frozenset(),
        key_biases: Mapping[int, KeyBias] | None = None,
        absent: Collection[int] = (),
    ) -> None:
        self._heads = heads or {}
        self._tail_layers = tail_layers
        self._key_biases = key_biases or {}
        self._prefill_layers = prefill_layers
        self.specs = list(specs)
        self.dtype = dtype
        self.page_size = page_size
        self.bits = list(bits or [PLAIN] * len(specs))
        self.bytes_copied = 0  # tails copied because a step was in flight
        self.bytes_grown = 0  # copied while pools grew
        self._fixed = num_pages is not None
        self._sort_layers(absent)
        make = GroupMaker(
            self._paged_specs,
            [self.bits[layer] for layer in self._paged],
            dtype,
            page_size,
            max_batch,
            prefill_chunk,
            {self._paged[layer]: ready for layer, ready in kernel_layers.items()},
            [self._paged[layer] for layer in prefill_layers],
            own_token_bytes=sum(s.numbers for s in specs if isinstance(s, OwnCacheSpec))
            * dtype.size,
            absent=self._absent_specs,
        )
        self._share_out(budget_bytes, make, num_pages)
        self.reset()

    def _sort_layers(self, absent: Collection[int]) -> None:
        """Which layers have pages, and which a state; or the caches of a whole model."""
        specs = self.specs
        here = [(i, s) for i, s in enumerate(specs) if i not in absent]
        paged = [(i, s) for i, s in here if isinstance(s, KVSpec | LatentSpec)]
        self._paged = {layer: place for place, (layer, _) in enumerate(paged)}
        self._has_states = any(isinstance(s, StateSpec) for s in specs)  # on some rank
        self._stateful = [i for i, s in here if isinstance(s, StateSpec)]
        others = [s for i, s in enumerate(specs) if i in absent]
        self._absent_specs = [s for s in others if isinstance(s, KVSpec | LatentSpec)]
        own = [spec for spec in specs if isinstance(spec, OwnCacheSpec)]
        assert not own or len(specs) == 1, "caches of its own are those of a whole model"
        self.own = OwnCachePool(own[0]) if own else None
        self._paged_specs = [spec for _, spec in paged]
        self.states = StatePool([s for _, s in here if isinstance(s, StateSpec)])

    def _share_out(self, budget_bytes: int, make: GroupMaker, num_pages: int | None) -> None:
        """Divide the budget into running sequences, snapshots of states, and pages."""
        self._page_bytes = [make.page_bytes(i) for i in range(len(self._paged))]
        # A running sequence has tails, a state, and another one while a step makes it.
        state_bytes = self.states.num_bytes if self.own is None else self.own.num_bytes
        running_bytes = 2 * sum(self._page_bytes) + 2 * state_bytes
        most = budget_bytes // MAX_RUNNING_SHARE // max(running_bytes, 1)
        self.max_batch = max(1, min(make.max_batch, most))
        # While tails of a layer grow they are there twice, and that counts too.
        growing = 2 * max(self._page_bytes, default=0)
        room = budget_bytes - self.max_batch * (running_bytes + growing)
        self.state_group = self._state_group(room)
        if self.state_group is not None:
            room -= self.state_group.max_snapshots * self.states.num_bytes
        self.groups = replace(make, max_batch=self.max_batch).groups(room, num_pages)
        self._paged_budget = room
        self._num_pages = [group.allocator.num_pages for group in self.groups]
        self._costs = [group.page_bytes for group in self.groups]  # on any rank
        self._reserved = 0  # bytes of the budget that are left to something else
        self._filled = [group for group in self.groups if group.layers]  # those that have arrays
        group_of = {i: g for g, group in enumerate(self.groups) for i in group.layers}
        self._group_of = [group_of[i] for i in range(len(self._paged))]
        if self._fixed:
            check_memory(sum(g.allocator.num_pages * g.page_bytes for g in self.groups))

    def _state_group(self, budget_bytes: int) -> StateGroup | None:
        """Snapshots within a share of the budget; None: there are no state layers."""
        if self.own is not None:
            return StateGroup(self.own.num_bytes, max_snapshots=0)
        if not self._has_states:
            return None
        max_snapshots = max(budget_bytes // SNAPSHOT_SHARE, 0) // max(self.states.num_bytes, 1)
        return StateGroup(self.states.num_bytes, max_snapshots)

    def reset(self) -> None:
        """Fresh arrays: after a failed step nothing in the old ones can be trusted."""
        self.pools = [self._pool(layer) for layer in self._paged]
        self.states.reset()
        if self.own is not None:
            self.own.reset()
        self._used_slots: set[int] = set()
        self._steps: list[StepKV | LatentStep] = []  # of the layers that have pages
        mx.eval([pool.arrays() for pool in self.pools])
        for group in self._filled:
            self._note_size(group)

    def _pool(self, layer: int) -> LayerPool | JointPool | LatentPool:
        """The empty pool of a layer."""
        place, bits = self._paged[layer], self.bits[layer]
        spec = self._paged_specs[place]
        sizes: dict[str, Any] = {
            "page_size": self.page_size,
            "num_pages": self._first_pages(self.groups[self._group_of[place]]),
            "num_slots": min(FIRST_SLOTS, self.max_batch),
            "dtype": self.dtype,
            "bits": bits,
        }
        if isinstance(spec, LatentSpec):
            return (RankedPool if spec.index_dim else LatentPool)(spec, **sizes)
        if spec.turning:
            return JointPool(spec, **sizes)
        return LayerPool(spec, **sizes, key_bias=self._key_biases.get(layer))

    def _first_pages(self, group: LayerGroup) -> int:
        total = group.allocator.num_pages
        return total if self._fixed else min(total, max(FIRST_PAGES, group.allocator.extent))

    def lower(self, max_batch: int, pages: Sequence[tuple[int, int]], max_snapshots: int) -> None:
        """Have room as the rank with the least: of each group, pages and the most bytes of one."""
        self.max_batch = max_batch
        for group, (count, _) in zip(self.groups, pages, strict=True):
            group.allocator.resize(count)
        self._num_pages, self._costs = [n for n, _ in pages], [cost for _, cost in pages]
        if self.state_group is not None:
            self.state_group.max_snapshots = max_snapshots

    # -- capacity -------------------------------------------------------------------------------

    @property
    def max_tokens(self) -> int:
        """Positions that one sequence may ever have, if it runs alone."""
        held = [group.max_pages(ENDLESS) for group in self.groups]
        short = [
            group.allocator.num_pages * self.page_size
            for group, most in zip(self.groups, held, strict=True)
            if group.allocator.num_pages < most
        ]
        return min(short, default=ENDLESS)

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all arrays."""
        paged = sum(array.nbytes for pool in self.pools for array in pool.arrays())
        own = self.own.bytes_allocated if self.own is not None else 0
        return paged + self.states.bytes_allocated + own

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
        full = [g for g, group in enumerate(self.groups) if group.max_pages(ENDLESS) >= endless]
        if self._fixed or not full:
            paged = sum(a * b for a, b in zip(self._num_pages, self._costs, strict=True))
            return num_bytes <= max(self._paged_budget - paged, 0)
        if self._reserved == num_bytes:
            return True
        cost = sum(self._costs[g] for g in full)
        wanted = {g: self._num_pages[g] - -(-num_bytes // max(cost, 1)) for g in full}
        for g, count in wanted.items():
            group = self.groups[g]
            longest = max([group.max_pages(length) for length in lengths], default=2)
            sizes = [self.pools[layer].num_pages for layer in group.layers]
            needed = max([longest, group.allocator.extent, *sizes])
            if count < min(needed, group.allocator.num_pages):
                return False
        for g, count in wanted.items():
            self.groups[g].allocator.resize(count)
        self._reserved = num_bytes
        return True

    def must_grow(self, num_slots: int) -> bool:
        """Whether a step needs more pages or tails than the arrays have, or will before long."""
        for group in self._filled:
            slots = self.pools[group.layers[0]].num_slots
            if group.allocator.extent > group.allocator.num_present or num_slots > slots:
                return True
        return False

    def make_room(self, num_slots: int) -> None:
        """Grow the arrays until all pages handed out and `num_slots` tails are there.

        Pages that are soon wanted come a layer a step, see `budget.py`.
        """
        for group in self._filled:
            if group.allocator.extent > group.allocator.num_present:
                self._grow_pages(group)
            slots = self.pools[group.layers[0]].num_slots
            if num_slots > slots:
                self.bytes_grown += slots * 2 * group.page_bytes
                for layer in group.layers:
                    self.pools[layer].grow_tails(min(max(2 * slots, num_slots), self.max_batch))

    def _grow_pages(self, group: LayerGroup) -> None:
        sizes = [self.pools[layer].num_pages for layer in group.layers]
        places, wanted = layers_to_grow(sizes, group.allocator.extent, group.allocator.num_pages)
        for place in places:
            layer = group.layers[place]
            self.bytes_grown += sizes[place] * self._page_bytes[layer]
            self.pools[layer].grow_pages(wanted)
        self._note_size(group)

    def _note_size(self, group: LayerGroup) -> None:
        """Note up to which page the pools need not grow.

        The last layer is the last to grow: what it has all have.
        """
        pages = self.pools[group.layers[-1]].num_pages
        group.allocator.num_present = growth_threshold(pages, group.allocator.num_pages)

    def clear_tails(self, slots: Sequence[int]) -> None:
        """Zero reused tails: masked entries are multiplied by 0, so a stale NaN would spread."""
        for pool in self.pools if slots else ():
            there = [slot for slot in slots if slot < pool.num_slots]  # others come as zeros
            if there:
                pool.clear_tails(there)

    def count_copies(self) -> None:
        """A step was launched while another held the tails: they are copied as they are written."""
        for group in self._filled:
            self.bytes_copied += self.pools[group.layers[0]].num_slots * 2 * group.page_bytes

    # -- one step -------------------------------------------------------------------------------

    def seal(self, moves: Sequence[Move]) -> None:
        """Move tail pages into the pools.

        Only behind a barrier. Pages that a window recycled already are left out.
        """
        for g, group in enumerate(self.groups) if moves else ():
            found = seal_index(moves, g, self.page_size)
            if found is not None:
                slots, offsets, targets = (mx.array(part) for part in found)
                for layer in group.layers:
                    self.pools[layer].seal(slots, offsets, targets)

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
        self.seal(work.seal)
        for slot, snapshot in work.save:
            self.states.save(slot, snapshot)
        spilled = self.read_out(work.spill)
        self._fill(work.load)
        self.clear_tails([slot for slot in new_slots if slot in self._used_slots])
        self._used_slots.update(new_slots)
        self._copy_partial(work.copies)
        if self.state_group is not None:
            (self.states if self.own is None else self.own).leave(work.leave)
            for snapshot, slot in work.resume:
                self.states.restore(snapshot, slot)
            self.states.drop(work.drop)
        return spilled

    def read_out(self, spills: Sequence[Spill]) -> list[tuple[Spill, bytes]]:
        """The payloads of pages; only behind a barrier, after seals."""
        spilled: list[tuple[Spill, bytes]] = []
        paged = [spill for spill in spills if spill.group < len(self.groups)]
        for group in sorted({spill.group for spill in paged}):
            some = [spill for spill in paged if spill.group == group]
            pages = [spill.page for spill in some]
            payloads = read_pages(self.planes(group), pages, self.page_size)
            spilled += zip(some, payloads, strict=True)
        snapshots = [spill for spill in spills if spill.group == len(self.groups)]
        return spilled + [(spill, self.states.read(spill.page)) for spill in snapshots]

    def _fill(self, loads: Sequence[Load]) -> None:
        paged = [load for load in loads if load.group < len(self.groups)]
        for group in sorted({load.group for load in paged}):
            some = [load for load in paged if load.group == group]
            pages, payloads = [load.page for load in some], [load.payload for load in some]
            write_pages(self.planes(group), pages, self.page_size, payloads)
        for load in loads:
            if load.group == len(self.groups):
                self.states.load(load.page, load.payload)

    def _copy_partial(self, copies: Sequence[PartialCopy]) -> None:
        """Copy beginnings of shared pages into pages and tails; all are read before any write."""
        if not copies:
            return
        taken = []
        for tables, slot, start, stop, pages in copies:
            for group, (table, page) in enumerate(zip(tables, pages, strict=True)):
                if page is not None:
                    (target, _), *_ = table.runs(start, stop)
                    place = target, slot, start % (2 * self.page_size)
                    source = page * self.page_size
                    taken += [
                        (plane, plane.copy_out(source, source + stop - start), place)
                        for plane in self.planes(group)
                    ]
        mx.eval([parts for _, parts, _ in taken])  # before the pages that they lie in are written
        for plane, parts, place in taken:
            plane.copy_in(parts, *place)

    def planes(self, group: int) -> list[Plane]:
        """What each layer of a group keeps, in order."""
        return [plane for i in self.groups[group].layers for plane in self.pools[i].planes]

    def begin_step(self, segments: StepSegments) -> Sequence[LayerStep | None]:
        """What each layer that is here attends through, until the next step begins."""
        if self.own is not None:
            return [self.own.begin_step(segments)]
        by_position = self._heads or self._key_biases
        positions = padded_positions(segments.positions) if by_position else None
        plans = [
            plan_group(
                segments,
                group=g,
                window=group.window,
                page_size=self.page_size,
                planner=group.planner,
                prefill=group.prefill,
                positions=positions,
                short_apart=group.latent,
            )
            for g, group in enumerate(self.groups)
        ]
        if not self._steps:
            self._steps = [
                self._step(layer, plans[g])
                for layer, g in zip(self._paged, self._group_of, strict=True)
            ]
        for step, group in zip(self._steps, self._group_of, strict=True):
            step.plan = plans[group]
        if not self._has_states and len(self._steps) == len(self.specs):
            return [*self._steps]
        steps: dict[int, LayerStep] = dict(zip(self._paged, self._steps, strict=True))
        if self._has_states:
            steps.update(zip(self._stateful, self.states.begin_step(segments), strict=True))
        return [steps.get(i) for i in range(len(self.specs))]

    def commit(self, num_kept: Mapping[int, int]) -> None:
        """Take back rejected tokens of the oldest step that verifies and was not committed.

        Of each tail slot in `num_kept` so many of its first tokens stay. Pages and tails need
        nothing: what lies behind a sequence's end is never read.
        """
        if self._has_states:
            self.states.commit(num_kept)
        if self.own is not None:
            self.own.commit(num_kept)

    def step_outputs(self) -> list[mx.array]:
        """Arrays that the last step makes and no later layer reads, to be evaluated with it."""
        if self.state_group is None:
            return []
        return (self.states if self.own is None else self.own).outputs()

    def _step(self, layer: int, plan: GroupPlan) -> StepKV | LatentStep:
        pool = self.pools[self._paged[layer]]
        if isinstance(pool, LatentPool):
            return pool.step(plan, tiles=layer in self._prefill_layers)
        return StepKV(
            pool,
            plan,
            self._heads.get(layer),
            tiles=layer in self._prefill_layers,
            writes_tails=layer in self._tail_layers,
        )
