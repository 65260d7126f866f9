"""How a key or value vector is stored: as it is, or in 8 or 4 bits. Knows no pages.

A vector is encoded by itself, the moment it is written: what it becomes never depends on
scheduling. Leading axes are free everywhere; the last one is the vector (D numbers) or what is
stored of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import mlx.core as mx

from ..config import KVOptions
from ..core import CacheSpec, KVSpec, LatentSpec, OwnCacheSpec, PagedSpec, StateSpec
from ..errors import InvalidRequestError

Bits = tuple[int | None, int | None]  # of keys and values; None: the activation dtype
PLAIN: Bits = (None, None)
MAX_FLOAT16 = 65_504.0  # scales and biases of larger numbers would be infinite
MAX_GROUP = 64
ROTATABLE = frozenset(m * 2**k for m in (1, 12, 20, 28) for k in range(1, 10))


class KVFormat(Protocol):
    """A way to store vectors of `dim` numbers."""

    dim: int
    as_stored: bool  # decoding is free: what is stored are the vectors

    @property
    def parts(self) -> list[tuple[int, mx.Dtype]]:
        """(width, dtype) of each array that holds a part of every vector."""
        ...

    def encode(self, vectors: mx.array) -> list[mx.array]:
        """(..., dim) -> the parts (..., width)."""
        ...

    def decode(self, parts: list[mx.array]) -> mx.array:
        """The parts (..., width) -> (..., dim) in the activation dtype."""
        ...


class Plain:
    """Vectors as they are, in the activation dtype."""

    as_stored = True

    def __init__(self, dim: int, dtype: mx.Dtype) -> None:
        self.dim = dim
        self.parts = [(dim, dtype)]

    def encode(self, vectors: mx.array) -> list[mx.array]:
        """Vectors as they are, the only part."""
        return [vectors]

    def decode(self, parts: list[mx.array]) -> mx.array:
        """The only part, as it is."""
        return parts[0]


class Affine:
    """Codes of 8 or 4 bits; a group of numbers shares a float16 scale and a float16 bias.

    Scale and bias of a group lie side by side: kernels read both at once.

    x is stored as round((x - bias) / scale). Two 4-bit codes share a byte, the even one low. Groups
    are as large as divide the vector, up to 64 and in steps of 8, so that every head dim fits.
    """

    as_stored = False

    def __init__(self, dim: int, dtype: mx.Dtype, bits: int) -> None:
        assert bits in (4, 8)
        assert dim % 8 == 0, "a group is a multiple of 8 numbers"
        self.dim = dim
        self.bits = bits
        self.group = max(g for g in range(8, MAX_GROUP + 1, 8) if dim % g == 0)
        self._dtype = dtype
        num_groups = dim // self.group
        self.parts = [
            (dim * bits // 8, mx.uint8),
            (2 * num_groups, mx.float16),
        ]

    def encode(self, vectors: mx.array) -> list[mx.array]:
        """(..., dim) -> codes (..., dim * bits / 8), scales and biases (..., 2 * dim / group)."""
        levels = float(2**self.bits - 1)
        grouped = mx.unflatten(vectors.astype(mx.float32), -1, (-1, self.group))
        grouped = mx.clip(grouped, -MAX_FLOAT16, MAX_FLOAT16)
        low = grouped.min(axis=-1, keepdims=True)
        high = grouped.max(axis=-1, keepdims=True)
        scales = ((high - low) / levels).astype(mx.float16)
        biases = low.astype(mx.float16)
        step = mx.maximum(scales.astype(mx.float32), 1e-8)  # a constant group: all codes 0
        codes = mx.clip(mx.round((grouped - biases) / step), 0, levels).astype(mx.uint8)
        codes = codes.flatten(-2)
        if self.bits == 4:
            codes = codes[..., ::2] | (codes[..., 1::2] << 4)
        return [codes, mx.concatenate([scales, biases], axis=-1).flatten(-2)]

    def decode(self, parts: list[mx.array]) -> mx.array:
        """Codes, scales and biases -> (..., dim)."""
        codes, of_groups = parts
        if self.bits == 4:
            codes = mx.stack([codes & 15, codes >> 4], axis=-1).flatten(-2)
        grouped = mx.unflatten(codes, -1, (-1, self.group)).astype(mx.float32)
        scales, biases = mx.split(mx.unflatten(of_groups, -1, (-1, 2)), 2, axis=-1)
        return (grouped * scales + biases).flatten(-2).astype(self._dtype)


KeyBias = Callable[[mx.array, mx.array], mx.array]
"""`bias(positions, heads)`, both (N,): what it adds to these heads of keys there, (N, D) float32.

With the rotary turn that keys have.
"""


class LessBias:
    """Rotated keys less what a bias adds to them, and for each its position and head.

    A key is R(p) (W x + b). Where b is a hundred times as large as W x, as in Qwen 2.5, codes of
    few bits hold little else. Its part of a score, q · R(p) b, needs no codes: R(p) b follows from
    the position, is subtracted before the rest is encoded, and added where that is decoded.

    Args:
        rest: the format of what remains, which gives float32.
        dtype: of decoded keys.
        num_heads: of keys.
        bias: see `KeyBias`.
    """

    as_stored = False
    place_bytes = mx.int32.size

    def __init__(self, rest: KVFormat, dtype: mx.Dtype, num_heads: int, bias: KeyBias) -> None:
        self.dim = rest.dim
        self.parts = [*rest.parts, (1, mx.int32)]  # position * num_heads + head
        self._rest = rest
        self._dtype = dtype
        self._num_heads = num_heads
        self._bias = bias

    def encode_at(self, keys: mx.array, positions: mx.array) -> list[mx.array]:
        """Keys (T, H, D) in the rotated basis, of tokens at `positions` (T,), to the parts."""
        places = positions[:, None, None] * self._num_heads + mx.arange(self._num_heads)[:, None]
        return [*self._rest.encode(keys.astype(mx.float32) - self._added(places)), places]

    def encode(self, vectors: mx.array) -> list[mx.array]:
        """Keys (T, H, D) of tokens at the first T positions."""
        return self.encode_at(vectors, mx.arange(vectors.shape[0]))

    def decode(self, parts: list[mx.array]) -> mx.array:
        """The parts (..., width) -> keys (..., D)."""
        *rest, places = parts
        return (self._rest.decode(rest) + self._added(places)).astype(self._dtype)

    def _added(self, places: mx.array) -> mx.array:
        """Places (..., 1) -> (..., D) in the rotated basis."""
        flat = places.flatten()
        added = mx.hadamard_transform(self._bias(flat // self._num_heads, flat % self._num_heads))
        return added.reshape(*places.shape[:-1], self.dim)


def stored_less_bias(spec: KVSpec, bits: Bits) -> bool:
    """Whether a layer stores its keys as `LessBias` does: where few bits hold them."""
    return spec.key_bias and bits[0] == 4


class Cut:
    """Some numbers of vectors that another format stores.

    Args:
        whole: the format of the vectors.
        first, dim: the first of these numbers, and how many there are.
    """

    def __init__(self, whole: KVFormat, first: int, dim: int) -> None:
        self.dim = dim
        self.as_stored = whole.as_stored
        self.parts = whole.parts
        self._whole = whole
        self._own = slice(first, first + dim)

    def encode(self, vectors: mx.array) -> list[mx.array]:
        """Whole vectors to the parts that the other format stores."""
        return self._whole.encode(vectors)

    def decode(self, parts: list[mx.array]) -> mx.array:
        """The parts of whole vectors (..., width) -> (..., dim)."""
        return self._whole.decode(parts)[..., self._own]


def make_format(dim: int, dtype: mx.Dtype, bits: int | None) -> KVFormat:
    """The format for `bits` bits a number; None: the activation dtype."""
    return Plain(dim, dtype) if bits is None else Affine(dim, dtype, bits)


def vector_bytes(fmt: KVFormat) -> int:
    """Bytes of one stored vector, scales and biases included."""
    return sum(width * dtype.size for width, dtype in fmt.parts)


def rotatable(dim: int) -> bool:
    """Whether mx.hadamard_transform may be given `dim`: others corrupt memory without an error."""
    return dim in ROTATABLE


def layer_formats(spec: KVSpec, dtype: mx.Dtype, bits: Bits) -> tuple[KVFormat, KVFormat]:
    """How a layer stores its keys and values."""
    assert bits[0] != 4 or rotatable(spec.key_dim), "refused before a cache is built"
    return make_format(spec.key_dim, dtype, bits[0]), make_format(spec.value_dim, dtype, bits[1])


def token_bytes(spec: PagedSpec, dtype: mx.Dtype, bits: Bits) -> int:
    """Bytes that one layer keeps of one token."""
    if isinstance(spec, LatentSpec):
        vector = make_format(spec.latent_dim + spec.rope_dim, dtype, bits[0])
        return vector_bytes(vector) + spec.index_dim * dtype.size
    if spec.joint_dim:
        return spec.num_kv_heads * vector_bytes(make_format(spec.joint_dim, dtype, bits[0]))
    place_bytes = LessBias.place_bytes if stored_less_bias(spec, bits) else 0
    vectors = sum(vector_bytes(fmt) for fmt in layer_formats(spec, dtype, bits))
    return spec.num_kv_heads * (vectors + place_bytes)


def lay_out(
    specs: Sequence[CacheSpec], options: KVOptions, *, key_bias: bool
) -> tuple[list[CacheSpec], list[Bits]]:
    """Specs and stored bits of every layer.

    Args:
        specs: what the model asks for.
        options: what the user asks for.
        key_bias: whether the model adds biases to its keys, also in layers that do not say which.

    Raises:
        InvalidRequestError: the options do not suit the model.
    """
    if any(isinstance(spec, OwnCacheSpec) for spec in specs):
        _check_own_caches(options)
        return list(specs), [PLAIN] * len(specs)
    windowed = [_as_one(_windowed(spec, options), options.bits) for spec in specs]
    if options.bits == PLAIN:
        return windowed, [PLAIN] * len(specs)
    paged = {i: spec for i, spec in enumerate(specs) if isinstance(spec, KVSpec | LatentSpec)}
    _check_bits(list(paged.values()), options.bits, key_bias)
    plain = {min(paged), max(paged)} if options.plain_ends and paged else set()
    if options.plain_windows:
        plain |= {i for i, spec in paged.items() if spec.window is not None}
    stored = paged.keys() - plain
    return windowed, [options.bits if i in stored else PLAIN for i in range(len(specs))]


def _windowed(spec: CacheSpec, options: KVOptions) -> CacheSpec:
    """A layer's own window stands where it is the smaller one, and its chunks; a state has none."""
    if isinstance(spec, StateSpec | OwnCacheSpec) or (isinstance(spec, KVSpec) and spec.chunked):
        return spec
    if options.window is None or (spec.window is not None and spec.window <= options.window):
        return spec
    if isinstance(spec, LatentSpec) and spec.index_dim:
        raise InvalidRequestError(
            f"kv_window is {options.window}, and this model chooses the tokens that it sees by "
            "itself, among all. Leave kv_window out.",
            param="kv_window",
        )
    return replace(spec, window=options.window, sinks=options.sinks)


def _as_one(spec: CacheSpec, bits: Bits) -> CacheSpec:
    """Keys and values stay in one vector where one format can hold both."""
    if not isinstance(spec, KVSpec) or not spec.turning or bits == PLAIN:
        return spec
    turning, dim = spec.turning, spec.value_dim
    rotatable_blocks = turning & (turning - 1) == 0 and dim % turning == 0 and turning >= 2
    if bits[0] != bits[1] or turning % 8 or (bits[0] == 4 and not rotatable_blocks):
        return replace(spec, turning=0)
    return spec


def _check_own_caches(options: KVOptions) -> None:
    asked = "kv_bits" if options.bits != PLAIN else "kv_window" if options.window else None
    if asked is not None:
        raise InvalidRequestError(
            f"{asked} is for models with keys and values in pages; this one keeps caches of "
            f"its own. Leave {asked} out.",
            param=asked,
        )


def _check_bits(specs: Sequence[PagedSpec], bits: Bits, key_bias: bool) -> None:
    known = all(isinstance(spec, KVSpec) and spec.key_bias for spec in specs)
    if bits[0] == 4 and key_bias and not known:
        raise InvalidRequestError(
            "kv_bits=4 stores keys in 4 bits, and this model adds biases to its keys that cannot "
            "be told apart from the rest, and may be too large for 4 bits beside it; use kv_bits=8 "
            "or kv_bits=(8, 4).",
            param="kv_bits",
        )
    for spec in specs:
        if isinstance(spec, LatentSpec):
            _check_latent_bits(spec, bits)
        else:
            _check_head_bits(spec, bits)


def _check_head_bits(spec: KVSpec, bits: Bits) -> None:
    if spec.key_dim % 8 or spec.value_dim % 8:
        raise InvalidRequestError(
            f"kv_bits needs head dims that are multiples of 8; this model has {spec.key_dim} "
            f"and {spec.value_dim}. Leave kv_bits out.",
            param="kv_bits",
        )
    if bits[0] == 4 and not rotatable(spec.key_dim):
        raise InvalidRequestError(
            f"kv_bits=4 rotates keys, which a head dim of {spec.key_dim} does not allow; use "
            "kv_bits=8 or kv_bits=(8, 4).",
            param="kv_bits",
        )


def _check_latent_bits(spec: LatentSpec, bits: Bits) -> None:
    """One vector holds keys and values; rotating it back takes a matrix that is its own inverse."""
    if bits[0] != bits[1]:
        raise InvalidRequestError(
            f"kv_bits is {bits}, and this model keeps keys and values in one latent vector; give "
            "one number, kv_bits=8 or kv_bits=4.",
            param="kv_bits",
        )
    if (spec.latent_dim + spec.rope_dim) % 8:
        raise InvalidRequestError(
            f"kv_bits needs latent vectors of a multiple of 8 numbers; this model has "
            f"{spec.latent_dim + spec.rope_dim}. Leave kv_bits out.",
            param="kv_bits",
        )
    if bits[0] == 4 and (spec.latent_dim & (spec.latent_dim - 1) or not rotatable(spec.latent_dim)):
        raise InvalidRequestError(
            f"kv_bits=4 rotates latent vectors, which {spec.latent_dim} numbers do not allow (a "
            "power of two would); use kv_bits=8.",
            param="kv_bits",
        )
