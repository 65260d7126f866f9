"""compressed-tensors' integers: pack-quantized and int-quantized.

pack-quantized: weight_packed (out, in * bits / 32) int32, codes shifted to be unsigned and packed
along the inputs; weight_scale (out, groups); weight_zero_point, if any, shifted alike and packed
along the outputs, (out * bits / 32, groups); weight_shape; weight_g_idx, the group of each input.
int-quantized: weight (out, in) int8, weight_scale and weight_zero_point (int8) for a tensor, its
rows or groups. Source: github.com/vllm-project/compressed-tensors, compressors/pack_quantized.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ....errors import UnsupportedModelError
from ....models.jsonfields import Fields
from ...arrays import Codes, Words, pack, unpack
from ..codes import AffineMatrix, Triple, affine_matrix
from ..source import Leaves, MLXFormat, TensorReader
from ..stored import FLOATS, Array, StoredArray

_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "dense",
)  # fmt: skip


class Integers:
    """The modules of a compressed-tensors checkpoint that hold integers."""

    def __init__(self, config: Fields) -> None:
        groups = groups_of(config)
        self._weights = [weights for group in groups if (weights := _weights_of(group))]
        self._where = config.where
        for form in [stated.text("format", default="dense") for stated in (config, *groups)]:
            if form not in _FORMATS:
                raise UnsupportedModelError(
                    f"format in {config.where} is {form[:40]!r}; expected one of "
                    f"{', '.join(_FORMATS)}."
                )
        _check_transforms(config.fields("transform_config"))
        sparsity = config.fields("sparsity_config")
        if sparsity is not None and sparsity.text("format", default="dense") != "dense":
            raise UnsupportedModelError(f"{sparsity.where} compresses zeros; not supported.")

    def __call__(self, path: str, leaves: Leaves) -> Iterator[TensorReader]:
        packed, plain = leaves.get("weight_packed"), leaves.get("weight")
        if packed is not None and packed.dtype == "I32":
            yield self._packed(path, leaves)
        elif plain is not None and plain.dtype == "I8":
            del leaves["weight"]
            scale = leaves.pop("weight_scale", None)
            if scale is None:
                raise plain.fail("has no weight_scale beside it")
            zeros = leaves.pop("weight_zero_point", None)
            self._check_zeros(plain, zeros, [w for w in self._weights if w.bits == 8])
            yield _bytes(path, plain, scale, zeros).reader()

    def _packed(self, path: str, leaves: Leaves) -> TensorReader:
        names = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
        words, scale, zeros, shape = (leaves.pop(name, None) for name in names)
        assert words is not None
        if scale is None or len(words.shape) != 2 or len(scale.shape) != 2 or 0 in words.shape:
            raise words.fail(f"has shape {words.shape} and no weight_scale that fits")
        form = self._choose(words, scale)
        self._check_zeros(words, zeros, [w for w in self._weights if w.bits == form.bits])
        matrix = _words(path, words, scale, zeros, shape, form)
        return matrix.reader(leaves.pop("weight_g_idx", None))

    def _choose(self, words: StoredArray, scale: StoredArray) -> "_Packing":
        fitting = set()
        num_words, groups = words.shape[1], scale.shape[1]
        for stated in self._weights:
            in_dims = groups * stated.group_size or num_words * 32 // stated.bits
            if not (stated.group_size or groups == 1):
                continue
            for padded in (False, True):
                packing = _Packing(stated.bits, in_dims // groups, padded)
                if packing.num_words(in_dims) == num_words:
                    fitting.add(replace(packing, padded=padded and 32 % stated.bits != 0))
        if len(fitting) != 1:
            stated_as = ", ".join(f"{w.bits} bits in groups of {w.group_size or 'a row'}"
                                  for w in self._weights) or "no integers"  # fmt: skip
            raise words.fail(
                f"has shape {words.shape} and scales {scale.shape}, which {len(fitting)} of the "
                f"config's formats fit ({stated_as}); expected one"
            )
        return fitting.pop()

    def _check_zeros(
        self, codes: StoredArray, zeros: StoredArray | None, stated: "list[_Stated]"
    ) -> None:
        """Raise where zero points are stated and missing: the middle would be a wrong guess."""
        if zeros is None and stated and not any(weights.symmetric for weights in stated):
            raise codes.fail(
                f"has no weight_zero_point beside it, though {self._where} says symmetric false"
            )


@dataclass(frozen=True, slots=True)
class _Stated:
    bits: int
    group_size: int  # 0: whole rows
    symmetric: bool


@dataclass(frozen=True, slots=True)
class _Packing:
    """How codes lie in words of 32 bits.

    `padded`: a word holds 32 // bits whole codes, as versions of compressed-tensors before dense
    packing wrote 3, 5, 6 and 7 bits; otherwise a code may cross into the next word.
    """

    bits: int
    group_size: int
    padded: bool

    def num_words(self, count: int) -> int:
        return -(-count // (32 // self.bits)) if self.padded else -(-count * self.bits // 32)

    def unpack(self, words: Words, count: int) -> Codes:
        """(..., num_words) uint32 -> (..., count) uint8."""
        if not self.padded:
            return unpack(words, self.bits, count)
        places = np.arange(32 // self.bits, dtype=np.uint32) * np.uint32(self.bits)
        codes = (words[..., None] >> places) & np.uint32((1 << self.bits) - 1)
        return codes.astype(np.uint8).reshape(*words.shape[:-1], -1)[..., :count]


def groups_of(config: Fields | None) -> list[Fields]:
    groups = config.fields("config_groups") if config else None
    listed = [groups.fields(name) for name in groups.values] if groups else []
    return [group for group in listed if group]


def _check_transforms(stated: Fields | None) -> None:
    for scheme in groups_of(stated):
        for applied in scheme.items("apply") or []:
            where = applied.get("location") if isinstance(applied, dict) else applied
            if where not in ("weight_input", "weight_output"):
                raise UnsupportedModelError(
                    f"{scheme.where} transforms at {str(where)[:40]!r} while the model runs; not "
                    "supported. Use the checkpoint that it was made from."
                )


def _weights_of(group: Fields) -> _Stated | None:
    weights = group.fields("weights")
    if weights is None or weights.text("type", default="int") != "int":
        return None
    size = weights.integer("group_size", low=-1, default=0)
    symmetric = weights.boolean("symmetric", default=True)
    return _Stated(weights.integer("num_bits", high=8), max(size, 0), symmetric)


def _words(
    path: str,
    words: StoredArray,
    scale: StoredArray,
    zeros: StoredArray | None,
    shape: StoredArray | None,
    packing: _Packing,
) -> AffineMatrix:
    bits, group_size = packing.bits, packing.group_size
    out_dims, groups = words.shape[0], scale.shape[1]
    in_dims = groups * group_size
    scale.expect([*FLOATS], (out_dims, groups))
    if zeros is not None:
        zeros.expect(["I32"], (packing.num_words(out_dims), groups))
    if shape is not None:
        shape.expect(["I64", "I32"], (2,))

    def triple(rows: slice) -> Triple:
        """Words as they are; without zero points, the middle is zero."""
        if shape is not None and tuple(shape.view().tolist()) != (out_dims, in_dims):
            raise shape.fail(f"is {shape.view().tolist()}; expected {(out_dims, in_dims)}")
        codes = np.ascontiguousarray(words.view(rows)).view(np.uint32)
        if packing.padded:
            codes = _as_words(packing.unpack(codes, in_dims), bits)
        steps = scale.floats(rows)
        if zeros is None:
            return codes, steps, -np.float32(1 << (bits - 1)) * steps
        by_group = np.ascontiguousarray(zeros.view().T).view(np.uint32)  # (groups, words)
        points = packing.unpack(by_group, out_dims)[:, rows]
        return codes, steps, -np.ascontiguousarray(points.T).astype(np.float32) * steps

    parts = [part for part in (words, scale, zeros, shape) if part is not None]
    return affine_matrix(
        path,
        (out_dims, in_dims),
        parts,
        triple,
        MLXFormat(group_size, bits),
        stored=f"compressed-tensors int{bits}",
        scales=scale,
        exact=zeros is None,
    )


def _bytes(
    path: str, codes: StoredArray, scale: StoredArray, zeros: StoredArray | None
) -> AffineMatrix:
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise codes.fail(f"has shape {codes.shape}; expected (out, in)")
    out_dims, in_dims = codes.shape
    groups = _groups_of(scale.expect([*FLOATS]), out_dims)
    if in_dims % groups:
        raise scale.fail(f"has {groups} groups, which do not divide {in_dims} inputs")
    if zeros is not None:
        zeros.expect(["I8"], scale.shape)

    def each_row(values: Array, rows: slice) -> Array:
        grid = np.asarray(values).reshape(-1, groups)
        return grid[rows] if len(grid) > 1 else np.repeat(grid, rows.stop - rows.start, axis=0)

    def triple(rows: slice) -> Triple:
        """Codes moved by 128 to be unsigned."""
        octets = np.ascontiguousarray(codes.view(rows)).view(np.uint8) ^ np.uint8(128)
        steps = each_row(scale.floats(), rows)
        zero: Array = np.full((), 128, np.float32)
        if zeros is not None:
            zero = zero + each_row(zeros.floats(), rows)
        return _as_words(octets, 8), steps, -zero * steps

    parts = [part for part in (codes, scale, zeros) if part is not None]
    return affine_matrix(
        path,
        (out_dims, in_dims),
        parts,
        triple,
        MLXFormat(in_dims // groups, 8),
        stored="compressed-tensors int8",
        scales=scale,
        exact=zeros is None,
    )


def _groups_of(scale: StoredArray, out_dims: int) -> int:
    if scale.shape in ((), (1,), (1, 1), (out_dims,)):
        return 1
    if len(scale.shape) == 2 and scale.shape[0] == out_dims and scale.shape[1] > 0:
        return scale.shape[1]
    raise scale.fail(f"has shape {scale.shape}; expected one scale, or ({out_dims}, groups)")


def _as_words(codes: Codes, bits: int) -> Words:
    """Rows of codes as words; rows that fill no words get zeros at their end."""
    short = -codes.shape[1] % 32
    return pack(np.pad(codes, ((0, 0), (0, short))) if short else codes, bits)
