"""Self-checks of the attention kernels: sequences over shuffled pages, tolerances. Knows no GPU."""

from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from .attention_plan import AttentionPlan, page_table
from .attention_scene import PAGE, Scene, build_scene
from .attention_shape import prefill_shape, registers, threadgroup_shape
from .mla_attention import mla_attention_gathered, mla_attention_on_metal, row_blocks
from .paged_attention import paged_attention_gathered, paged_attention_on_metal
from .prefill_plan import Chunks, tiled
from .stored import numbers_of
from .variants import Case, Kind, Value, Variant, dtype_name

PAGED, PREFILL, MLA = "paged_attention", "prefill_attention", "mla_attention"
STARTS = (5, 70, 33)  # positions of first queries: a tail alone, pages and a tail
QUERIES, TIMED_QUERIES = 40, 2_048  # of a chunk of a prompt
LOADS = ((1, 512), (8, 512), (1, 16_384), (8, 4_096))
PREFILL_LOADS = ((1, 2_048), (1, 6_144))
ROUNDING = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}  # of outputs below 1
LATENT_DIM = 512  # what the values of a latent cache are


def paged_variant(
    dtype: mx.Dtype,
    *,
    key_dim: int,
    value_dim: int,
    group: int,
    queries: int = 1,
    key_bits: int = 0,
    value_bits: int = 0,
    sink_logits: bool = False,
    joint_dim: int = 0,
) -> Variant:
    """The kernel that `paged_attention_on_metal` compiles for few queries of each sequence.

    Args:
        group: query heads per KV head.
        queries: most query tokens of a sequence in one step.
        joint_dim: of vectors that hold keys and values both; 0: there are none.
    """
    return Variant.of(
        PAGED,
        dtype=dtype_name(dtype),
        key_dim=key_dim,
        value_dim=value_dim,
        group=group,
        queries=queries,
        key_bits=key_bits,
        value_bits=value_bits,
        sink_logits=sink_logits,
        joint_dim=joint_dim,
    )


def prefill_variant(dtype: mx.Dtype, *, log_sums: bool = False, **sizes: Any) -> Variant:
    """The kernel for prompts in tiles; `sizes` as of `paged_variant`.

    Args:
        log_sums: of `attend_in_tiles`, which joins blocks by them.
    """
    values = dict(paged_variant(dtype, **sizes).values)
    del values["queries"]
    return Variant.of(PREFILL, **values, log_sums=log_sums)


def mla_variant(dtype: mx.Dtype, *, num_heads: int, queries: int = 1, bits: int = 0) -> Variant:
    """The kernel that `mla_attention_on_metal` compiles; `queries` as for `paged_variant`."""
    return Variant.of(
        MLA,
        dtype=dtype_name(dtype),
        key_dim=576,
        value_dim=LATENT_DIM,
        group=num_heads,
        queries=queries,
        key_bits=bits,
    )


def _case(variant: Variant) -> Case:
    """Whole sequences in one pass; windows and sinks in two, behind a soft cap."""
    heads = 1 if variant.kind == MLA else 2
    starts = STARTS[:2] if variant.kind == PREFILL else STARTS
    scene = _scene(variant, np.array(starts, np.int32), heads)
    plans = [_plan(variant, scene), _plan(variant, scene, window=24, sinks=4)]
    rounding = ROUNDING[str(variant["dtype"])]
    # What the engine makes of it; log-sum-exps are of up to 8.
    has_sums = variant.kind == MLA or dict(variant.values).get("log_sums", False)
    tolerances = (rounding, 8 * rounding) if has_sums else (rounding,)

    def outputs(on_metal: bool) -> list[mx.array]:
        found = [
            _attend(variant, scene, plan, on_metal=on_metal, soft_cap=cap)
            for plan, cap in zip(plans, (None, 20.0), strict=True)
        ]
        return [array for arrays in found for array in arrays]

    return Case(partial(outputs, True), partial(outputs, False), tolerances * len(plans))


def _timed(variant: Variant, sequences: int, context: int) -> Case:
    """Sequences of so long a context, beside MLX's attention over one view of each."""
    heads, starts = 1 if variant.kind == MLA else 4, np.full(sequences, context, np.int32)
    if variant.kind == PREFILL:
        starts -= min(TIMED_QUERIES, context)
    scene = _scene(variant, starts, heads, queries=TIMED_QUERIES, shuffled=False)
    plan = _plan(variant, scene)
    return Case(
        lambda: _attend(variant, scene, plan, on_metal=True),
        lambda: _by_fused_attention(variant, scene),
        (),
    )


def _scene(
    variant: Variant, starts: Any, heads: int, *, queries: int = QUERIES, shuffled: bool = True
) -> Scene:
    """Sequences with their first queries at `starts`; a prompt's chunk lies in whole pages."""
    if variant.kind != PREFILL:
        return build_scene(variant, starts, heads, shuffled=shuffled)
    asked = Variant.of(PAGED, **dict(variant.values), queries=queries)
    sealed = -(-(starts + queries) // PAGE) * PAGE
    scene = build_scene(asked, sealed, heads, shuffled=shuffled)
    return replace(scene, starts=starts)


def _plan(
    variant: Variant, scene: Scene, window: int | None = None, sinks: int = 0
) -> AttentionPlan:
    """One pass over everything that is seen; two behind a window."""
    if variant.kind == PREFILL:
        count = len(scene.queries) // len(scene.starts)
        counts = np.full(len(scene.starts), count, np.int32)
        chunks = Chunks(
            rows=np.cumsum(counts, dtype=np.int32) - counts,
            starts=scene.starts,
            counts=counts,
            sealed=scene.sealed,
            slots=np.arange(len(counts), dtype=np.int32),
            pages=page_table(scene.tables),
            page_size=PAGE,
            window=window,
            sinks=sinks,
        )
        return tiled(chunks, scene.queries, scene.keys, variant.number("value_dim"))
    heads = len(scene.keys.pages[0])
    if variant.kind == MLA:
        heads = row_blocks(variant.number("queries") * variant.number("group"))
    if window is None:
        return scene.plan(heads)
    return scene.plan(heads, window=window, sinks=sinks, item_blocks=1)


def _attend(
    variant: Variant,
    scene: Scene,
    plan: AttentionPlan,
    *,
    on_metal: bool,
    soft_cap: float | None = None,
) -> list[mx.array]:
    scale = _scale(variant)
    if variant.kind == MLA:
        mla = mla_attention_on_metal if on_metal else mla_attention_gathered
        return mla(scene.queries, scene.keys, plan, scale=scale)
    paged = paged_attention_on_metal if on_metal else paged_attention_gathered
    num_heads = scene.queries.shape[1]
    return paged(
        scene.queries,
        scene.keys,
        scene.values,
        plan,
        scale=scale,
        sink_logits=mx.linspace(-1, 1, num_heads) if variant["sink_logits"] else None,
        soft_cap=soft_cap,
        value_dim=variant.number("value_dim"),
        log_sums=bool(dict(variant.values).get("log_sums", False)),
    )


def _by_fused_attention(variant: Variant, scene: Scene) -> list[mx.array]:
    """MLX's attention over each sequence's pages as one view, decoded where they are codes."""
    count, outputs = len(scene.queries) // len(scene.starts), []
    dims = variant.number("key_dim"), variant.number("value_dim")
    mask = "causal" if variant.kind == PREFILL else None
    for seq, start in enumerate(scene.starts.tolist()):  # all have as many
        context = start + count if mask else start
        run = slice(seq * context, (seq + 1) * context)
        rows = scene.queries[seq * count : (seq + 1) * count].swapaxes(0, 1)
        keys, values = (
            numbers_of(plane, [part[:, run] for part in plane.pages], dim).astype(rows.dtype)
            for plane, dim in zip((scene.keys, scene.values), dims, strict=True)
        )
        outputs.append(
            mx.fast.scaled_dot_product_attention(
                rows[None], keys[None], values[None], scale=_scale(variant), mask=mask
            )
        )
    return outputs


def _scale(variant: Variant) -> float:
    return float(4 / variant.number("key_dim") ** 0.5)


def _sample(
    kind: str, dim: int, group: int, bits: tuple[int, int] = (0, 0), **more: Value
) -> Variant:
    values: dict[str, Value] = {"key_dim": dim, "value_dim": dim, "group": group}
    values |= {"key_bits": bits[0], "value_bits": bits[1], "sink_logits": False, "joint_dim": 0}
    values["dtype"] = "float16" if kind == PAGED else "bfloat16"
    values |= {"queries": 1} if kind == PAGED else {"log_sums": False}
    return Variant.of(kind, **{**values, **more})


def _registers(variant: Variant) -> int:
    dims = {"key_dim": variant.number("key_dim"), "value_dim": variant.number("value_dim")}
    itemsize = variant.dtype.size
    codes = variant.kind == PAGED and any(map(variant.number, ("key_bits", "value_bits")))
    if variant.kind == MLA:  # outputs, queries and latents of an eighth; 16 rows, 16 tokens
        held = dims["key_dim"] // 16
        return dims["value_dim"] // 16 + held * itemsize // 4 + held + 8 + 14
    if variant.kind == PREFILL:
        shape = prefill_shape(**dims)
    else:
        rows = variant.number("queries") * variant.number("group")
        shape = threadgroup_shape(rows, **dims, itemsize=itemsize)
    key_dim, value_dim = dims.values()
    return registers(shape, key_dim=key_dim, value_dim=value_dim, itemsize=itemsize, codes=codes)


_SHARED_FILES = (
    *("attention_fragments.h", "attention_outputs.h", "attention_softmax.h", "paged_spans.h"),
    *("stored_codes.h", "attention_reduce.metal", "attention_reduce.py", "attention_plan.py"),
    *("attention_shape.py", "chips.py", "stored.py"),
)
PAGED_FILES = (
    *("paged_attention.metal", "tiled_attention.metal", "paged_attention.py"),
    *_SHARED_FILES,
)
_kind = partial(Kind, case=_case, timed=_timed, registers=_registers)
PAGED_ATTENTION = _kind(
    name=PAGED,
    files=PAGED_FILES,
    loads=LOADS,
    samples=(
        _sample(PAGED, 128, 4),
        _sample(PAGED, 128, 8, (4, 4), queries=4),
        _sample(PAGED, 64, 8, (8, 4), sink_logits=True),
        _sample(PAGED, 128, 4, (8, 8)),
        _sample(PAGED, 256, 2, dtype="bfloat16"),
        _sample(PAGED, 80, 1, (4, 4)),
        _sample(PAGED, 512, 8, (8, 8), joint_dim=640),
    ),
)
PREFILL_ATTENTION = _kind(
    name=PREFILL,
    files=("prefill_plan.py", *PAGED_FILES),
    loads=PREFILL_LOADS,
    samples=(
        _sample(PREFILL, 256, 4),
        _sample(PREFILL, 128, 4, (8, 8)),
        _sample(PREFILL, 256, 8, (4, 4)),
        _sample(PREFILL, 512, 8),
        _sample(PREFILL, 512, 8, joint_dim=640),
        _sample(PREFILL, 192, 1, value_dim=128, log_sums=True),
    ),
)
MLA_ATTENTION = _kind(
    name=MLA,
    files=("mla_attention.metal", "mla_attention.py", *_SHARED_FILES),
    loads=LOADS,
    samples=(
        mla_variant(mx.float16, num_heads=16),
        mla_variant(mx.bfloat16, num_heads=16, queries=2, bits=8),
    ),
)
