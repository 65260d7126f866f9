"""The KV cache of a model: layer groups, their pages and pools, within a budget. Knows no queue."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..core import LatentSpec, PagedSpec
from ..metal_kernels.heads import Heads
from .budget import FIRST_PAGES, check_memory, growth_threshold, layers_to_grow, page_counts
from .formats import PLAIN, Bits
from .groups import ENDLESS, PageGroup
from .kernel_attention import KernelPlanner
from .latent import LatentKernelPlanner, LatentPool, LatentStep
from .pages import PageAllocator
from .payload import read_pages, write_pages
from .plain_attention import PlainPlanner
from .pool import LayerPool, Plane, token_bytes
from .segments import StepSegments
from .step import GroupPlan, Planner, StepKV, padded_positions, plan_group
from .window import AttentionWindow
from .work import CacheWork, Load, Move, PartialCopy, Spill, seal_index

FIRST_SLOTS = 4
MAX_TAIL_SHARE = 4  # tails may take one part in so many of the budget


@dataclass(slots=True)
class LayerGroup(PageGroup):
    """A page group with its layers."""

    latent: bool  # latent attention: one vector a token
    layers: list[int]
    planner: Planner  # of short segments


class KVCache:
    """Pages and tails of all layers.

    Args:
        specs: what each layer keeps.
        dtype: of keys and values.
        page_size: tokens a page.
        max_batch: sequences that may run at once; lowered where tails would take over the budget.
        prefill_chunk: tokens of a step's prefill; windows hold that much more for a moment.
        budget_bytes: for pages and tails together.
        num_pages: pages of every full group instead of as many as the budget holds.
        bits: of keys and values, for each layer; None: all in `dtype`.
        kernel_layers: whose attention over pages may use the Metal kernel.
        heads: of layers whose keys and values are written by the Metal kernel.

    Raises:
        InsufficientMemoryError: the budget does not hold one sequence of a page.
    """

    def __init__(
        self,
        specs: Sequence[PagedSpec],
        *,
        dtype: mx.Dtype,
        page_size: int,
        max_batch: int,
        prefill_chunk: int,
        budget_bytes: int,
        num_pages: int | None = None,
        bits: Sequence[Bits] | None = None,
        kernel_layers: frozenset[int] = frozenset(),
        heads: Mapping[int, Heads] | None = None,
    ) -> None:
        self._heads = heads or {}
        self._kernel_layers = kernel_layers
        self.specs = list(specs)
        self.dtype = dtype
        self.page_size = page_size
        self._prefill_chunk = prefill_chunk
        self.bits = list(bits or [PLAIN] * len(specs))
        self.bytes_copied = 0  # tails copied because a step was in flight
        self.bytes_grown = 0  # copied while pools grew
        per_page = [
            token_bytes(spec, dtype, b) * page_size
            for spec, b in zip(specs, self.bits, strict=True)
        ]
        self._page_bytes = per_page  # of each layer
        tail_bytes = 2 * sum(per_page)  # of one sequence
        self.max_batch = max(1, min(max_batch, budget_bytes // MAX_TAIL_SHARE // tail_bytes))
        # While tails of a layer grow they are there twice, and that counts too.
        room = budget_bytes - self.max_batch * (tail_bytes + 2 * max(per_page))
        self.groups = self._layer_groups(room, num_pages)
        group_of = {i: g for g, group in enumerate(self.groups) for i in group.layers}
        self._group_of = [group_of[i] for i in range(len(specs))]
        self._fixed = num_pages is not None
        if self._fixed:
            check_memory(sum(g.allocator.num_pages * g.page_bytes for g in self.groups))
        self.reset()

    def _layer_groups(self, budget_bytes: int, num_pages: int | None) -> list[LayerGroup]:
        """Layers that keep the same positions, and as many pages for them as there is room for."""
        members: dict[GroupKey, list[int]] = {}
        for i, spec in enumerate(self.specs):
            members.setdefault(_group_key(spec), []).append(i)
        found = sorted(members.items(), key=lambda item: item[0])
        windows = [AttentionWindow(size or None, sinks) for (_, size, sinks), _ in found]
        costs = [[self._page_bytes[i] for i in layers] for _, layers in found]
        counts = page_counts(
            [sum(cost) + max(cost) for cost in costs],  # the keys or values of one are there twice
            budget_bytes,
            max_held=[self._max_held(window, self._prefill_chunk) for window in windows],
            num_pages=num_pages,
        )
        return [
            LayerGroup(
                window,
                PageAllocator(count),
                self.page_size,
                self._prefill_chunk,
                sum(cost),
                latent=key[0],
                layers=layers,
                planner=self._planner(g, window, layers),
            )
            for g, ((key, layers), window, cost, count) in enumerate(
                zip(found, windows, costs, counts, strict=True)
            )
        ]

    def _planner(self, group: int, window: AttentionWindow, layers: list[int]) -> Planner:
        """How short segments of a group attend: through kernels, or in plain MLX."""
        spec = self.specs[layers[0]]
        if self._kernel_layers.issuperset(layers):
            if isinstance(spec, LatentSpec):
                return LatentKernelPlanner(group, window, self.page_size)
            return KernelPlanner(group, window, self.page_size, kv_heads=spec.num_kv_heads)
        return PlainPlanner(
            group,
            window,
            self.page_size,
            token_bytes=max([token_bytes(self.specs[i], self.dtype, PLAIN) for i in layers]),
            decodes=any(self.bits[i] != PLAIN for i in layers),
        )

    def _max_held(self, window: AttentionWindow, prefill_chunk: int) -> int | None:
        """Pages of a window that `max_batch` sequences can hold; None: bound by their length."""
        if window.size is None:
            return None
        held = -(-(window.size - 1) // self.page_size) + 2 + window.kept_pages(self.page_size)
        return self.max_batch * held + prefill_chunk // self.page_size

    def reset(self) -> None:
        """Fresh arrays: after a failed step nothing in the old ones can be trusted."""
        self.pools = [self._pool(i) for i in range(len(self.specs))]
        self._used_slots: set[int] = set()
        self._steps: list[StepKV | LatentStep] = []
        mx.eval([pool.arrays() for pool in self.pools])
        for group in self.groups:
            self._note_size(group)

    def _pool(self, layer: int) -> LayerPool | LatentPool:
        """The empty pool of a layer."""
        spec, bits = self.specs[layer], self.bits[layer]
        num_pages = self._first_pages(self.groups[self._group_of[layer]])
        sizes: dict[str, Any] = {
            "page_size": self.page_size,
            "num_pages": num_pages,
            "num_slots": min(FIRST_SLOTS, self.max_batch),
            "dtype": self.dtype,
            "bits": bits,
        }
        if isinstance(spec, LatentSpec):
            return LatentPool(spec, **sizes)
        return LayerPool(spec, **sizes)

    def _first_pages(self, group: LayerGroup) -> int:
        total = group.allocator.num_pages
        return total if self._fixed else min(total, max(FIRST_PAGES, group.allocator.extent))

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
        return sum(array.nbytes for pool in self.pools for array in pool.arrays())

    def must_grow(self, num_slots: int) -> bool:
        """Whether a step needs more pages or tails than the arrays have, or will before long."""
        return any(
            num_slots > self.pools[group.layers[0]].num_slots
            or group.allocator.extent > group.allocator.num_present
            for group in self.groups
        )

    def make_room(self, num_slots: int) -> None:
        """Grow the arrays until all pages handed out and `num_slots` tails are there.

        Pages that are soon wanted come a layer a step, see `growth.py`.
        """
        for group in self.groups:
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
        """Up to where pages may be handed out before the pools begin to grow.

        The last layer is the last to grow: what it has all have.
        """
        pages = self.pools[group.layers[-1]].num_pages
        group.allocator.num_present = growth_threshold(pages, group.allocator.num_pages)

    def clear_tails(self, slots: Sequence[int]) -> None:
        """Before new owners write to tails: what is masked there is still multiplied, by 0.

        Numbers do no harm then; NaN and infinity, which an owner may have left, would.
        """
        there = [slot for slot in slots if slot < self.pools[0].num_slots]  # others come as zeros
        for pool in self.pools if there else ():
            pool.clear_tails(there)

    def count_copies(self) -> None:
        """A step was launched while another held the tails: they are copied as they are written."""
        for group in self.groups:
            self.bytes_copied += self.pools[group.layers[0]].num_slots * 2 * group.page_bytes

    # -- one step -------------------------------------------------------------------------------

    def seal(self, moves: Sequence[Move]) -> None:
        """Move tail pages into the pools.

        Only behind a barrier. Pages that a window let go of already are left out.
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
        """Do what must be done before a step; the payloads of the pages that are read out.

        Only behind a barrier where `work.writes_pages`.

        Args:
            work: of the step.
            new_slots: have a new owner in this step.
        """
        self.seal(work.seal)
        spilled = self.read_out(work.spill)
        self._fill(work.load)
        self.clear_tails([slot for slot in new_slots if slot in self._used_slots])
        self._used_slots.update(new_slots)
        self._copy_partial(work.copies)
        return spilled

    def read_out(self, spills: Sequence[Spill]) -> list[tuple[Spill, bytes]]:
        """The payloads of pages; only behind a barrier, after seals."""
        spilled: list[tuple[Spill, bytes]] = []
        for group in sorted({spill.group for spill in spills}):
            some = [spill for spill in spills if spill.group == group]
            pages = [spill.page for spill in some]
            payloads = read_pages(self.planes(group), pages, self.page_size)
            spilled += zip(some, payloads, strict=True)
        return spilled

    def _fill(self, loads: Sequence[Load]) -> None:
        for group in sorted({load.group for load in loads}):
            some = [load for load in loads if load.group == group]
            pages, payloads = [load.page for load in some], [load.payload for load in some]
            write_pages(self.planes(group), pages, self.page_size, payloads)

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

    def begin_step(self, segments: StepSegments) -> "list[StepKV | LatentStep]":
        """What each layer attends through, for a step of these segments, until the next begins."""
        positions = padded_positions(segments.positions) if self._heads else None
        plans = [
            plan_group(
                segments,
                group=g,
                window=group.window,
                page_size=self.page_size,
                planner=group.planner,
                positions=positions,
                short_apart=group.latent,
            )
            for g, group in enumerate(self.groups)
        ]
        if not self._steps:
            self._steps = [self._step(i, plans[g]) for i, g in enumerate(self._group_of)]
        for step, group in zip(self._steps, self._group_of, strict=True):
            step.plan = plans[group]
        return self._steps

    def _step(self, layer: int, plan: GroupPlan) -> StepKV | LatentStep:
        pool = self.pools[layer]
        if isinstance(pool, LatentPool):
            return LatentStep(pool, plan)
        return StepKV(pool, plan, self._heads.get(layer))


GroupKey = tuple[bool, int, int]  # latent, window or 0, sinks


def _group_key(spec: PagedSpec) -> GroupKey:
    return isinstance(spec, LatentSpec), spec.window or 0, spec.sinks
