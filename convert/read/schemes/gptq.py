"""GPTQ and AWQ: codes, zero points and scales of a matrix, packed into 32-bit words.

GPTQ: qweight (in * bits / 32, out) int32, packed along the inputs; qzeros (groups, out * bits / 32)
int32, packed along the outputs; scales (groups, out); g_idx (in,) the group of each input.
Version 1 stores zero points less one, in the bits of a code; version 2 as they are. Where g_idx is
not i // group_size (act-order), there are values, but no groups of neighbours as MLX has them.
Source: github.com/AutoGPTQ/AutoGPTQ and github.com/ModelCloud/GPTQModel.

AWQ, 4 bits. GEMM: qweight (in, out / 8) int32, packed along the outputs, output 8c + ORDER[p] in
bits 4p to 4p + 3 of word c; qzeros (groups, out / 8) likewise; scales (groups, out). GEMV: qweight
(out, in / 8), qzeros (out, padded), scales (out, padded), in plain order.
Source: github.com/casper-hansen/AutoAWQ, awq/utils/packing_utils.py and awq/modules/linear.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from ....errors import UnsupportedModelError
from ....models.jsonfields import Fields
from ...arrays import pack, unpack
from ..codes import AffineMatrix, Triple, affine_matrix
from ..source import Leaves, MLXFormat, TensorReader
from ..stored import FLOATS, Array, StoredArray

Arrays = tuple[StoredArray, StoredArray, StoredArray]  # qweight, qzeros, scales

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ: the output with its code in place p of a word
_INVERSE = [ORDER.index(output) for output in range(8)]
_PER_WORD = 8


def _taken(leaves: Leaves) -> Arrays:
    qweight, qzeros, scales = (leaves.pop(n, None) for n in ("qweight", "qzeros", "scales"))
    assert qweight is not None
    if qzeros is None or scales is None:
        raise qweight.fail("has no qzeros or no scales beside it")
    return qweight, qzeros, scales


def _group_size(qweight: StoredArray, in_dims: int, stated: int) -> int:
    size = in_dims if stated == -1 else stated
    if size < 1 or in_dims % size or in_dims % 32:
        raise qweight.fail(f"has {in_dims} inputs, which groups of {size} do not divide")
    return size


class GPTQ:
    """The modules of a checkpoint with the quant_method gptq."""

    def __init__(self, config: Fields) -> None:
        self._bits = config.integer("bits")
        if self._bits not in (2, 3, 4, 8):
            raise UnsupportedModelError(
                f"{config.where} says {self._bits} bits; GPTQ is read with 2, 3, 4 or 8."
            )
        if config.get("dynamic"):
            raise UnsupportedModelError(f"dynamic in {config.where} is not supported.")
        self._zero_offset = 1 if _version_of(config) == "gptq" else 0
        self._group_size = config.integer("group_size", low=-1, default=-1)
        self._symmetric = config.boolean("sym", default=False)

    def __call__(self, path: str, leaves: Leaves) -> Iterator[TensorReader]:
        if "qweight" not in leaves:
            return
        yield self._matrix(path, _taken(leaves)).reader(leaves.pop("g_idx", None))

    def _matrix(self, path: str, arrays: Arrays) -> AffineMatrix:
        (qweight, qzeros, scales), bits = arrays, self._bits
        if len(qweight.expect(["I32"]).shape) != 2 or 0 in qweight.shape:
            raise qweight.fail(f"has shape {qweight.shape}; expected (in * bits / 32, out)")
        in_dims, out_dims = qweight.shape[0] * 32 // bits, qweight.shape[1]
        size = _group_size(qweight, in_dims, self._group_size)
        if out_dims * bits % 32:
            raise qweight.fail(f"has {out_dims} outputs, whose {bits} bits fill no words")
        qzeros.expect(["I32"], (in_dims // size, out_dims * bits // 32))
        scales.expect([*FLOATS], (in_dims // size, out_dims))
        return affine_matrix(
            path,
            (out_dims, in_dims),
            arrays,
            partial(self._triple, arrays),
            MLXFormat(size, bits),
            stored=f"GPTQ int{bits}",
            scales=scales,
            exact=self._symmetric,
        )

    def _triple(self, arrays: Arrays, rows: slice) -> Triple:
        """The transposed words are MLX's; bias = -zero * scale. Zero less one is the top code."""
        qweight, qzeros, scales = arrays
        words = np.ascontiguousarray(qweight.view()[:, rows].T).view(np.uint32)
        steps = np.ascontiguousarray(scales.floats()[:, rows].T)
        stored = np.ascontiguousarray(qzeros.view()).view(np.uint32)
        codes = unpack(stored, self._bits, qweight.shape[1])[:, rows].T
        if self._symmetric:
            return words, steps, -self._middle(codes, qzeros) * steps
        zeros = ((codes + self._zero_offset) & ((1 << self._bits) - 1)).astype(np.float32)
        return words, steps, -zeros * steps

    def _middle(self, codes: Array, qzeros: StoredArray) -> np.float32:
        """The zero point of symmetric codes, which no version leaves in doubt.

        Some files are stored as version 2 and say that they are of version 1, or the reverse.
        """
        middle = 1 << (self._bits - 1)
        if not ((codes == middle).all() or (codes == middle - 1).all()):
            raise qzeros.fail(
                f"has zero points from {codes.min()} to {codes.max()}, but the config says that "
                f"codes are symmetric (sym), and these have {middle} or, less one, {middle - 1}"
            )
        return np.float32(middle)


def _version_of(config: Fields) -> str:
    """ "gptq" or "gptq_v2", stated as checkpoint_format or, by GPTQModel, as format alone."""
    keys = [key for key in ("checkpoint_format", "format") if config.get(key) is not None]
    stated = {key: config.text(key) for key in keys}
    for key, form in stated.items():
        if form not in ("gptq", "gptq_v2"):
            raise UnsupportedModelError(
                f"{key} in {config.where} is {form[:40]!r}; expected gptq or gptq_v2."
            )
    if len(set(stated.values())) > 1:
        raise UnsupportedModelError(
            f"{config.where} says {' and '.join(f'{k} {v}' for k, v in stated.items())}; expected "
            "one of them."
        )
    return next(iter(stated.values()), "gptq")


class AWQ:
    """The modules of a checkpoint with the quant_method awq."""

    def __init__(self, config: Fields) -> None:
        bits = config.integer("bits", "w_bit", default=4)
        if bits != 4 or not config.boolean("zero_point", default=True):
            raise UnsupportedModelError(
                f"{config.where} says {bits} bits, zero_point "
                f"{config.get('zero_point')}; AWQ is read with 4 bits and zero points."
            )
        version = config.text("version", "format", default="gemm").lower()
        if version not in ("gemm", "gemv", "exllama"):
            raise UnsupportedModelError(
                f"version in {config.where} is {version[:40]!r}; expected gemm or gemv."
            )
        self._gemv = version == "gemv"
        self._group_size = config.integer("group_size", "q_group_size", low=-1, default=128)

    def __call__(self, path: str, leaves: Leaves) -> Iterator[TensorReader]:
        if "qweight" in leaves:
            yield self._matrix(path, _taken(leaves)).reader()

    def _matrix(self, path: str, arrays: Arrays) -> AffineMatrix:
        qweight, qzeros, scales = arrays
        if len(qweight.expect(["I32"]).shape) != 2 or 0 in qweight.shape:
            expected = "(out, in / 8)" if self._gemv else "(in, out / 8)"
            raise qweight.fail(f"has shape {qweight.shape}; expected {expected}")
        first, second = qweight.shape
        shape = (first, second * _PER_WORD) if self._gemv else (second * _PER_WORD, first)
        size = _group_size(qweight, shape[1], self._group_size)
        groups = shape[1] // size
        if self._gemv:
            padded = qzeros.shape[-1] if qzeros.shape else 0
            if padded * _PER_WORD < groups:
                raise qzeros.fail(f"has shape {qzeros.shape}; expected room for {groups} groups")
            qzeros.expect(["I32"], (first, padded))
            scales.expect(["F16", "BF16"], (first, padded * _PER_WORD))
        else:
            qzeros.expect(["I32"], (groups, second))
            scales.expect(["F16", "BF16"], (groups, second * _PER_WORD))
        triple = partial(_gemv, arrays, groups) if self._gemv else partial(_gemm, arrays)
        form = MLXFormat(size, 4)
        return affine_matrix(
            path, shape, arrays, triple, form, stored="AWQ int4", scales=scales, exact=False
        )


def _gemm(arrays: Arrays, rows: slice) -> Triple:
    """Words repacked along the inputs; bias = -zero * scale."""
    qweight, qzeros, scales = arrays
    words = slice(rows.start // _PER_WORD, -(-rows.stop // _PER_WORD))
    within = slice(rows.start - words.start * _PER_WORD, rows.stop - words.start * _PER_WORD)
    codes = _outputs(qweight.view()[:, words])[:, within]
    zeros = _outputs(qzeros.view()[:, words])[:, within].T.astype(np.float32)
    steps = np.ascontiguousarray(scales.floats()[:, rows].T)
    return pack(np.ascontiguousarray(codes.T), 4), steps, -zeros * steps


def _gemv(arrays: Arrays, groups: int, rows: slice) -> Triple:
    """Words as they are; what pads the groups is left out."""
    qweight, qzeros, scales = arrays
    steps = scales.floats(rows)[:, :groups]
    zeros = unpack(qzeros.view(rows).view(np.uint32), 4, groups).astype(np.float32)
    return np.ascontiguousarray(qweight.view(rows)).view(np.uint32), steps, -zeros * steps


def _outputs(words: Array) -> Array:
    """(n, w) int32 packed along the outputs -> (n, 8 w) uint8 in their order."""
    places = unpack(np.ascontiguousarray(words).view(np.uint32), 4, words.shape[1] * _PER_WORD)
    return places.reshape(len(words), -1, _PER_WORD)[..., _INVERSE].reshape(len(words), -1)
