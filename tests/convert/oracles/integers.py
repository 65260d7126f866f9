"""AWQ, GPTQ and compressed-tensors packing, number by number, and what the numbers mean.

Written from the documented layouts: AutoAWQ (awq/modules/linear/gemm.py), AutoGPTQ
(auto_gptq/nn_modules/qlinear), compressed-tensors (compressors/pack_quantized). No mlxinfer.
"""

import numpy as np
from oracles.checkpoints import Stored, f16, i32


def pack_columns(codes: np.ndarray, bits: int) -> np.ndarray:
    """(n, k) -> (n, ceil(k * bits / 32)): one long number for each row, lowest code first."""
    num_words = -(-codes.shape[1] * bits // 32)
    rows = []
    for row in codes:
        number = sum(int(code) << (bits * place) for place, code in enumerate(row))
        rows.append([(number >> (32 * word)) & 0xFFFFFFFF for word in range(num_words)])
    return np.array(rows, np.uint32)


def pack_padded(codes: np.ndarray, bits: int) -> np.ndarray:
    """(n, k) -> (n, ceil(k / (32 // bits))): whole codes in each word, lowest first."""
    item = 32 // bits
    rows = []
    for row in codes:
        words = [row[start : start + item] for start in range(0, len(row), item)]
        rows.append([sum(int(c) << (bits * i) for i, c in enumerate(word)) for word in words])
    return np.array(rows, np.uint32)


def pack_awq(codes: np.ndarray) -> np.ndarray:
    """(n, out) -> (n, out / 8): place p of a word holds the column that the order map names."""
    order_map = [0, 2, 4, 6, 1, 3, 5, 7]
    packed = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for word in range(packed.shape[1]):
        for place in range(8):
            packed[:, word] |= codes[:, word * 8 + order_map[place]].astype(np.uint32) << (
                4 * place
            )
    return packed


def awq_gemm(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> dict[str, Stored]:
    """codes (in, out), zeros and scales (groups, out)."""
    return {"qweight": i32(pack_awq(codes)), "qzeros": i32(pack_awq(zeros)), "scales": f16(scales)}


def awq_gemv(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> dict[str, Stored]:
    """codes (in, out), zeros and scales (groups, out); groups padded as the kernel wants them."""
    group_size = len(codes) // len(scales)
    multiple = {128: 1, 64: 2, 32: 4}[group_size]
    width = -(-len(scales) // 8)
    width = -(-width // multiple) * multiple
    padding = ((0, 0), (0, width * 8 - len(scales)))
    return {
        "qweight": i32(pack_columns(codes.T, 4)),
        "qzeros": i32(pack_columns(np.pad(zeros.T, padding), 4)),
        "scales": f16(np.pad(scales.T, padding)),
    }


def awq_values(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """(out, in) float16, as the fp16 kernel computes them: integer difference times scale."""
    group_size = len(codes) // len(scales)
    each_zero = np.repeat(zeros.astype(np.int32), group_size, axis=0)
    each_scale = np.repeat(scales.astype(np.float16), group_size, axis=0)
    return ((codes.astype(np.int32) - each_zero).astype(np.float16) * each_scale).T


def gptq(
    codes: np.ndarray,
    zeros: np.ndarray,
    scales: np.ndarray,
    group_of: np.ndarray,
    bits: int,
    version: int,
) -> dict[str, Stored]:
    """codes (in, out), zeros and scales (groups, out), group_of (in,); version 1: zeros - 1."""
    stored = (zeros.astype(np.int64) - 1) % (1 << bits) if version == 1 else zeros
    return {
        "qweight": i32(pack_columns(codes.T, bits).T),
        "qzeros": i32(pack_columns(stored, bits)),
        "scales": f16(scales),
        "g_idx": ("I32", group_of.astype(np.int32)),
    }


def gptq_values(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_of: np.ndarray
) -> np.ndarray:
    """(out, in) float64, input by input."""
    halves = scales.astype(np.float16).astype(np.float64)
    rows = [
        (codes[i].astype(np.int64) - zeros[group].astype(np.int64)) * halves[group]
        for i, group in enumerate(group_of)
    ]
    return np.array(rows).T
