"""AWQ as AutoAWQ writes it: 4-bit codes, zero points and float16 scales.

GEMM: qweight (in, out / 8) int32, packed along the outputs, output 8c + ORDER[p] in bits 4p to
4p + 3 of word c; qzeros (groups, out / 8) likewise; scales (groups, out). GEMV: qweight
(out, in / 8), qzeros (out, padded), scales (out, padded), in plain order.
Source: github.com/casper-hansen/AutoAWQ, awq/utils/packing_utils.py and awq/modules/linear.
"""

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np

from ....errors import UnsupportedModelError
from ....models.jsonfields import Fields
from ...arrays import Words, pack, unpack
from ..affine import AffineReader, affine_format
from ..base import Leaves, Reader
from ..source import TensorInfo
from ..stored import Array, StoredArray

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output with its code in place p of a word
_INVERSE = [ORDER.index(output) for output in range(8)]
_PER_WORD = 8


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

    def __call__(self, path: str, leaves: Leaves) -> Iterator[Reader]:
        """The matrix of a module that has codes."""
        if "qweight" in leaves:
            arrays = [
                leaves.pop(leaf) for leaf in ("qweight", "qzeros", "scales") if leaf in leaves
            ]
            if len(arrays) != 3:
                raise arrays[0].fail("has no qzeros or no scales beside it")
            kind = _Gemv if self._gemv else _Gemm
            yield kind(path, *arrays, group_size=self._group_size)


class _Module(AffineReader):
    """What the layouts share: three arrays, read in the same groups."""

    layout: str  # of qweight

    def __init__(
        self,
        path: str,
        qweight: StoredArray,
        qzeros: StoredArray,
        scales: StoredArray,
        *,
        group_size: int,
    ) -> None:
        if len(qweight.expect(["I32"]).shape) != 2 or 0 in qweight.shape:
            raise qweight.fail(f"has shape {qweight.shape}; expected {self.layout}")
        self._arrays = (qweight, qzeros, scales)
        shape = self.shape_of(qweight)
        group_size = _checked_group(qweight, shape[1], group_size)
        self.expect_groups(shape[1] // group_size)
        super().__init__(
            _info(path, shape, self._arrays, group_size),
            self._arrays,
            bits=4,
            group_size=group_size,
            scale_dtype="float32",
        )

    @staticmethod
    @abstractmethod
    def shape_of(qweight: StoredArray) -> tuple[int, int]:
        """(out, in) of the matrix."""

    @abstractmethod
    def expect_groups(self, groups: int) -> None:
        """Whether qzeros and scales have room for so many."""


class _Gemm(_Module):
    layout = "(in, out / 8)"

    @staticmethod
    def shape_of(qweight: StoredArray) -> tuple[int, int]:
        """Packed along the outputs."""
        return qweight.shape[1] * _PER_WORD, qweight.shape[0]

    def expect_groups(self, groups: int) -> None:
        """As many rows."""
        qweight, qzeros, scales = self._arrays
        qzeros.expect(["I32"], (groups, qweight.shape[1]))
        scales.expect(["F16", "BF16"], (groups, qweight.shape[1] * _PER_WORD))

    def triple(self, rows: slice) -> tuple[Words, Array, Array]:
        """Words repacked along the inputs; bias = -zero * scale."""
        qweight, qzeros, scales = self._arrays
        words = slice(rows.start // _PER_WORD, -(-rows.stop // _PER_WORD))
        within = slice(rows.start - words.start * _PER_WORD, rows.stop - words.start * _PER_WORD)
        codes = _outputs(qweight.view()[:, words])[:, within]
        zeros = _outputs(qzeros.view()[:, words])[:, within].T.astype(np.float32)
        steps = np.ascontiguousarray(scales.floats()[:, rows].T)
        return pack(np.ascontiguousarray(codes.T), 4), steps, -zeros * steps


class _Gemv(_Module):
    layout = "(out, in / 8)"

    @staticmethod
    def shape_of(qweight: StoredArray) -> tuple[int, int]:
        """Packed along the inputs."""
        return qweight.shape[0], qweight.shape[1] * _PER_WORD

    def expect_groups(self, groups: int) -> None:
        """As many columns, perhaps padded."""
        qweight, qzeros, scales = self._arrays
        padded = qzeros.shape[-1] if qzeros.shape else 0
        if padded * _PER_WORD < groups:
            raise qzeros.fail(f"has shape {qzeros.shape}; expected room for {groups} groups")
        qzeros.expect(["I32"], (qweight.shape[0], padded))
        scales.expect(["F16", "BF16"], (qweight.shape[0], padded * _PER_WORD))

    def triple(self, rows: slice) -> tuple[Words, Array, Array]:
        """Words as they are; what pads the groups is left out."""
        qweight, qzeros, scales = self._arrays
        groups = self.info.shape[1] // self.group_size
        steps = scales.floats(rows)[:, :groups]
        zeros = unpack(qzeros.view(rows).view(np.uint32), 4, groups).astype(np.float32)
        return np.ascontiguousarray(qweight.view(rows)).view(np.uint32), steps, -zeros * steps


def _outputs(words: Array) -> Array:
    """(n, w) int32 packed along the outputs -> (n, 8 w) uint8 in their order."""
    places = unpack(np.ascontiguousarray(words).view(np.uint32), 4, words.shape[1] * _PER_WORD)
    return places.reshape(len(words), -1, _PER_WORD)[..., _INVERSE].reshape(len(words), -1)


def _checked_group(qweight: StoredArray, in_dims: int, group_size: int) -> int:
    size = in_dims if group_size == -1 else group_size
    if size < 1 or in_dims % size or in_dims % 32:
        raise qweight.fail(f"has {in_dims} inputs, which groups of {size} do not divide")
    return size


def _info(
    path: str, shape: tuple[int, int], arrays: tuple[StoredArray, ...], group_size: int
) -> TensorInfo:
    return TensorInfo(
        name=f"{path}.weight",
        shape=shape,
        dtype="float32",
        stored=f"AWQ int4 g{group_size}",
        stored_bytes=sum(array.num_bytes for array in arrays),
        lossless=affine_format(4, group_size),
        scales_exact=False,
    )
