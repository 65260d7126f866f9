"""Self-checks of the attention kernels: sequences over shuffled pages, tolerances. Knows no GPU."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from .attention_plan import AttentionPlan
from .attention_scene import Scene, build_scene
from .attention_shape import registers, threadgroup_shape
from .mla_attention import mla_attention_gathered, mla_attention_on_metal, row_blocks
from .paged_attention_gather import paged_attention_gathered
from .paged_attention_kernel import paged_attention_on_metal
from .stored import numbers_of
from .variants import Case, Kind, Value, Variant, dtype_name

STARTS = (5, 70, 33)  # positions of first queries: a tail alone, pages and a tail
LOADS = ((1, 512), (8, 512), (1, 16_384), (8, 4_096))
ROUNDING = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}  # of outputs below 1
LATENT_DIM = 512  # what the values of a latent cache are

Attention = Callable[..., list[mx.array]]


def paged_variant(
    dtype: mx.Dtype,
    *,
    key_dim: int,
    value_dim: int,
    group: int,
    queries: int = 1,
    key_bits: int | None = None,
    value_bits: int | None = None,
    sink_logits: bool = False,
    joint_dim: int = 0,
) -> Variant:
    """What `paged_attention_on_metal` compiles.

    Args:
        group: query heads per KV head.
        queries: most query tokens of a sequence in one step.
        joint_dim: of vectors that hold keys and values both; 0: there are none.
    """
    return Variant.of(
        "paged_attention",
        dtype=dtype_name(dtype),
        key_dim=key_dim,
        value_dim=value_dim,
        group=group,
        queries=queries,
        key_bits=key_bits or 0,
        value_bits=value_bits or 0,
        sink_logits=sink_logits,
        joint_dim=joint_dim,
    )


def mla_variant(
    dtype: mx.Dtype, *, num_heads: int, queries: int = 1, bits: int | None = None
) -> Variant:
    """What `mla_attention_on_metal` compiles; `queries` as for `paged_variant`."""
    return Variant.of(
        "mla_attention",
        dtype=dtype_name(dtype),
        key_dim=576,
        value_dim=LATENT_DIM,
        group=num_heads,
        queries=queries,
        key_bits=bits or 0,
    )


def _case(variant: Variant) -> Case:
    """Whole sequences in one pass; windows and sinks in two."""
    heads = 2 if variant.kind == PAGED_NAME else 1
    scene = build_scene(variant, np.array(STARTS, np.int32), heads, shuffled=True)
    blocks = _plan_heads(variant, heads)
    plans = [scene.plan(blocks), scene.plan(blocks, window=24, sinks=4, item_blocks=1)]
    caps = (None, 20.0)
    rounding = ROUNDING[str(variant["dtype"])]
    # What the engine makes of it; latents have log-sum-exps too, of up to 8.
    tolerances = (rounding,) if variant.kind == PAGED_NAME else (rounding, 8 * rounding)

    def outputs(paged: Attention, mla: Attention) -> list[mx.array]:
        results = [
            _attend(variant, scene, plan, paged, mla, soft_cap=cap)
            for plan, cap in zip(plans, caps, strict=True)
        ]
        return [array for result in results for array in result]

    return Case(
        lambda: outputs(paged_attention_on_metal, mla_attention_on_metal),
        lambda: outputs(paged_attention_gathered, mla_attention_gathered),
        tolerances * len(plans),
    )


def _timed(variant: Variant, sequences: int, context: int) -> Case:
    heads = 4 if variant.kind == PAGED_NAME else 1
    starts = np.full(sequences, context, np.int32)
    scene = build_scene(variant, starts, heads, shuffled=False)
    plan = scene.plan(_plan_heads(variant, heads))
    return Case(
        lambda: _attend(variant, scene, plan, paged_attention_on_metal, mla_attention_on_metal),
        lambda: _by_fused_attention(variant, scene),
        (),
    )


def _plan_heads(variant: Variant, kv_heads: int) -> int:
    if variant.kind == PAGED_NAME:
        return kv_heads
    return row_blocks(variant.number("queries") * variant.number("group"))


def _attend(
    variant: Variant,
    scene: Scene,
    plan: AttentionPlan,
    paged: Attention,
    mla: Attention,
    *,
    soft_cap: float | None = None,
) -> list[mx.array]:
    scale = _scale(variant)
    if variant.kind != PAGED_NAME:
        return mla(scene.queries, scene.keys, plan, scale=scale)
    num_heads = scene.queries.shape[1]
    sinks = mx.linspace(-1, 1, num_heads) if variant["sink_logits"] else None
    return paged(
        scene.queries,
        scene.keys,
        scene.values,
        plan,
        scale=scale,
        sink_logits=sinks,
        soft_cap=soft_cap,
        value_dim=variant.number("value_dim"),
    )


def _by_fused_attention(variant: Variant, scene: Scene) -> list[mx.array]:
    """MLX's attention over each sequence's pages as one view, decoded where they are codes."""
    count, outputs = variant.number("queries"), []
    key_dim, value_dim = variant.number("key_dim"), variant.number("value_dim")
    for seq, context in enumerate(scene.starts.tolist()):  # all have as many
        run = slice(seq * context, (seq + 1) * context)
        keys, values = (
            numbers_of(plane, [part[:, run] for part in plane.pages], dim)
            for plane, dim in ((scene.keys, key_dim), (scene.values, value_dim))
        )
        rows = scene.queries[seq * count : (seq + 1) * count].swapaxes(0, 1)
        outputs.append(
            mx.fast.scaled_dot_product_attention(
                rows[None],
                keys[None].astype(rows.dtype),
                values[None].astype(rows.dtype),
                scale=_scale(variant),
            )
        )
    return outputs


def _scale(variant: Variant) -> float:
    return float(4 / variant.number("key_dim") ** 0.5)


def _paged_sample(dim: int, group: int, bits: tuple[int, int], **more: Value) -> Variant:
    values: dict[str, Value] = {"key_dim": dim, "value_dim": dim, "group": group, "queries": 1}
    values |= {"key_bits": bits[0], "value_bits": bits[1], "sink_logits": False, "joint_dim": 0}
    return Variant.of(PAGED_NAME, **{"dtype": "float16", **values, **more})


def _paged_registers(variant: Variant) -> int:
    dims = {"key_dim": variant.number("key_dim"), "value_dim": variant.number("value_dim")}
    itemsize = variant.dtype.size
    rows = variant.number("queries") * variant.number("group")
    shape = threadgroup_shape(rows, **dims, itemsize=itemsize)
    codes = variant.number("key_bits") + variant.number("value_bits") > 0
    return registers(shape, **dims, itemsize=itemsize, codes=codes)


def _mla_registers(variant: Variant) -> int:
    """Outputs, queries and latents of an eighth of the numbers; 16 rows, 16 tokens."""
    outputs, held = variant.number("value_dim") // 16, variant.number("key_dim") // 16
    return outputs + held * variant.dtype.size // 4 + held + 8 + 14


PAGED_NAME = "paged_attention"
_SHARED_FILES = (
    *("attention_fragments.h", "attention_outputs.h", "attention_softmax.h", "paged_spans.h"),
    "stored_codes.h",
    *(
        "attention_reduce.metal",
        "attention_reduce.py",
        "attention_plan.py",
        "attention_shape.py",
        "chips.py",
    ),
    "stored.py",
)
PAGED_FILES = (
    *("paged_attention.metal", "tiled_attention.metal", "paged_attention_kernel.py"),
    *_SHARED_FILES,
)
PAGED_ATTENTION = Kind(
    name=PAGED_NAME,
    files=PAGED_FILES,
    case=_case,
    timed=_timed,
    loads=LOADS,
    registers=_paged_registers,
    samples=(
        _paged_sample(128, 4, (0, 0)),
        _paged_sample(128, 8, (4, 4), queries=4),
        _paged_sample(64, 8, (8, 4), sink_logits=True),
        _paged_sample(128, 4, (8, 8)),
        _paged_sample(256, 2, (0, 0), dtype="bfloat16"),
        _paged_sample(80, 1, (4, 4)),
        _paged_sample(512, 8, (8, 8), joint_dim=640),
    ),
)
MLA_ATTENTION = Kind(
    name="mla_attention",
    files=("mla_attention.metal", "mla_attention.py", *_SHARED_FILES),
    case=_case,
    timed=_timed,
    loads=LOADS,
    registers=_mla_registers,
    samples=(
        mla_variant(mx.float16, num_heads=16),
        mla_variant(mx.bfloat16, num_heads=16, queries=2, bits=8),
    ),
)
