"""Self-check of the kernel that writes keys and values: inputs and tolerances. Knows no GPU."""

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from .attention_heads import Heads, HeadsForm
from .kv_write import Stored, kv_write, kv_write_twin, stored_in_mlx
from .launch import MIN_NUMBERS
from .stored import FORMATS
from .tail_write import put, write_tails, write_tails_twin
from .variants import IN_MLX, Case, Kind, Variant, dtype_name

ROUNDING = {"float32": 2e-5, "float16": 8e-3, "bfloat16": 0.0625}  # of numbers below 8
CASE_PAGE = 16
LARGE = 300
HUGE = 2**16  # what it multiplies is beyond float16
FEW_TOKENS, SOME_TOKENS = 3, 9  # fewer than 8 positions are passed in another way


def kv_write_variant(form: HeadsForm, dtype: mx.Dtype) -> Variant:
    return Variant.from_form("kv_write", form, dtype=dtype_name(dtype))


def _kv_write_case(variant: Variant) -> Case:
    """Few tokens, some tokens, and one with numbers that float16 does not have."""
    form, heads, tolerances = variant.form, _heads(variant), _tolerances(variant)
    steps = [_tokens(variant, count) for count in (FEW_TOKENS, SOME_TOKENS)]
    qkv, positions = _tokens(variant, 1)
    huge = HUGE if variant.dtype != mx.float16 else 1
    steps.append((qkv * huge, positions))
    return Case(
        lambda: [x for s in steps for x in _decoded(_arrays(*kv_write(*s, heads)), form)],
        lambda: [x for s in steps for x in _decoded(_arrays(*kv_write_twin(*s, heads)), form)],
        (*tolerances * 2, *(huge * tolerance for tolerance in tolerances)),
        mean_share=1 / 64,
    )


def _tolerances(variant: Variant) -> tuple[float, ...]:
    """Of queries, and of keys and values as attention sees them: a rounding, and one code."""
    form, rounding = variant.form, ROUNDING[str(variant["dtype"])]
    formats = form.key_format, form.value_format
    bits = [fmt.bits for fmt in (formats[:1] if form.in_one else formats)]
    return rounding, *(rounding + (16 / (2**count - 1) if count else 0.0) for count in bits)


def _timed_kv_write(variant: Variant, sequences: int, _: int) -> Case:
    heads, step = _heads(variant), _tokens(variant, sequences)
    return Case(
        lambda: _arrays(*kv_write(*step, heads)),
        lambda: _arrays(*kv_write_twin(*step, heads)),
        _tolerances(variant),
        instead={IN_MLX: lambda: _arrays(*_by_fused_operations(*step, heads))},
        seen=partial(_decoded, form=heads.form),
    )


def _arrays(queries: mx.array, stored: Stored) -> list[mx.array]:
    return [queries, *[part for parts in stored for part in parts]]


def _by_fused_operations(
    qkv: mx.array, positions: mx.array, heads: Heads
) -> tuple[mx.array, Stored]:
    """The path without the kernel: MLX's fused norm and rope, then the twin's encoding."""
    split = qkv.reshape(len(qkv), -1, heads.form.head_dim)
    x, values = mx.split(split, [heads.form.num_heads + heads.form.num_kv_heads], axis=1)
    if heads.norm_weight is not None:
        x = mx.fast.rms_norm(x, None, heads.norm_eps) * heads.norm_weight.astype(x.dtype)
    if heads.form.norms_values:
        values = mx.fast.rms_norm(values, None, heads.norm_eps)
    if heads.frequencies is not None:
        x = mx.fast.rope(
            x[:, :, None],
            heads.form.rope_dims,
            traditional=heads.form.traditional,
            base=None,
            scale=1.0,
            offset=positions,
            freqs=1 / heads.frequencies,
        ).squeeze(2)
    queries, keys = mx.split(x, [heads.form.num_heads], axis=1)
    return stored_in_mlx(queries, keys, values, heads, qkv.dtype)


def _heads(variant: Variant) -> Heads:
    form: HeadsForm = variant.form
    rng, rope_dims = np.random.default_rng(0), form.rope_dims
    weight = rng.uniform(0.5, 1.5, (form.num_heads + form.num_kv_heads, form.head_dim))
    slowing = np.arange(rope_dims // 2) / max(rope_dims // 2, 1)
    return Heads(
        form,
        norm_weight=mx.array(weight.astype(np.float32)) if form.norm else None,
        norm_eps=1e-6,
        frequencies=mx.array((10_000.0**-slowing).astype(np.float32)) if rope_dims else None,
    )


def _tokens(variant: Variant, count: int) -> tuple[mx.array, mx.array]:
    rng, form = np.random.default_rng(count), variant.form
    qkv = rng.uniform(-2, 2, (count, form.width)).astype(np.float32)
    if form.norm:  # sums of squares that float16 does not have
        qkv[0, : (form.num_heads + form.num_kv_heads) * form.head_dim] *= LARGE
    positions = rng.integers(0, 4_000, count).astype(np.int32)
    return mx.array(qkv).astype(variant.dtype), mx.array(positions)


def tail_write_variant(form: HeadsForm, dtype: mx.Dtype) -> Variant:
    return Variant.from_form("tail_write", form, dtype=dtype_name(dtype))


TailCall = tuple[mx.array, mx.array, Heads, mx.array, mx.array, list[mx.array]]


def _tail_call(variant: Variant, count: int) -> TailCall:
    heads, (qkv, positions) = _heads(variant), _tokens(variant, count)
    rng, ring = np.random.default_rng(count), 2 * CASE_PAGE
    places = np.zeros(max(count, MIN_NUMBERS), np.int32)
    places[:count] = (2 * np.arange(count) + 1) * ring + rng.integers(0, ring, count)
    taken = np.zeros((2 * count + 1, ring), np.int32)
    taken.ravel()[places[:count]] = 1
    tails = []
    for parts in kv_write_twin(qkv, positions, heads)[1]:
        for part in parts:
            shape = taken.size * part.shape[1], part.shape[2]
            tails.append(mx.array(rng.integers(1, 9, shape).astype(np.float32)).astype(part.dtype))
    return qkv, positions, heads, mx.array(places), mx.array(taken), tails


def _tail_case(variant: Variant) -> Case:
    calls, form = [_tail_call(variant, count) for count in (FEW_TOKENS, SOME_TOKENS)], variant.form
    return Case(
        lambda: [x for call in calls for x in _decoded(write_tails(*call), form)],
        lambda: [x for call in calls for x in _decoded(write_tails_twin(*call), form)],
        _tolerances(variant) * len(calls),
    )


def _decoded(written: list[mx.array], form: HeadsForm) -> list[mx.array]:
    queries, *tails = written
    parts = len(form.key_format.names)
    decoded = [queries, form.key_format.decode(tails[:parts], mx.float32)]
    if not form.in_one:
        decoded.append(form.value_format.decode(tails[parts:], mx.float32))
    return decoded


def _timed_tails(variant: Variant, sequences: int, _: int) -> Case:
    call = _tail_call(variant, sequences)
    qkv, positions, heads, places, taken, tails = call

    def in_parts() -> list[mx.array]:
        queries, stored = _by_fused_operations(qkv, positions, heads)
        return [queries, *put(stored, places[:sequences], taken.shape[1], tails)]

    return Case(
        lambda: write_tails(*call),
        lambda: write_tails_twin(*call),
        _tolerances(variant),
        instead={IN_MLX: in_parts},
        seen=partial(_decoded, form=variant.form),
    )


def _sample(dtype: mx.Dtype, bits: tuple[int, int], dim: int, **how: Any) -> Variant:
    how = {"norm": True, "rope_dims": dim, **how}
    return kv_write_variant(HeadsForm(8, 2, dim, FORMATS[bits[0]], FORMATS[bits[1]], **how), dtype)


def _registers(variant: Variant) -> int:
    return 24 + (variant.form.head_dim + 31) // 32  # where it rotates


# Layers of Gemma 4 that see everything: a quarter of a head rotates.
JOINT: dict[str, Any] = {"norms_values": True, "joint": 128}
_F16, _BF16, _F32 = mx.float16, mx.bfloat16, mx.float32
_SAMPLES = (
    _sample(_F16, (4, 4), 128),
    _sample(_BF16, (0, 0), 128),
    _sample(_BF16, (8, 8), 128),
    _sample(_F16, (8, 4), 64, rope_dims=32, norm=False),
    _sample(_F16, (4, 4), 80),
    _sample(_F16, (4, 4), 256),
    _sample(_BF16, (0, 0), 256, norms_values=True),
    _sample(_BF16, (0, 0), 512, **JOINT),
    _sample(_F16, (4, 4), 512, **JOINT),
    _sample(_F32, (0, 0), 96, rope_dims=0, norm=False),
    _sample(_F32, (0, 0), 64, traditional=True),
)
KV_WRITE = Kind(
    name="kv_write",
    files=("kv_write.metal", "kv_write.py", "attention_heads.py"),
    case=_kv_write_case,
    timed=_timed_kv_write,
    loads=((8, 0), (32, 0)),  # fewer positions are padded to as many
    registers=_registers,
    samples=_SAMPLES,
)
TAIL_WRITE = Kind(
    name="tail_write",
    files=("tail_write.metal", "tail_write.py", *KV_WRITE.files),
    case=_tail_case,
    timed=_timed_tails,
    loads=KV_WRITE.loads,
    registers=_registers,
    samples=tuple(
        tail_write_variant(sample.form, sample.dtype) for sample in (*_SAMPLES[:4], *_SAMPLES[7:9])
    ),
)
