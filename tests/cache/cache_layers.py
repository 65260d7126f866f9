"""Layers of a KV cache and steps over them, for tests."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer.cache import attention
from mlxinfer.cache.inputs import StepMetadata
from mlxinfer.cache.layout import LAYERS
from mlxinfer.cache.paged import TailPlace
from mlxinfer.cache.pages import AttentionWindow, PageAllocator, PageGroup, PageTable
from mlxinfer.cache_specs import CacheSpec
from mlxinfer.metal_kernels.stored import FORMATS

PAGE = 16
EVERYTHING = AttentionWindow()

Bits = tuple[int | None, int | None]


@dataclass
class Tokens:
    """New tokens of one sequence, as `engine.batch.Segment` states them."""

    row: int
    start: int
    num_tokens: int
    sealed: int
    slot: int
    tables: list[PageTable] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


def layer_of(
    spec: CacheSpec,
    bits: Bits = (None, None),
    *,
    num_pages: int,
    num_slots: int,
    dtype: mx.Dtype = mx.float32,
    page_size: int = PAGE,
) -> Any:
    """A layer with empty arrays."""
    layer = LAYERS[type(spec)].of(spec, (FORMATS[bits[0]], FORMATS[bits[1]]), dtype)
    layer.allocate(page_size, num_pages, num_slots)
    return layer


def fill(layer: Any, seed: int) -> None:
    """Noise in all pages and tails of a layer."""
    rng = np.random.default_rng(seed)
    for plane in layer.planes:
        for arrays in (plane.pages, plane.tails):
            noise = rng.standard_normal((*arrays[0].shape[:-1], plane.vector_dim), dtype=np.float32)
            arrays[:] = plane.fmt.encode(mx.array(noise).astype(layer.dtype))


def prepare(layer: Any, metadata: StepMetadata, window: AttentionWindow = EVERYTHING) -> None:
    """Let a layer see a step."""
    group = PageGroup(window, PageAllocator(1), layer.page_size, 64, 1)
    place = TailPlace.of(metadata, layer.page_size, by_position=layer.by_position)
    layer.prepared = attention.prepare(metadata, group, [layer], place)
    layer.step_head_writer = layer.head_writer
