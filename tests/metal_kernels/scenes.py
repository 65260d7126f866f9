"""Inputs of attention kernels: sequences over shuffled pages and tails. Knows no kernel's insides.

What no query may see is NaN: a kernel that looks at it shows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxinfer.metal_kernels.attention_cases import in_one_vector, in_shared_tails
from mlxinfer.metal_kernels.attention_plan import (
    AttentionPlan,
    AttentionPlanner,
    page_table,
    tile_queries,
)
from mlxinfer.metal_kernels.stored import FORMATS, Plane

Ints = NDArray[np.int32]

SPARE_SLOTS = 2  # tails of no sequence
SPARE_PAGES = 3


def vector_bytes(vectors: Plane) -> int:
    """Of one token and head."""
    return sum(part.shape[-1] * part.dtype.size for part in vectors.pages)


@dataclass(frozen=True, slots=True)
class Scene:
    """Sizes of one call of attention.

    Args:
        lengths: tokens of each sequence, its queries included.
        queries: query tokens of each sequence.
        kv_heads, group: KV heads, and query heads of each.
        key_dim, value_dim: numbers of a key and of a value.
        dtype: of queries, and of keys and values that are plain.
        bits: of keys and of values; None: plain.
        item_blocks: as for `AttentionPlanner`.
        rope_dims: keys and values are numbers of vectors of value_dim and so many more; 0: each has
            vectors of its own.
        prefill: queries are written to pages before they attend, and attend in tiles.
    """

    lengths: Sequence[int]
    queries: Sequence[int]
    kv_heads: int = 1
    group: int = 1
    key_dim: int = 64
    value_dim: int = 64
    dtype: mx.Dtype = mx.float16
    bits: tuple[int | None, int | None] = (None, None)
    window: int | None = None
    sinks: int = 0
    page_size: int = 16
    item_blocks: int | None = None
    rope_dims: int = 0
    prefill: bool = False
    seed: int = 0


@dataclass(slots=True)
class Inputs:
    """Arguments of the typed functions."""

    queries: mx.array  # (T, H * G, D)
    keys: Plane
    values: Plane
    plan: AttentionPlan
    visible: int  # (sequence, token) pairs that any query sees
    sink_logits: mx.array = field(init=False)  # (H * G,)

    def __post_init__(self) -> None:
        self.sink_logits = self.queries[0, :, 0].astype(mx.float32)

    @property
    def least_bytes(self) -> int:
        """Of keys and values, each read once per KV head."""
        heads = self.keys.pages[0].shape[0]
        values = 0 if self.keys.first else vector_bytes(self.values)
        return self.visible * heads * (vector_bytes(self.keys) + values)


def build(scene: Scene) -> Inputs:
    """Random inputs, the same for the same scene."""
    rng = np.random.default_rng(scene.seed)
    stops = np.array(scene.lengths, np.int32)
    starts = stops - np.array(scene.queries, np.int32)
    sealed = _sealed(rng, starts, stops, scene.page_size)
    if scene.prefill:
        sealed = -(-stops // scene.page_size) * scene.page_size
    tables, num_pages = _tables(rng, scene, starts, sealed)
    slots = rng.permutation(len(stops) + SPARE_SLOTS)[: len(stops)].astype(np.int32)
    in_pages, in_tails = _seen(scene, starts, stops, sealed, tables, slots, num_pages)
    joint_dim = scene.value_dim + scene.rope_dims
    dims = (joint_dim,) if scene.rope_dims else (scene.key_dim, scene.value_dim)
    planes = [
        _plane(rng, scene, dim, bits, in_pages, in_tails)
        for dim, bits in zip(dims, scene.bits, strict=False)
    ]
    shape = (sum(scene.queries), scene.kv_heads * scene.group, scene.key_dim)
    queries = mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(scene.dtype)
    plan = _plan(scene, starts, stops - starts, sealed, slots, page_table(tables))
    keys, values = planes[0], planes[-1]
    if scene.rope_dims:
        keys, values = in_one_vector(keys, scene.key_dim, scene.value_dim)
    elif scene.key_dim == scene.value_dim and scene.bits[0] == scene.bits[1]:
        keys, values = in_shared_tails(keys, values)
    return Inputs(queries, keys, values, plan, int(in_pages.sum() + in_tails.sum()))


def _plan(
    scene: Scene, starts: Ints, counts: Ints, sealed: Ints, slots: Ints, pages: mx.array
) -> AttentionPlan:
    tile = tile_queries(scene.group, key_dim=scene.key_dim, value_dim=scene.value_dim)
    planner = AttentionPlanner(
        counts=counts,
        sealed=sealed,
        slots=slots,
        page_size=scene.page_size,
        kv_heads=scene.kv_heads,
        window=scene.window,
        sinks=scene.sinks,
        cores=10,
        item_blocks=scene.item_blocks,
        tile_queries=tile if scene.prefill else 0,
        partial_bytes=1 << 30,
    )
    return planner(starts, pages)


def _sealed(rng: np.random.Generator, starts: Ints, stops: Ints, page_size: int) -> Ints:
    """Whole pages before the first query, so that the rest fits a tail of two."""
    most = starts // page_size * page_size
    least = np.maximum(-(-(stops - 2 * page_size) // page_size) * page_size, 0)
    return np.where(rng.random(len(starts)) < 0.5, np.minimum(least, most), most).astype(np.int32)


def _tables(
    rng: np.random.Generator, scene: Scene, starts: Ints, sealed: Ints
) -> tuple[list[Ints], int]:
    """Shuffled pages of each sequence, -1 where a window let go; and how many pages there are."""
    counts = (sealed // scene.page_size).tolist()
    num_pages = sum(counts) + SPARE_PAGES
    pages = rng.permutation(num_pages).astype(np.int32)
    tables = [part.copy() for part in np.split(pages, np.cumsum(counts))[:-1]]
    if scene.window is not None:
        kept = -(-scene.sinks // scene.page_size)
        for table, start in zip(tables, starts.tolist(), strict=True):
            table[kept : max(start - scene.window + 1, 0) // scene.page_size] = -1
    return tables, num_pages


def _seen(
    scene: Scene,
    starts: Ints,
    stops: Ints,
    sealed: Ints,
    tables: list[Ints],
    slots: Ints,
    num_pages: int,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Tokens of the pool (N,) and of tails (slots, 2 * page_size) that any query sees."""
    size = scene.page_size
    in_pages = np.zeros(num_pages * size, np.bool_)
    in_tails = np.zeros((len(slots) + SPARE_SLOTS, 2 * size), np.bool_)
    for start, stop, edge, table, slot in zip(starts, stops, sealed, tables, slots, strict=True):
        positions = np.arange(stop, dtype=np.int32)
        if scene.window is not None:
            near = (positions > start - scene.window) | (positions < scene.sinks)
            positions = positions[near]
        old, new = positions[positions < edge], positions[positions >= edge]
        in_pages[table[old // size] * size + old % size] = True
        in_tails[slot, new % (2 * size)] = True
    return in_pages, in_tails


def _plane(
    rng: np.random.Generator,
    scene: Scene,
    dim: int,
    bits: int | None,
    in_pages: NDArray[np.bool_],
    in_tails: NDArray[np.bool_],
) -> Plane:
    fmt = FORMATS[bits]
    pages, tails = (
        fmt.encode(mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(scene.dtype))
        for shape in (
            (scene.kv_heads, len(in_pages), dim),
            (len(in_tails), scene.kv_heads, in_tails.shape[1], dim),
        )
    )
    hidden = mx.array(~in_pages)[None, :, None], mx.array(~in_tails)[:, None, :, None]
    for parts, where in zip((pages, tails), hidden, strict=True):
        parts[-1] = mx.where(where, mx.array(float("nan"), parts[-1].dtype), parts[-1])
    mx.eval(pages, tails)
    return Plane(fmt, pages, tails, dim, scene.kv_heads)
