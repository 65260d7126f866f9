"""From the fused QKV projection to rotated queries and stored keys and values. Knows no pages.

T = tokens, H = query heads, K = KV heads, D = head_dim.

A head is normed, rotated by its position and multiplied by a Hadamard matrix, each if the layer
asks for it. All of this is float32. Queries and plain keys and values are rounded once, to the
dtype of the projection. Keys and values of a token depend on its own row and position alone, so one
token and a whole prompt give the same.

Values without a norm are encoded exactly as the twin encodes them. So are keys that are not normed,
rotated or multiplied. The others pass through sums, cosines and sines, whose last bit depends on
the GPU. There a code may differ by one, and a scale or a bias in its last bit.
"""

from functools import cache, lru_cache

import mlx.core as mx
import numpy as np

from .attention_heads import Heads, HeadsForm
from .launch import Launch, MetalKernel, TemplateValue
from .stored import KVFormat, part_names

LANES = 32
HEADS_AT_ONCE = 8  # SIMD-groups of a threadgroup
MAX_LAUNCHES = 64  # that are remembered: a decode step makes the same in every layer


Stored = list[list[mx.array]]
"""The stored form of a step's keys and values, apart or both together.

Each is one array (T, K, D), or two: codes (T, K, D * bits / 8), and of each group a scale and a
bias (T, K, 2 * groups). Where keys and values are stored alike they are side by side,
(T, 2 K, ...); of a joint form they are one vector, of D numbers and some of the key's.
"""


def kv_write(qkv: mx.array, positions: mx.array, heads: Heads) -> tuple[mx.array, Stored]:
    """One dispatch.

    Args:
        qkv: (T, (H + 2 K) * D) float32, float16 or bfloat16.
        positions: (T,) int32. Longer is allowed: padded to 8 once a step, they do not make fewer
            tokens another variant of the kernel (MLX passes shorter arrays in another way).

    Returns:
        Queries (T, H, D) in the dtype of the projection, and what is stored.
    """
    form = heads.form
    launch = _launch(form, qkv.shape, positions.shape, qkv.dtype)
    queries, *stored = launch([qkv, positions, heads.constants])
    keys = len(form.key_format.names)
    return queries, [stored] if form.in_one else [stored[:keys], stored[keys:]]


def kv_write_twin(qkv: mx.array, positions: mx.array, heads: Heads) -> tuple[mx.array, Stored]:
    num_tokens = _checked(heads.form, qkv.shape, positions.shape)
    positions = positions[:num_tokens]
    split = qkv.astype(mx.float32).reshape(num_tokens, -1, heads.form.head_dim)
    x, values = mx.split(split, [heads.form.num_heads + heads.form.num_kv_heads], axis=1)
    if heads.norm_weight is not None:
        squares = mx.mean(mx.square(x), axis=-1, keepdims=True)
        x = x * mx.rsqrt(squares + heads.norm_eps) * heads.norm_weight
    if heads.form.norms_values:
        values = values * mx.rsqrt(
            mx.mean(mx.square(values), axis=-1, keepdims=True) + heads.norm_eps
        )
    if heads.frequencies is not None:
        x = _turned(x, positions, heads, heads.frequencies)
    queries, keys = mx.split(x, [heads.form.num_heads], axis=1)
    return stored_in_mlx(queries, keys, values, heads, qkv.dtype)


def _turned(x: mx.array, positions: mx.array, heads: Heads, frequencies: mx.array) -> mx.array:
    """(T, heads, D) after rotary position embedding of the leading dims."""
    dims = 2 * len(frequencies)
    angles = positions[:, None, None] * frequencies  # (T, 1, dims / 2)
    cosines, sines = mx.cos(angles) * heads.magnitude, mx.sin(angles) * heads.magnitude
    rotary, rest = x[..., :dims], x[..., dims:]
    if heads.form.traditional:
        first, second = rotary[..., ::2], rotary[..., 1::2]
    else:
        first, second = mx.split(rotary, 2, axis=-1)
    pair = [first * cosines - second * sines, second * cosines + first * sines]
    joined = (
        mx.stack(pair, axis=-1).flatten(-2)
        if heads.form.traditional
        else mx.concatenate(pair, axis=-1)
    )
    return mx.concatenate([joined, rest], axis=-1)


def stored_in_mlx(
    queries: mx.array, keys: mx.array, values: mx.array, heads: Heads, dtype: mx.Dtype
) -> tuple[mx.array, Stored]:
    """Encode queries (T, H, D), keys and values (T, K, D) that are normed and rotated."""
    form = heads.form
    if form.joint:
        is_rotated = np.arange(form.head_dim) % (form.head_dim // 2) < form.joint // 2
        rotary, others = (mx.array(np.flatnonzero(which)) for which in (is_rotated, ~is_rotated))
        queries = mx.concatenate([queries[..., others], queries[..., rotary]], axis=-1)
        values = mx.concatenate([values[..., rotary], values[..., others]], axis=-1)
        keys = keys[..., rotary]
    if form.key_format.rotates:
        queries, keys = _spread(queries, form.joint), _spread(keys, form.joint)
    if form.rotates_values:
        values = _spread(values, form.joint)
    if form.in_one:
        both = (
            mx.concatenate([values, keys], -1) if form.joint else mx.concatenate([keys, values], 1)
        )
        pair = [stored(both, form.key_format, dtype)]
    else:
        pair = [stored(keys, form.key_format, dtype), stored(values, form.value_format, dtype)]
    return queries.astype(dtype), pair


def _spread(x: mx.array, block: int) -> mx.array:
    """Vectors (..., D) by a Hadamard matrix, in blocks of `block` numbers; 0: whole."""
    if not block:
        return mx.hadamard_transform(x)
    return mx.hadamard_transform(mx.unflatten(x, -1, (-1, block))).flatten(-2)


def stored(vectors: mx.array, fmt: KVFormat, dtype: mx.Dtype) -> list[mx.array]:
    """(T, K, D) float32 -> the parts of what is stored of it in a model of `dtype`."""
    kinds = fmt.parts(vectors.shape[-1], dtype)
    return [part.astype(kind) for part, (_, kind) in zip(fmt.encode(vectors), kinds, strict=True)]


def template_of(form: HeadsForm, dtype: mx.Dtype) -> list[tuple[str, TemplateValue]]:
    return [
        ("T", dtype),
        ("D", form.head_dim),
        ("QUERY_HEADS", form.num_heads),
        ("KV_HEADS", form.num_kv_heads),
        ("NORM", form.norm),
        ("DIMS", form.rope_dims),
        ("TRADITIONAL", form.traditional),
        ("ROTATE", form.key_format.rotates),
        ("ROTATE_VALUES", form.rotates_values),
        ("M", max(form.hadamard_order, 1)),
        ("JOINED", form.joined),
        ("NORM_VALUES", form.norms_values),
        ("JOINT", form.joint),
    ]


@lru_cache(MAX_LAUNCHES)
def _launch(
    form: HeadsForm, shape: tuple[int, ...], positions_shape: tuple[int, ...], dtype: mx.Dtype
) -> Launch:
    """Norm, rope and storing of projections (T, width) in a layer of this form."""
    num_tokens = _checked(form, shape, positions_shape)
    num_vectors = num_tokens * (form.num_heads + 2 * form.num_kv_heads)
    parts = form.key_format.parts(form.stored_dim, dtype)
    if not form.in_one:
        parts = [*parts, *form.value_format.parts(form.head_dim, dtype)]
    return Launch(
        _kernel(form),
        template=template_of(form, dtype),
        grid=(num_vectors * LANES, 1, 1),
        threadgroup=(min(HEADS_AT_ONCE, num_vectors) * LANES, 1, 1),
        output_shapes=[
            (num_tokens, form.num_heads, form.head_dim),
            *[(num_tokens, form.num_stored, width) for width, _ in parts],
        ],
        output_dtypes=[dtype, *[part_dtype for _, part_dtype in parts]],
    )


def stored_outputs(form: HeadsForm) -> tuple[list[str], list[str]]:
    formats, stored_dim, dim = (form.key_format, form.value_format), form.stored_dim, form.head_dim
    places = [(dim, 0, dim), (dim, 0, dim)]
    if form.joint:
        places = [(stored_dim, dim, form.joint), (stored_dim, 0, dim)]
    names = ("stored", "stored") if form.in_one else ("keys", "values")
    outputs: dict[str, None] = {}
    made: list[str] = []
    for name, fmt, place in zip(names, formats, places, strict=True):
        parts = part_names(name, fmt)
        outputs.update(dict.fromkeys(parts))
        made.append(f"{fmt.writer(*place)}{{{', '.join(parts)}}}")
    return list(outputs), made


@cache
def _kernel(form: HeadsForm) -> MetalKernel:
    names, made = stored_outputs(form)
    return MetalKernel(
        name="kv_write",
        inputs=("qkv", "positions", "constants"),
        outputs=("queries", *names),
        body=f"""
            threadgroup float heads[HEADS_AT_ONCE][D];
            kv_write<T, D, QUERY_HEADS, KV_HEADS, NORM, DIMS, TRADITIONAL, ROTATE, ROTATE_VALUES,
                  M, JOINED, NORM_VALUES, JOINT>(
                heads[simdgroup_index_in_threadgroup], qkv, positions, constants, queries,
                {made[0]}, {made[1]}, ByToken{{}}, thread_position_in_grid.x / 32,
                thread_index_in_simdgroup);
        """,
    )


def _checked(form: HeadsForm, shape: tuple[int, ...], positions_shape: tuple[int, ...]) -> int:
    num_tokens, width = shape
    (num_positions,) = positions_shape
    assert width == form.width, shape
    assert num_positions >= num_tokens, positions_shape
    return num_tokens
