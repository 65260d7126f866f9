"""The kernel from QKV rows to stored keys and values: against its twin, the layers, the formats."""

from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from cache.cache_layers import layer_of
from metal_cpu import MetalCPU, requires_compiler
from models.runs import every

from mlxinfer.cache.keys_values import rotatable
from mlxinfer.cache.paged import unrotated
from mlxinfer.cache_specs import KVSpec
from mlxinfer.layers.norm import RMSNorm
from mlxinfer.layers.rope import RopeSpec, inverse_frequencies
from mlxinfer.metal_kernels.attention_heads import MAX_DIM, Heads, HeadsForm, hadamard_order
from mlxinfer.metal_kernels.kv_write import Stored, kv_write, kv_write_twin
from mlxinfer.metal_kernels.launch import running_on
from mlxinfer.metal_kernels.stored import FORMATS

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)
ROUNDING = {mx.float32: 2e-6, mx.float16: 2**-9, mx.bfloat16: 2**-6}  # of numbers next to 4
H, K = 3, 2

Bits = int | None
JOINT = [(512, 128, None), (512, 128, 8), (512, 128, 4), (256, 64, 4), (64, 16, None)]


def heads_of(
    dim: int,
    *,
    bits: tuple[Bits, Bits] = (None, None),
    norm: bool = True,
    rope_dims: int | None = None,
    traditional: bool = False,
    magnitude: float = 1.0,
    num_heads: int = H,
    norms_values: bool = False,
    joint: int = 0,
) -> Heads:
    rng = np.random.default_rng(dim)
    dims = dim if rope_dims is None else rope_dims
    weight = rng.uniform(0.5, 1.5, (num_heads + K, dim)).astype(np.float32)
    spec = RopeSpec(dims=max(dims, 2))
    formats = FORMATS[bits[0]], FORMATS[bits[1]]
    form = HeadsForm(
        num_heads,
        K,
        dim,
        *(unrotated(formats) if joint or not rotatable(dim) else formats),
        norm=norm,
        norms_values=norms_values,
        rope_dims=2 * (spec.dims // 2) if dims else 0,
        traditional=traditional,
        joint=joint,
    )
    return Heads(
        form,
        norm_weight=mx.array(weight) if norm else None,
        norm_eps=1e-6,
        frequencies=mx.array(inverse_frequencies(spec), mx.float32) if dims else None,
        magnitude=magnitude,
    )


def tokens_of(heads: Heads, count: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    rng = np.random.default_rng(count)
    width = (heads.form.num_heads + 2 * heads.form.num_kv_heads) * heads.form.head_dim
    qkv = rng.normal(size=(count, width)).astype(np.float32)
    return mx.array(qkv).astype(dtype), mx.array(rng.integers(0, 9_000, count).astype(np.int32))


class Written(NamedTuple):
    """What a step writes, and its parts."""

    queries: mx.array
    stored: Stored

    def arrays(self) -> list[mx.array]:
        return [self.queries, *[part for parts in self.stored for part in parts]]

    @property
    def keys(self) -> list[mx.array]:
        return self._half(0)

    @property
    def values(self) -> list[mx.array]:
        return self._half(1)

    def _half(self, which: int) -> list[mx.array]:
        if len(self.stored) == 2:
            return self.stored[which]
        return [mx.split(part, 2, axis=1)[which] for part in self.stored[0]]


def twin_of(qkv: mx.array, positions: mx.array, heads: Heads) -> Written:
    return Written(*kv_write_twin(qkv, positions, heads))


def on_machine(qkv: mx.array, positions: mx.array, heads: Heads, seed: int = 1) -> Written:
    machine = MetalCPU(seed=seed)
    written = machine.clean(lambda: kv_write(qkv, positions, heads))
    assert machine.reports[0].threadgroup_bytes <= 16_384
    return Written(*written)


def same(actual: list[mx.array], wanted: list[mx.array]) -> bool:
    return all(mx.array_equal(a, b) for a, b in zip(actual, wanted, strict=True))


def check(written: Written, twin: Written, heads: Heads, dtype: mx.Dtype) -> None:
    """Queries within rounding, values bit for bit, keys within one code and one last bit."""
    for actual, wanted in zip(written.arrays(), twin.arrays(), strict=True):
        assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
    assert np.allclose(*wide(written.queries, twin.queries), atol=ROUNDING[dtype], rtol=0)
    if heads.form.norms_values:
        fmt = heads.form.value_format
        values = [fmt.decode(one.values, mx.float32) for one in (written, twin)]
        assert np.allclose(*wide(*values), atol=ROUNDING[dtype] + 0.05, rtol=0)
    else:
        assert same(written.values, twin.values)
    bits = heads.form.key_format.bits
    if not bits:
        assert np.allclose(*wide(written.keys[0], twin.keys[0]), atol=ROUNDING[dtype], rtol=0)
        return
    codes, wanted = (unpacked(parts[0], bits) for parts in (written.keys, twin.keys))
    assert np.abs(codes - wanted).max() <= 1
    assert (codes != wanted).mean() < 0.01
    for actual, wanted in zip(written.keys[1:], twin.keys[1:], strict=True):
        assert np.allclose(*wide(actual, wanted), rtol=2**-9, atol=1e-6)


def wide(*arrays: mx.array) -> list[np.ndarray]:
    return [np.array(array.astype(mx.float32)) for array in arrays]


def unpacked(codes: mx.array, bits: int) -> np.ndarray:
    whole = np.array(codes).astype(np.int32)
    return whole if bits == 8 else np.stack([whole & 15, whole >> 4])


def test_rotations_are_those_of_the_cache() -> None:
    for dim in range(8, MAX_DIM + 1, 8):
        assert (hadamard_order(dim) > 0) == rotatable(dim), dim


def rotated(x: mx.array, positions: mx.array, rope_dims: int) -> mx.array:
    """x (T, heads, dim) by the definition; MLX's own rope divides by rounded frequencies."""
    frequencies = mx.array(inverse_frequencies(RopeSpec(dims=rope_dims)), mx.float32)
    angles = positions[:, None, None] * frequencies
    first, second, rest = mx.split(x, [rope_dims // 2, rope_dims], axis=-1)
    cosines, sines = mx.cos(angles), mx.sin(angles)
    parts = [first * cosines - second * sines, second * cosines + first * sines, rest]
    return mx.concatenate(parts, axis=-1)


@pytest.mark.parametrize(
    ("dim", "bits", "rope_dims"),
    [(64, (None, None), 64), (80, (4, 8), 40), (128, (8, 4), 128), (96, (4, 4), 96)],
)
def test_twin_does_what_the_layers_do(dim: int, bits: tuple[Bits, Bits], rope_dims: int) -> None:
    heads = heads_of(dim, bits=bits, rope_dims=rope_dims)
    qkv, positions = tokens_of(heads, 7)
    twin = twin_of(qkv, positions, heads)
    x, values = mx.split(qkv.reshape(7, -1, dim), [H + K], axis=1)
    assert heads.norm_weight is not None
    x = rotated(RMSNorm(heads.norm_weight, 1e-6)(x), positions, rope_dims)
    if bits[0]:
        x = mx.hadamard_transform(x)
    queries, keys = mx.split(x, [H], axis=1)
    formats = [FORMATS[b] for b in bits]
    if dim == 128:  # a power of two: 4 bits of values are rotated
        values = mx.hadamard_transform(values)
    if bits[0] == bits[1]:  # side by side
        stored = [formats[0].encode(mx.concatenate([keys, values], axis=1))]
    else:
        stored = [formats[0].encode(keys), formats[1].encode(values)]
    wanted = Written(queries, stored)
    check(twin, wanted, heads, mx.float32)
    assert same(twin.values, wanted.values)


@pytest.mark.parametrize("traditional", [False, True])
def test_twin_rotates_as_mlx_does(traditional: bool) -> None:
    heads = heads_of(64, norm=False, rope_dims=32, traditional=traditional)
    qkv, positions = tokens_of(heads, 5)
    x = qkv.reshape(5, -1, 1, 64)[:, :H]
    wanted = mx.fast.rope(
        x, 32, traditional=traditional, base=10_000.0, scale=1.0, offset=positions
    ).squeeze(2)
    assert np.allclose(*wide(twin_of(qkv, positions, heads).queries, wanted), atol=2e-3)


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize(
    ("dim", "bits", "dtype", "count", "how"),
    every(
        2,
        [
            (64, (None, None), mx.float32, 3, {}),
            (64, (8, 8), mx.float16, 9, {"rope_dims": 32}),
            (80, (4, 4), mx.float32, 8, {"rope_dims": 20, "traditional": True, "magnitude": 1.3}),
            (96, (8, 4), mx.bfloat16, 2, {"norm": False}),
            (112, (4, 8), mx.float32, 1, {"norm": False}),
            (128, (4, 4), mx.bfloat16, 5, {"num_heads": 8}),
            (192, (None, 4), mx.float16, 2, {"rope_dims": 0}),
            (256, (4, None), mx.float32, 2, {"rope_dims": 64}),
            (256, (None, None), mx.bfloat16, 3, {"norms_values": True}),
            (64, (8, 8), mx.float32, 9, {"norms_values": True, "norm": False}),
        ],
    ),
)
def test_kernel_and_twin_agree(
    dim: int, bits: tuple[Bits, Bits], dtype: mx.Dtype, count: int, how: dict[str, int]
) -> None:
    heads = heads_of(dim, bits=bits, **how)  # type: ignore[arg-type]
    qkv, positions = tokens_of(heads, count, dtype)
    written = on_machine(qkv, positions, heads)
    check(written, twin_of(qkv, positions, heads), heads, dtype)


@pytest.mark.parametrize(("dim", "joint", "bits"), JOINT)
def test_joint_vectors_are_those_of_the_cache(dim: int, joint: int, bits: Bits) -> None:
    heads = heads_of(dim, bits=(bits, bits), joint=joint, norms_values=True)
    qkv, positions = tokens_of(heads, 5)
    twin = twin_of(qkv, positions, heads)
    apart = twin_of(qkv, positions, heads_of(dim, norms_values=True))
    spec = KVSpec(num_kv_heads=K, key_dim=dim, value_dim=dim, rope_dims=joint)
    layer = layer_of(spec, (bits, bits), num_pages=1, num_slots=1)
    queries, stored = layer.rotate(apart.queries), layer.encode(apart.keys[0], apart.values[0])
    assert np.allclose(*wide(twin.queries, queries), atol=1e-5)
    assert len(twin.stored) == len(stored) == 1
    fmt = FORMATS[bits]
    vectors = [fmt.decode(parts, mx.float32) for parts in (twin.stored[0], stored[0])]
    step = 16 / (2**bits - 1) if bits else 0  # of a code
    assert np.allclose(*wide(*vectors), atol=1e-5 + step)
    assert (np.abs(vectors[0] - vectors[1]) > 1e-4).mean() < 0.01


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("dim", "joint", "bits"), every(2, JOINT))
def test_joint_kernel_and_twin_agree(dim: int, joint: int, bits: Bits, dtype: mx.Dtype) -> None:
    heads = heads_of(dim, bits=(bits, bits), joint=joint, norms_values=True)
    qkv, positions = tokens_of(heads, 3, dtype)
    check_joint(on_machine(qkv, positions, heads), twin_of(qkv, positions, heads), heads)


def check_joint(written: Written, twin: Written, heads: Heads) -> None:
    """Queries within rounding; vectors within it, and few of them one code apart."""
    rounding = ROUNDING[written.queries.dtype]
    assert np.allclose(*wide(written.queries, twin.queries), atol=rounding, rtol=0)
    fmt = heads.form.key_format
    actual, wanted = wide(*(fmt.decode(one.stored[0], mx.float32) for one in (written, twin)))
    bits = fmt.bits
    assert np.allclose(actual, wanted, atol=rounding + (16 / (2**bits - 1) if bits else 0), rtol=0)
    assert (np.abs(actual - wanted) > rounding).mean() < 0.01


@requires_compiler
def test_constant_and_extreme_groups() -> None:
    heads = heads_of(64, bits=(8, 4), norm=False, rope_dims=0)
    vectors = np.zeros((4, H + 2 * K, 64), np.float32)
    vectors[1] = 3.25  # constant
    vectors[2, :, 5] = 60_000  # one outlier
    vectors[3, :, ::2] = -1e-7
    qkv, positions = mx.array(vectors.reshape(4, -1)), mx.zeros(4, mx.int32)
    written = on_machine(qkv, positions, heads)
    assert same(written.arrays(), twin_of(qkv, positions, heads).arrays())


@requires_compiler
def test_numbers_beyond_float16_stay_finite() -> None:
    """bfloat16 and float32 hold larger numbers; they are stored as the largest that float16 has."""
    heads = heads_of(64, bits=(8, 4), norm=False, rope_dims=0)
    qkv, positions = tokens_of(heads, 9)
    huge = mx.where(mx.arange(qkv.shape[1]) % 5 == 0, qkv * 1e6, qkv)
    written, twin = on_machine(huge, positions, heads), twin_of(huge, positions, heads)
    assert same(written.values, twin.values)
    for parts in (written.keys, written.values):
        assert all(mx.isfinite(part.astype(mx.float32)).all().item() for part in parts[1:])
    decoded = FORMATS[4].decode(written.values, mx.float32)
    rotated = mx.hadamard_transform(huge.reshape(9, -1, 64)[:, -K:])
    wanted = mx.clip(rotated, -65_504, 65_504)
    assert mx.allclose(decoded, wanted, atol=2 * 65_504 / 15 / 2 + 8).item()


@requires_compiler
def test_a_token_alone_is_what_it_is_among_others() -> None:
    heads = heads_of(64, bits=(4, 4))
    qkv, positions = tokens_of(heads, 11)
    together = on_machine(qkv, positions, heads)
    for row in (0, 10):
        padded = mx.concatenate([positions[row : row + 1], mx.zeros(7, mx.int32)])
        for given in (positions[row : row + 1], padded):
            alone = on_machine(qkv[row : row + 1], given, heads, seed=row)
            rows = [part[row : row + 1] for part in together.arrays()]
            assert same(alone.arrays(), rows)


@requires_compiler
def test_a_row_is_read_once() -> None:
    heads = heads_of(128, bits=(4, 4))
    qkv, positions = tokens_of(heads, 4, mx.float16)
    machine = MetalCPU()
    with running_on(machine):
        kv_write(qkv, positions, heads)
    assert machine.reports[0].buffers["qkv"].requested_bytes == qkv.nbytes


@requires_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(
    "bits", [(None, None), (8, 8), (8, 4), (4, 4), (4, None), (None, 8)], ids=str
)
def test_all_formats_of_all_head_dims(dim: int, dtype: mx.Dtype, bits: tuple[Bits, Bits]) -> None:
    if bits[0] == 4 and not rotatable(dim):
        bits = (8, bits[1])  # as they are
    for rope_dims, traditional, norm in ((dim, False, True), (dim // 4 // 2 * 2, True, False)):
        heads = heads_of(dim, bits=bits, rope_dims=rope_dims, traditional=traditional, norm=norm)
        for count in (1, 9):
            qkv, positions = tokens_of(heads, count, dtype)
            written = on_machine(qkv, positions, heads, seed=count)
            check(written, twin_of(qkv, positions, heads), heads, dtype)
