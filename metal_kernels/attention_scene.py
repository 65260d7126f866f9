"""Sequences over pages and tails on which attention kernels check themselves. Knows no kernel."""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .attention_plan import AttentionPlan, AttentionPlanner, page_table
from .kv_write import stored
from .stored import FORMATS, Vectors
from .variants import Variant

PAGE = 16

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Scene:
    """Some sequences of as many queries each, and their cache."""

    queries: mx.array  # (T, H * G, D)
    keys: Vectors
    values: Vectors
    starts: Ints
    sealed: Ints
    tables: list[Ints]

    def plan(self, kv_heads: int, **how: int | None) -> AttentionPlan:
        """The plan of all queries; `how` is as for `AttentionPlanner`."""
        count = len(self.queries) // len(self.starts)
        planner = AttentionPlanner(
            counts=np.full_like(self.starts, count),
            sealed=self.sealed,
            slots=np.arange(len(self.starts), dtype=np.int32),
            page_size=PAGE,
            kv_heads=kv_heads,
            **how,  # type: ignore[arg-type]
        )
        return planner(self.starts, page_table(self.tables))


def in_shared_tails(keys: Vectors, values: Vectors) -> tuple[Vectors, Vectors]:
    """Keys and values that are stored alike, in the same tails."""
    pairs = zip(keys.tails, values.tails, strict=True)
    tails = [mx.concatenate([*pair], axis=1) for pair in pairs]
    heads = keys.tail_heads
    keys = replace(keys, tails=tails, tail_heads=2 * heads)
    return keys, replace(values, tails=tails, tail_heads=2 * heads, tail_head=heads)


def in_one_vector(whole: Vectors, key_dim: int, vector_dim: int) -> tuple[Vectors, Vectors]:
    """Keys, the last numbers of vectors, and values, the first ones."""
    return replace(whole, first=vector_dim - key_dim), whole


def build_scene(variant: Variant, starts: Ints, kv_heads: int, *, shuffled: bool) -> Scene:
    """Random sequences, always the same.

    Args:
        variant: of an attention kernel.
        starts: (B,) position of the first query of each.
        kv_heads: one where keys and values are one latent vector.
        shuffled: pages lie anywhere; else each sequence's lie in order, one after the other.
    """
    rng = np.random.default_rng(0)
    dtype, key_dim = variant.dtype, variant.number("key_dim")
    sealed = starts // PAGE * PAGE
    counts = sealed // PAGE
    pages = np.arange(counts.sum(), dtype=np.int32)
    if shuffled:
        pages = rng.permutation(pages)
    tables = np.split(pages, np.cumsum(counts)[:-1])
    num_tokens = max(len(pages), 1) * PAGE

    def plane(dim: int, bits: int) -> Vectors:
        shapes = [(kv_heads, num_tokens, dim), (len(starts), kv_heads, 2 * PAGE, dim)]
        vectors = [mx.array(rng.uniform(-1, 1, shape).astype(np.float32)) for shape in shapes]
        pages, tails = (stored(v, FORMATS[bits], dtype) for v in vectors)
        return Vectors(FORMATS[bits], pages, tails, dim, kv_heads)

    shape = (len(starts) * variant.number("queries"), kv_heads * variant.number("group"), key_dim)
    # Of latent attention keys are whole vectors.
    joint_dim = int(dict(variant.values).get("joint_dim", key_dim))
    keys = values = plane(joint_dim or key_dim, variant.number("key_bits"))
    if joint_dim:
        keys, values = in_one_vector(keys, key_dim, joint_dim)
    else:
        dims = key_dim, variant.number("value_dim")
        bits = variant.number("key_bits"), variant.number("value_bits")
        values = plane(dims[1], bits[1])
        if dims[0] == dims[1] and bits[0] == bits[1]:
            keys, values = in_shared_tails(keys, values)
    queries = mx.array(rng.uniform(-1, 1, shape).astype(np.float32)).astype(dtype)
    return Scene(queries, keys, values, starts, sealed, tables)
