"""Runs MLX's own kernels from the headers that its wheel brings, as MLX would.

B = sequences, H = query heads, K = KV heads, L = query tokens, N = keys, D = head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_cpu import arrays
from metal_cpu.capture import UTILITIES
from metal_cpu.dispatch import Buffer, dispatch
from metal_cpu.report import Report, Size
from metal_cpu.source import Kernel, Part

NAMES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t"}
FOLDER = "mlx/backend/metal/kernels"


@dataclass(slots=True)
class Ran:
    """What kernels gave, and a report of each dispatch."""

    output: mx.array
    reports: list[Report]


@dataclass(frozen=True, slots=True)
class Attention:
    """One call of attention.

    Args:
        queries: (B, H, L, D).
        keys, values: (B, K, capacity, D), of which the first `num_keys` are seen.
        causal: whether a query sees no later key.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    num_keys: int
    scale: float
    causal: bool = False
    seed: int = 0
    checked: bool = True

    @property
    def kind(self) -> str:
        """The element type as kernels name it."""
        return NAMES[self.queries.dtype]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.queries.shape[1] // self.keys.shape[1]

    def expected(self, dtype: mx.Dtype | None = None) -> mx.array:
        """What MLX computes on the CPU, in another dtype if wanted."""
        dtype = dtype or self.queries.dtype
        return mx.fast.scaled_dot_product_attention(
            self.queries.astype(dtype),
            self.keys[:, :, : self.num_keys].astype(dtype),
            self.values[:, :, : self.num_keys].astype(dtype),
            scale=self.scale,
            mask="causal" if self.causal else None,
        )


def input_of(name: str, array: mx.array) -> Buffer:
    """A copy of an array."""
    return Buffer.of_input(name, arrays.to_bytes(array))


def number_of(name: str, value: float, dtype: type[np.generic]) -> Buffer:
    """A single number."""
    return Buffer.of_input(name, arrays.scalar(value, dtype))


def output_of(name: str, shape: tuple[int, ...], dtype: mx.Dtype) -> Buffer:
    """Memory for an array."""
    return Buffer.of_output(name, int(np.prod(shape)) * dtype.size)


def sdpa_vector(call: Attention) -> Ran:
    """The one-pass kernel: a threadgroup of 32 SIMD-groups for each query of each head."""
    batch, heads, length, dim = call.queries.shape
    inner = call.values.shape[-1]
    out = output_of("out", (batch, heads, length, inner), call.queries.dtype)
    buffers = [
        *_arrays(call),
        out,
        number_of("gqa_factor", call.group, np.int32),
        *_lengths(call),
        *[None] * 6,  # masks, their strides, sinks
        number_of("num_q_heads", heads, np.int32),
    ]
    kernel = _kernel("sdpa_vector", f"{call.kind}, {dim}, {inner}", _constants(call))
    report = _run(call, kernel, buffers, (batch * heads, length, 1), (1024, 1, 1))
    return Ran(_array(out, (batch, heads, length, inner), call), [report])


def sdpa_vector_2pass(call: Attention, *, blocks: int, shared: int | None = None) -> Ran:
    """The two-pass kernels: keys in `blocks` parts, then one threadgroup for each query.

    Args:
        shared: query heads for which a SIMD-group computes from the same registers: the variant
            for one query token; None: the plain one.
    """
    batch, heads, length, dim = call.queries.shape
    kv_heads, inner = call.values.shape[1], call.values.shape[-1]
    shape = (batch, heads, length, blocks)
    partials = output_of("partials", (*shape, inner), call.queries.dtype)
    sums, maxs = (output_of(name, shape, mx.float32) for name in ("sums", "maxs"))
    buffers: list[Buffer | None] = [*_arrays(call), partials, sums, maxs, *_lengths(call)]
    if shared is None:
        name, instance = "sdpa_vector_2pass_1", f"{call.kind}, {dim}, {inner}"
        buffers += [None] * 6
    else:
        name = "sdpa_vector_2pass_1_gqa"
        instance = f"{call.kind}, {dim}, {inner}, {call.group}, {shared}"
    kernel = _kernel(name, instance, _constants(call, blocks))
    first = _run(call, kernel, buffers, (kv_heads, batch, blocks), (32, call.group, length))
    merge = _kernel("sdpa_vector_2pass_2", f"{call.kind}, {inner}")
    out = output_of("out", (batch, heads, length, inner), call.queries.dtype)
    parts = [Buffer.of_input(b.name, b.bytes, written=b.written) for b in (partials, sums, maxs)]
    merged = [*parts, out, number_of("blocks", blocks, np.int32)]
    second = _run(call, merge, merged, (batch * heads, length, 1), (1024, 1, 1))
    return Ran(_array(out, (batch, heads, length, inner), call), [first, second])


def steel_attention(call: Attention) -> Ran:
    """The kernel for prefill: tiles of 32 queries, 8 x 8 matrices."""
    batch, heads, length, dim = call.queries.shape
    rows, columns = 32, 32 if dim < 128 else 16
    out = output_of("O", call.queries.shape, call.queries.dtype)
    params = np.zeros(1, _STEEL)
    num_keys, capacity = call.num_keys, call.keys.shape[2]
    params["ints"] = (batch, heads, dim, length, num_keys, call.group)
    params["scale"] = call.scale
    params["blocks"] = (
        *(-(-length // rows), -(-num_keys // columns), length // rows, num_keys // columns),
        *(length % rows, num_keys % columns, num_keys - length),
    )
    params["strides"] = [
        (array_heads * tokens * dim, tokens * dim, dim)
        for array_heads, tokens in (
            *((heads, length), (call.keys.shape[1], capacity)),
            *((call.keys.shape[1], capacity), (heads, length)),
        )
    ]
    buffers = [
        *_arrays(call),
        out,
        Buffer.of_input("params", params.view(np.uint8)),
        None, None, None, None,
    ]  # fmt: skip
    constants = {200: length % rows == 0, 201: num_keys % columns == 0, 301: call.causal}
    kernel = Kernel(
        "attention",
        (UTILITIES, Part("steel", f'#include "{FOLDER}/steel/attn/kernels/steel_attention.h"\n')),
        f"{call.kind}, {rows}, {columns}, {dim}, {dim}, 4, 1",
        tuple((index, int(value)) for index, value in constants.items()),
    )
    report = _run(call, kernel, buffers, (-(-length // rows), heads, batch), (32, 4, 1))
    return Ran(_array(out, call.queries.shape, call), [report])


_STEEL = np.dtype(  # AttnParams
    [
        ("ints", np.int32, 6),
        ("scale", np.float32),
        ("blocks", np.int32, 7),
        ("strides", np.int64, (4, 3)),
    ]
)


def _kernel(name: str, instance: str, constants: dict[int, int] | None = None) -> Kernel:
    text = f'#include "{FOLDER}/sdpa_vector.h"\n'
    known = tuple((constants or {}).items())
    return Kernel(name, (UTILITIES, Part("sdpa", text)), instance, known)


def _constants(call: Attention, blocks: int = 0) -> dict[int, int]:
    known = dict.fromkeys((20, 23, 24, 25), 0)  # masks and sinks
    return {**known, 22: int(call.causal and call.queries.shape[2] > 1), 26: blocks}


def _arrays(call: Attention) -> list[Buffer]:
    named = {"queries": call.queries, "keys": call.keys, "values": call.values}
    return [Buffer.of_input(name, arrays.to_bytes(array)) for name, array in named.items()]


def _lengths(call: Attention) -> list[Buffer]:
    """N, the strides of keys and of values, the scale."""
    strides = [
        number_of(f"{name}_{axis}_stride", stride, np.uint64)
        for name, array in (("k", call.keys), ("v", call.values))
        for axis, stride in (*(("head", array.shape[2] * array.shape[3]), ("seq", array.shape[3])),)
    ]
    return [
        number_of("N", call.num_keys, np.int32),
        *strides,
        number_of("scale", call.scale, np.float32),
    ]


def _array(buffer: Buffer, shape: tuple[int, ...], call: Attention) -> mx.array:
    return arrays.to_mlx(buffer.bytes, shape, call.queries.dtype)


def _run(
    call: Attention,
    kernel: Kernel,
    buffers: Sequence[Buffer | None],
    groups: Size,
    threadgroup: Size,
) -> Report:
    x, y, z = (g * t for g, t in zip(groups, threadgroup, strict=True))
    return dispatch(
        kernel,
        buffers,
        grid=(x, y, z),
        threadgroup=threadgroup,
        seed=call.seed,
        checked=call.checked,
    )


def quantized_matvec(
    x: mx.array,
    weights: tuple[mx.array, mx.array, mx.array],
    *,
    group_size: int,
    bits: int,
    fast: bool,
) -> Ran:
    """x (1, in) times affine weights (out, in), by the kernel for whole blocks or for any shape."""
    codes, scales, biases = weights
    num_out, num_in = codes.shape[0], x.shape[-1]
    out = output_of("y", (1, num_out), x.dtype)
    buffers = [
        *(input_of(n, a) for n, a in (("w", codes), ("scales", scales), ("biases", biases))),
        *(input_of("x", x), out),
        *(number_of("in_vec_size", num_in, np.int32), number_of("out_vec_size", num_out, np.int32)),
        *([None] * 8),
    ]
    name = "affine_qmv_fast" if fast else "affine_qmv"
    headers = ("steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")
    text = "".join(f'#include "{FOLDER}/{header}"\n' for header in headers)
    instance = f"{NAMES[x.dtype]}, {group_size}, {bits}, false"
    kernel = Kernel(name, (UTILITIES, Part("quantized", text)), instance)
    report = dispatch(kernel, buffers, grid=(32, 2 * -(-num_out // 8), 1), threadgroup=(32, 2, 1))
    return Ran(arrays.to_mlx(out.bytes, (1, num_out), x.dtype), [report])
