"""From the fused QKV projection to rotated queries and tails with the step's tokens.

T = tokens, H = query heads, K = KV heads, S = slots, R = tokens of a tail's ring.

As `kv_write`, but that what is stored goes to its place in the tails in the same dispatch. The
arrays are new ones: while a step in flight reads the old ones these are copied anyway, and here
that is no dispatch more, where writing to a copy would be two for each array.
"""

from collections.abc import Sequence
from functools import cache, lru_cache

import mlx.core as mx

from .attention_heads import Heads, HeadsForm
from .kv_write import HEADS_AT_ONCE, LANES, MAX_LAUNCHES, kv_write_twin, stored_outputs, template_of
from .launch import Launch, MetalKernel

COPIED = 8  # tokens of a head that a SIMD group copies; divides R

Tails = Sequence[mx.array]  # of each part: keys and values together, or keys, then values


def write_tails(
    qkv: mx.array,
    positions: mx.array,
    heads: Heads,
    places: mx.array,
    taken: mx.array,
    tails: Tails,
) -> list[mx.array]:
    """One dispatch.

    Args:
        qkv: (T, (H + 2 K) * D) float32, float16 or bfloat16.
        positions: (T,) int32 or longer, as for `kv_write`.
        places: (T,) int32 or longer: slot * R + offset of each token; no two are the same.
        taken: (S, R) int32, 1 at these places, else 0.
        tails: the parts (S * heads * R, width), as `Stored` has them.

    Returns:
        Queries (T, H, D), and the parts with the tokens in place.
    """
    launch = _launch(
        heads.form,
        qkv.shape[0],
        qkv.dtype,
        taken.shape,
        tuple((part.shape, part.dtype) for part in tails),
    )
    return launch([qkv, positions, heads.constants, places, taken, *tails])


def write_tails_twin(
    qkv: mx.array,
    positions: mx.array,
    heads: Heads,
    places: mx.array,
    taken: mx.array,
    tails: Tails,
) -> list[mx.array]:
    queries, stored = kv_write_twin(qkv, positions, heads)
    return [queries, *put(stored, places[: len(qkv)], taken.shape[1], tails)]


def put(
    stored: Sequence[Sequence[mx.array]], places: mx.array, ring: int, tails: Tails
) -> list[mx.array]:
    """Tails with what is stored (T, heads, width) of each part at `places` (T,)."""
    parts = [part for parts in stored for part in parts]
    written = []
    for tail, part in zip(tails, parts, strict=True):
        first = places // ring * (ring * part.shape[1]) + places % ring  # vector of head 0
        rows = first[:, None] + mx.arange(part.shape[1]) * ring  # (T, heads)
        written.append(mx.put_along_axis(tail, rows.reshape(-1, 1), part.flatten(0, 1), 0))
    return written


@lru_cache(MAX_LAUNCHES)
def _launch(
    form: HeadsForm,
    num_tokens: int,
    dtype: mx.Dtype,
    slots: tuple[int, int],
    tails: tuple[tuple[tuple[int, ...], mx.Dtype], ...],
) -> Launch:
    num_slots, ring = slots
    assert ring % COPIED == 0, slots
    num_vectors = num_tokens * (form.num_heads + 2 * form.num_kv_heads)
    heads = form.num_stored
    assert all(shape[0] == num_slots * heads * ring for shape, _ in tails), (tails, slots)
    num_copies = num_slots * heads * ring // COPIED
    return Launch(
        _kernel(form),
        template=template_of(form, dtype),
        grid=((num_vectors + num_copies) * LANES, 1, 1),
        threadgroup=(HEADS_AT_ONCE * LANES, 1, 1),
        output_shapes=[(num_tokens, form.num_heads, form.head_dim), *[shape for shape, _ in tails]],
        output_dtypes=[dtype, *[part_dtype for _, part_dtype in tails]],
    )


@cache
def _kernel(form: HeadsForm) -> MetalKernel:
    names, made = stored_outputs(form)
    copies = "\n".join(
        f"""
              copy_tails(
                  reinterpret_cast<const device uint*>(old_{name}),
                  reinterpret_cast<device uint*>({name}), taken,
                  uint(old_{name}_shape[1] * sizeof(*old_{name})) / 4, HEADS, ring, part, lane);"""
        for name in names
    )
    return MetalKernel(
        name="tail_write",
        includes=("kv_write.metal",),
        inputs=(
            "qkv", "positions", "constants", "places", "taken",
            *(f"old_{name}" for name in names),
        ),
        outputs=("queries", *names),
        body=f"""
            threadgroup float heads[HEADS_AT_ONCE][D];
            constexpr uint HEADS = JOINED ? 2 * KV_HEADS : KV_HEADS;
            const uint group = thread_position_in_grid.x / 32;
            const uint vectors = uint(qkv_shape[0]) * (QUERY_HEADS + 2 * KV_HEADS);
            const uint lane = thread_index_in_simdgroup;
            const uint ring = uint(taken_shape[1]);
            if (group < vectors) {{
              kv_write<T, D, QUERY_HEADS, KV_HEADS, NORM, DIMS, TRADITIONAL, ROTATE, ROTATE_VALUES,
                    M, JOINED, NORM_VALUES, JOINT>(
                  heads[simdgroup_index_in_threadgroup], qkv, positions, constants, queries,
                  {made[0]}, {made[1]}, InTails{{places, ring}}, group, lane);
            }} else {{
              const uint part = group - vectors;{copies}
            }}
        """,
    )  # fmt: skip
