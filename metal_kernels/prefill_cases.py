"""Self-checks of attention over prompts in tiles. Knows no GPU."""

from typing import Any

import mlx.core as mx
import numpy as np

from .attention_cases import PAGED_FILES, ROUNDING
from .attention_plan import page_table
from .attention_scene import PAGE, Scene, build_scene
from .attention_shape import prefill_shape, registers
from .paged_attention_gather import paged_attention_gathered
from .paged_attention_kernel import paged_attention_on_metal
from .prefill_attention import prefill_attention_on_metal, tiled
from .prefill_plan import Chunks
from .stored import numbers_of
from .variants import Case, Kind, Value, Variant, dtype_name

STARTS = (5, 70)  # positions of first queries
QUERIES = 40
TIMED_QUERIES = 2_048
LOADS = ((1, 2_048), (1, 6_144))


def prefill_variant(
    dtype: mx.Dtype,
    *,
    key_dim: int,
    value_dim: int,
    group: int,
    key_bits: int | None = None,
    value_bits: int | None = None,
    sink_logits: bool = False,
    joint_dim: int = 0,
    log_sums: bool = False,
) -> Variant:
    """What `prefill_attention_on_metal` compiles; arguments as for `paged_variant`.

    Args:
        log_sums: of `attend_in_tiles`, which joins blocks by them.
    """
    return Variant.of(
        "prefill_attention",
        dtype=dtype_name(dtype),
        key_dim=key_dim,
        value_dim=value_dim,
        group=group,
        key_bits=key_bits or 0,
        value_bits=value_bits or 0,
        sink_logits=sink_logits,
        joint_dim=joint_dim,
        log_sums=log_sums,
    )


def _scene(variant: Variant, stops: tuple[int, ...], queries: int, heads: int) -> Scene:
    """Sequences of whole pages up to `stops`, each with so many queries."""
    asked = Variant.of("paged_attention", **dict(variant.values), queries=queries)
    sealed = np.array([-(-stop // PAGE) * PAGE for stop in stops], np.int32)
    return build_scene(asked, sealed, heads, shuffled=len(stops) > 1)


def _chunks(
    scene: Scene, stops: tuple[int, ...], queries: int, window: int | None, sinks: int
) -> Chunks:
    counts = np.full(len(stops), queries, np.int32)
    return Chunks(
        rows=np.cumsum(counts, dtype=np.int32) - counts,
        starts=np.array(stops, np.int32) - queries,
        counts=counts,
        sealed=scene.sealed,
        slots=np.arange(len(stops), dtype=np.int32),
        pages=page_table(scene.tables),
        page_size=PAGE,
        window=window,
        sinks=sinks,
    )


def _case(variant: Variant) -> Case:
    """Chunks of two sequences: whole; and behind a window, with sinks and a soft cap."""
    stops = tuple(start + QUERIES for start in STARTS)
    scene = _scene(variant, stops, QUERIES, 2)
    plain = _chunks(scene, stops, QUERIES, None, 0)
    windowed = _chunks(scene, stops, QUERIES, 24, 4)
    num_heads, value_dim = scene.queries.shape[1], variant.number("value_dim")
    logits = mx.linspace(-1, 1, num_heads) if variant["sink_logits"] else None
    caps = ((plain, None), (windowed, 20.0))
    arrays = scene.queries, scene.keys, scene.values
    how: dict[str, Any] = {
        "scale": _scale(variant),
        "sink_logits": logits,
        "value_dim": value_dim,
        "log_sums": bool(variant["log_sums"]),
    }
    plans = [tiled(chunks, scene.queries, scene.keys, value_dim) for chunks, _ in caps]
    pairs = list(zip(plans, [cap for _, cap in caps], strict=True))

    def kernel() -> list[mx.array]:
        found = [
            paged_attention_on_metal(*arrays, plan, soft_cap=cap, **how) for plan, cap in pairs
        ]
        return [array for arrays in found for array in arrays]

    def twin() -> list[mx.array]:
        found = [
            paged_attention_gathered(*arrays, plan, soft_cap=cap, **how) for plan, cap in pairs
        ]
        return [array for arrays in found for array in arrays]

    rounding = ROUNDING[str(variant["dtype"])]
    tolerances = (rounding, 8 * rounding) if variant["log_sums"] else (rounding,)
    return Case(kernel, twin, tolerances * len(caps))


def _timed(variant: Variant, sequences: int, context: int) -> Case:
    """A chunk at the end of one long sequence, beside MLX's attention over one view of it."""
    assert sequences == 1
    stops, queries = (context,), min(TIMED_QUERIES, context)
    scene = _scene(variant, stops, queries, 4)
    chunks = _chunks(scene, stops, queries, None, 0)
    dims = variant.number("key_dim"), variant.number("value_dim")

    def kernel() -> list[mx.array]:
        arrays = scene.queries, scene.keys, scene.values
        how: dict[str, Any] = {"scale": _scale(variant), "value_dim": dims[1]}
        return [prefill_attention_on_metal(*arrays, chunks, **how)]

    def theirs() -> list[mx.array]:
        keys, values = (
            numbers_of(plane, [part[:, :context] for part in plane.pages], dim).astype(
                variant.dtype
            )
            for plane, dim in zip((scene.keys, scene.values), dims, strict=True)
        )
        rows = scene.queries.swapaxes(0, 1)[None]
        how = mx.fast.scaled_dot_product_attention
        return [how(rows, keys[None], values[None], scale=_scale(variant), mask="causal")]

    return Case(kernel, theirs, ())


def _scale(variant: Variant) -> float:
    return float(4 / variant.number("key_dim") ** 0.5)


def _sample(dim: int, group: int, bits: tuple[int, int], **more: Value) -> Variant:
    values: dict[str, Value] = {"key_dim": dim, "value_dim": dim, "group": group}
    values |= {"key_bits": bits[0], "value_bits": bits[1], "sink_logits": False}
    values |= {"joint_dim": 0, "log_sums": False}
    return Variant.of("prefill_attention", **{"dtype": "bfloat16", **values, **more})


def _registers(variant: Variant) -> int:
    key_dim, value_dim = variant.number("key_dim"), variant.number("value_dim")
    shape = prefill_shape(key_dim=key_dim, value_dim=value_dim)
    itemsize = variant.dtype.size
    return registers(shape, key_dim=key_dim, value_dim=value_dim, itemsize=itemsize)


PREFILL_ATTENTION = Kind(
    name="prefill_attention",
    files=("prefill_attention.py", "prefill_plan.py", *PAGED_FILES),
    case=_case,
    timed=_timed,
    loads=LOADS,
    registers=_registers,
    samples=(
        _sample(256, 4, (0, 0)),
        _sample(128, 4, (8, 8)),
        _sample(256, 8, (4, 4)),
        _sample(512, 8, (0, 0)),
        _sample(512, 8, (0, 0), joint_dim=640),
        _sample(192, 1, (0, 0), value_dim=128, log_sums=True),
    ),
)
