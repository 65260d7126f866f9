"""Runs MLX's kernels for matrices and rows. Knows how MLX would launch them."""

import mlx.core as mx
import numpy as np

from metal_cpu import arrays
from metal_cpu.capture import UTILITIES
from metal_cpu.dispatch import dispatch
from metal_cpu.mlx_calls import FOLDER, NAMES, Ran, input_of, number_of, output_of
from metal_cpu.source import Kernel, Part


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


def softmax(x: mx.array, *, looped: bool = False, seed: int = 0) -> Ran:
    """Over the last axis of (rows, axis), by the kernel that holds a row or the one that loops."""
    rows, axis = x.shape
    out = output_of("out", x.shape, x.dtype)
    buffers = [input_of("in", x), out, number_of("axis_size", axis, np.int32)]
    text = f'#define SOFTMAX_N_READS 4\n#include "{FOLDER}/softmax.h"\n'
    kernel = Kernel(
        "softmax_looped" if looped else "softmax_single_row",
        (UTILITIES, Part("softmax", text)),
        f"{NAMES[x.dtype]}, float",
    )
    threads = 1024 if looped else 32 * -(-axis // 128)
    report = dispatch(
        kernel, buffers, grid=(rows * threads, 1, 1), threadgroup=(threads, 1, 1), seed=seed
    )
    return Ran(arrays.to_mlx(out.bytes, x.shape, x.dtype), [report])
