"""Which layers share page tables, how many pages a budget gives each group, and how they attend."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..core import KVSpec, LatentSpec, PagedSpec
from .budget import MAX_BARE_PAGES, page_counts
from .formats import PLAIN, Bits, token_bytes
from .groups import AttentionWindow, PageGroup
from .kernel_attention import ChosenPlanner, KernelPlanner, PrefillPlanner, ReadyFor
from .latent import LatentKernelPlanner
from .pages import PageAllocator
from .plain_attention import PlainPlanner
from .step import ChunkPlanner, Planner

GroupKey = tuple[bool, int, int, bool]  # latent, window or 0, sinks, chunked


@dataclass(slots=True)
class LayerGroup(PageGroup):
    """A page group with its layers."""

    latent: bool  # latent attention: one vector a token
    layers: list[int]  # places among the layers that have pages
    planner: Planner  # of short segments
    prefill: ChunkPlanner | None  # of prefill chunks through a kernel; None: no layer has one


@dataclass(frozen=True, slots=True)
class GroupMaker:
    """Makes the layer groups of a cache, which follow from sizes and formats.

    Args:
        specs: of the layers that have pages.
        bits: of each.
        dtype: of what is not quantised.
        page_size: tokens a page.
        max_batch: sequences that may run at once.
        prefill_chunk: tokens of a step's prefill.
        kernel_layers: places of those with Metal kernels for attention.
        prefill_layers: places of those with one for prefill.
        own_token_bytes: of a token in caches that the model keeps by itself.
        absent: specs of layers that another rank has. Groups are those of the whole model.
    """

    specs: Sequence[PagedSpec]
    bits: Sequence[Bits]
    dtype: mx.Dtype
    page_size: int
    max_batch: int
    prefill_chunk: int
    kernel_layers: Mapping[int, ReadyFor]
    prefill_layers: Collection[int] = ()
    own_token_bytes: int = 0
    absent: Sequence[PagedSpec] = ()

    def groups(self, budget_bytes: int, num_pages: int | None) -> list[LayerGroup]:
        """Groups, and as many pages for each as there is room for.

        Args:
            budget_bytes: for all pages.
            num_pages: of every full group instead.
        """
        if not self.specs and not self.absent:
            return [self._bare(budget_bytes, num_pages)]
        members: dict[GroupKey, list[int]] = {_key(spec): [] for spec in self.absent}
        for i, spec in enumerate(self.specs):
            members.setdefault(_key(spec), []).append(i)
        found = sorted(members.items(), key=lambda item: item[0])
        windows = [AttentionWindow(key[1] or None, *key[2:]) for key, _ in found]
        costs = [[self.page_bytes(i) for i in layers] for _, layers in found]
        counts = page_counts(
            # The keys or values of one are there twice.
            [sum(cost) + max(cost, default=0) for cost in costs],
            budget_bytes,
            max_held=[self._max_held(window) for window in windows],
            num_pages=num_pages,
        )
        return [
            LayerGroup(
                window,
                PageAllocator(count),
                self.page_size,
                self.prefill_chunk,
                sum(cost),
                latent=key[0],
                layers=layers,
                planner=self._planner(g, window, layers),
                prefill=self._prefill(g, window, layers),
            )
            for g, ((key, layers), window, cost, count) in enumerate(
                zip(found, windows, costs, counts, strict=True)
            )
        ]

    def page_bytes(self, layer: int) -> int:
        """Bytes of a page of one layer."""
        return token_bytes(self.specs[layer], self.dtype, self.bits[layer]) * self.page_size

    def _bare(self, budget_bytes: int, num_pages: int | None) -> LayerGroup:
        """A group of no layers: its pages count what lies elsewhere, and make the prefix tree."""
        page_bytes = self.own_token_bytes * self.page_size
        count = num_pages or MAX_BARE_PAGES
        if page_bytes:
            (count,) = page_counts([page_bytes], budget_bytes, max_held=[None], num_pages=num_pages)
        return LayerGroup(
            AttentionWindow(),
            PageAllocator(count),
            self.page_size,
            self.prefill_chunk,
            page_bytes,
            latent=False,
            layers=[],
            planner=_no_plan,
            prefill=None,
        )

    def _planner(self, group: int, window: AttentionWindow, layers: list[int]) -> Planner:
        """How short segments of a group attend: through kernels where they may, or in plain MLX."""
        if not layers:
            return _no_plan
        spec = self.specs[layers[0]]
        plain = PlainPlanner(
            group,
            window,
            self.page_size,
            token_bytes=max([token_bytes(self.specs[i], self.dtype, PLAIN) for i in layers]),
        )
        if not set(self.kernel_layers).issuperset(layers):
            return plain
        ready = list(dict.fromkeys([self.kernel_layers[i] for i in layers]))
        if isinstance(spec, LatentSpec):
            return ChosenPlanner(LatentKernelPlanner(group, window, self.page_size), plain, ready)
        kernels = KernelPlanner(group, window, self.page_size, kv_heads=spec.num_kv_heads)
        return ChosenPlanner(kernels, plain, ready)

    def _prefill(
        self, group: int, window: AttentionWindow, layers: list[int]
    ) -> ChunkPlanner | None:
        """How the prefill chunks of a group attend in layers that have a kernel."""
        # Latents are expanded layer by layer: there is no plan to share.
        pages = layers and not isinstance(self.specs[layers[0]], LatentSpec)
        if pages and not set(self.prefill_layers).isdisjoint(layers):
            return PrefillPlanner(group, window, self.page_size)
        return None

    def _max_held(self, window: AttentionWindow) -> int | None:
        """Pages of a window that `max_batch` sequences can hold; None: bound by their length."""
        if window.size is None:
            return None
        held = -(-(window.size - 1) // self.page_size) + 2 + window.kept_pages(self.page_size)
        return self.max_batch * held + self.prefill_chunk // self.page_size


def _key(spec: PagedSpec) -> GroupKey:
    chunked = isinstance(spec, KVSpec) and spec.chunked
    return isinstance(spec, LatentSpec), spec.window or 0, spec.sinks, chunked


def _no_plan(segments: object, num_rows: int) -> list[Any]:
    """The planner of a group without layers."""
    return []
