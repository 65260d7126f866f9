"""GPTQ in its two versions: codes packed along the inputs.

qweight (in * bits / 32, out) int32, qzeros (groups, out * bits / 32) int32 packed along the
outputs, scales (groups, out), g_idx (in,) the group of each input. Version 1 stores zero points
less one, in the bits of a code; version 2 as they are. Where g_idx is not i // group_size
(act-order), there are values, but no groups of neighbours as MLX has them.
Source: github.com/AutoGPTQ/AutoGPTQ and github.com/ModelCloud/GPTQModel.
"""

from collections.abc import Iterator

import numpy as np

from ....errors import UnsupportedModelError
from ....models.jsonfields import Fields
from ...arrays import Words, unpack
from ..affine import AffineReader, MixedReader, affine_format
from ..base import Leaves, Reader
from ..source import TensorInfo
from ..stored import FLOATS, Array, StoredArray


class GPTQ:
    """The modules of a checkpoint with the quant_method gptq.

    `is_here`: files are on this disk, so that each g_idx can be looked at; otherwise desc_act
    decides, and a module that turns out to be in order is taken for one that is not.
    """

    def __init__(self, config: Fields, *, is_here: bool) -> None:
        self._bits = config.integer("bits")
        if self._bits not in (2, 3, 4, 8):
            raise UnsupportedModelError(
                f"{config.where} says {self._bits} bits; GPTQ is read with 2, 3, 4 or 8."
            )
        form = _version_of(config)
        if config.get("dynamic"):
            raise UnsupportedModelError(f"dynamic in {config.where} is not supported.")
        self._zero_offset = 1 if form == "gptq" else 0
        self._group_size = config.integer("group_size", low=-1, default=-1)
        self._act_order = config.boolean("desc_act", default=False)
        self._symmetric = config.boolean("sym", default=False)
        self._is_here = is_here

    def __call__(self, path: str, leaves: Leaves) -> Iterator[Reader]:
        """The matrix of a module that has codes."""
        if "qweight" not in leaves:
            return
        qweight, qzeros, scales = (leaves.pop(n, None) for n in ("qweight", "qzeros", "scales"))
        assert qweight is not None
        if qzeros is None or scales is None:
            raise qweight.fail("has no qzeros or no scales beside it")
        reader = _Matrix(
            path,
            (qweight, qzeros, scales),
            bits=self._bits,
            group_size=self._group_size,
            zero_offset=self._zero_offset,
            symmetric=self._symmetric,
        )
        g_idx = leaves.pop("g_idx", None)
        if g_idx is None or self._in_order(reader, g_idx):
            yield reader
        else:
            yield MixedReader(reader, g_idx)

    def _in_order(self, reader: "_Matrix", g_idx: StoredArray) -> bool:
        in_dims = reader.info.shape[1]
        g_idx.expect(["I32", "I64"], (in_dims,))
        if not self._is_here:
            return not self._act_order or reader.group_size == in_dims
        return bool(np.array_equal(g_idx.view(), np.arange(in_dims) // reader.group_size))


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


class _Matrix(AffineReader):
    def __init__(
        self,
        path: str,
        arrays: tuple[StoredArray, StoredArray, StoredArray],
        *,
        bits: int,
        group_size: int,
        zero_offset: int,
        symmetric: bool,
    ) -> None:
        qweight, qzeros, scales = arrays
        if len(qweight.expect(["I32"]).shape) != 2 or 0 in qweight.shape:
            raise qweight.fail(f"has shape {qweight.shape}; expected (in * bits / 32, out)")
        in_dims, out_dims = qweight.shape[0] * 32 // bits, qweight.shape[1]
        size = in_dims if group_size == -1 else group_size
        if size < 1 or in_dims % size or in_dims % 32 or out_dims * bits % 32:
            raise qweight.fail(
                f"has shape {qweight.shape}, which {bits} bits in groups of {size} do not divide"
            )
        groups = in_dims // size
        qzeros.expect(["I32"], (groups, out_dims * bits // 32))
        scales.expect([*FLOATS], (groups, out_dims))
        self._arrays = arrays
        self._zero_offset = zero_offset
        info = TensorInfo(
            name=f"{path}.weight",
            shape=(out_dims, in_dims),
            dtype="float32",
            stored=f"GPTQ int{bits} g{size}",
            stored_bytes=sum(array.num_bytes for array in arrays),
            lossless=affine_format(bits, size),
            scales_exact=symmetric and scales.dtype != "F32",
        )
        scale_dtype = FLOATS[scales.dtype]
        super().__init__(info, arrays, bits=bits, group_size=size, scale_dtype=scale_dtype)

    def triple(self, rows: slice) -> tuple[Words, Array, Array]:
        """The transposed words are MLX's; bias = -zero * scale."""
        qweight, _, scales = self._arrays
        words = np.ascontiguousarray(qweight.view()[:, rows].T).view(np.uint32)
        steps = np.ascontiguousarray(scales.floats()[:, rows].T)
        return words, steps, -self._zeros(rows).astype(np.float32) * steps

    def _zeros(self, rows: slice) -> Array:
        """(rows, groups) uint8. Less one, zero is the highest code."""
        stored = np.ascontiguousarray(self._arrays[1].view()).view(np.uint32)
        zeros = unpack(stored, self.bits, self.info.shape[0])[:, rows]
        return ((zeros.T + self._zero_offset) & ((1 << self.bits) - 1)).astype(np.uint8)
