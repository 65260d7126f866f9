"""Attention layers that keep keys and values of each token, apart or in one vector.

T = tokens, H = KV heads, D = numbers of a key, V = numbers of a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from ..cache_specs import KVSpec
from ..config import KVOptions
from ..errors import InvalidRequestError
from ..metal_kernels.attention_cases import PAGED, PAIRS, PREFILL, AttentionForm
from ..metal_kernels.attention_heads import MAX_DIM, Heads, has_joint
from ..metal_kernels.attention_plan import (
    MAX_QUERIES,
    AttentionPlan,
    threadgroup_shape,
    tile_queries,
)
from ..metal_kernels.kv_write import kv_write
from ..metal_kernels.paged_attention import (
    MAX_ROWS,
    AttentionCall,
    Softmax,
    arrays_of,
    has_dims,
    paged_attention,
)
from ..metal_kernels.prompt_attention import is_fused
from ..metal_kernels.stored import Affine, Plane
from ..metal_kernels.tail_write import write_tails
from ..metal_kernels.variants import KERNEL, Variant
from .attention import Prepared
from .inputs import Ints
from .paged import KEY_BIAS, Choice, Formats, GroupKey, PagedLayer, Stored, unrotated

ROTATABLE = frozenset(m * 2**k for m in (1, 12, 20, 28) for k in range(1, 10))


def rotatable(dim: int) -> bool:
    """Whether mx.hadamard_transform may be given `dim`: others corrupt memory without an error."""
    return dim in ROTATABLE


@dataclass(frozen=True, kw_only=True)
class LessBias(Affine):
    """Rotated keys without the part that a bias adds, and for each key its positions and head.

    A key is R(p) (W x + b). If b is a hundred times as large as W x, as in Qwen 2.5, codes of few
    bits hold little besides b. But R(p) b follows from the position alone and needs no codes. So it
    is subtracted before the rest is encoded, and added again when that is decoded.
    """

    num_heads: int  # of keys
    num_axes: int  # positions by which a key rotates: 3 with M-RoPE, else 1
    layer: PagedLayer  # says what the bias adds

    names: ClassVar[tuple[str, ...]] = (*Affine.names, "places")
    in_kernels: ClassVar[bool] = False

    def parts(self, dim: int, dtype: mx.Dtype) -> list[tuple[int, mx.Dtype]]:
        """See `Affine`, and position * num_heads + head, then the positions on other axes."""
        return [*super().parts(dim, dtype), (self.num_axes, mx.int32)]

    def encode_at(self, keys: mx.array, positions: mx.array) -> list[mx.array]:
        """Keys (T, H, D) in the rotated basis, of tokens at `positions`, to the parts.

        `positions`: (T,), or (num_axes, T).
        """
        axes = mx.broadcast_to(positions, (self.num_axes, len(keys)))
        first, *later = axes[:, :, None]  # (T, 1) each
        parts = [first * self.num_heads + mx.arange(self.num_heads), *later]
        places = mx.stack(list(mx.broadcast_arrays(*parts)), axis=-1)  # (T, H, num_axes)
        return [*self.encode(keys.astype(mx.float32) - self._added(places)), places]

    def decode(self, parts: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        """The parts (..., width) -> keys (..., D)."""
        *rest, places = parts
        return (super().decode(rest, mx.float32) + self._added(places)).astype(dtype)

    def _added(self, places: mx.array) -> mx.array:
        """Places (..., num_axes) -> (..., D) in the rotated basis."""
        first, *later = places.reshape(-1, self.num_axes).T
        positions = first // self.num_heads
        if later:
            positions = mx.stack([positions, *later])
        added = self.layer.bias(positions, first % self.num_heads)
        return mx.unflatten(mx.hadamard_transform(added), 0, places.shape[:-1])


class KeyValueLayer(PagedLayer):
    """Keys and values of one attention layer, each in vectors of their own.

    Quantised keys are rotated by a Hadamard matrix before they are stored, and queries with them:
    keys of 4 bits always. Keys of 8 bits are, unless a bias would be spread over all of their
    numbers, their number does not allow it, or a vector holds a value too. Values of 4 bits are
    rotated where the matrix is its own inverse, and what attention gives is rotated back.

    Attributes:
        subtracts_bias: keys are stored as `LessBias` stores them: where few bits hold them.
    """

    spec: KVSpec
    prepared: Prepared
    _less_bias: LessBias

    def __init__(self, spec: KVSpec, formats: Formats, dtype: mx.Dtype) -> None:
        keys, values = formats
        assert not keys.rotates or rotatable(spec.key_dim), "refused before a cache is built"
        self.subtracts_bias = spec.key_bias and keys.rotates
        if self.subtracts_bias:
            keys = self._less_bias = LessBias(
                keys.bits, num_heads=spec.num_kv_heads, num_axes=spec.rope_axes, layer=self
            )
        self._rotates_values = values.rotates_values(spec.value_dim)
        joined = spec.key_dim == spec.value_dim and keys == values
        kinds = [(keys, spec.key_dim), (values, spec.value_dim)]
        super().__init__(spec, formats, dtype, kinds, heads=spec.num_kv_heads, joined=joined)
        self.form = (spec.num_kv_heads, spec.key_dim, spec.value_dim, formats)
        self._as_they_are = not keys.bits and not values.bits

    @classmethod
    def of(cls, spec: KVSpec, formats: Formats, dtype: mx.Dtype) -> "KeyValueLayer":
        """Keys and values in one vector where one format can hold both, else apart."""
        rope_dims, dim, fmt = spec.rope_dims, spec.value_dim, formats[0]
        blocks = rope_dims & (rope_dims - 1) == 0 and rope_dims >= 2 and dim % rope_dims == 0
        in_one = rope_dims > 0 and fmt == formats[1] and (not fmt.bits or rope_dims % 8 == 0)
        if spec.key_bias or in_one or not rotatable(spec.key_dim):
            formats = unrotated(formats)
        if in_one and (blocks or not formats[0].rotates):
            return JointLayer(spec, formats, dtype)
        return KeyValueLayer(replace(spec, rope_dims=0), formats, dtype)

    @staticmethod
    def windowed(spec: KVSpec, options: KVOptions) -> KVSpec:
        """The spec, which has no window, with the one that is asked for.

        Raises:
            InvalidRequestError: scores have a bias by distance, of tokens that follow each other.
        """
        if spec.relative:
            raise InvalidRequestError(
                f"kv_window is {options.window}, and layers of this model weigh tokens by their "
                "distance, none left out. Leave kv_window out.",
                param="kv_window",
            )
        return replace(spec, window=options.window, sinks=options.sinks)

    @staticmethod
    def check(spec: KVSpec, formats: Formats, *, key_bias: bool) -> None:
        """Raise InvalidRequestError where the layer cannot be stored in these formats.

        `key_bias`: the model adds biases to its keys.
        """
        if formats[0].bits == 4 and key_bias and not spec.key_bias:
            raise InvalidRequestError(KEY_BIAS, param="kv_bits")
        if spec.key_dim % 8 or spec.value_dim % 8:
            raise InvalidRequestError(
                f"kv_bits needs head dims that are multiples of 8; this model has {spec.key_dim} "
                f"and {spec.value_dim}. Leave kv_bits out.",
                param="kv_bits",
            )
        if formats[0].bits == 4 and not rotatable(spec.key_dim):
            raise InvalidRequestError(
                f"kv_bits=4 rotates keys, which a head dim of {spec.key_dim} does not allow; use "
                "kv_bits=8 or kv_bits=(8, 4).",
                param="kv_bits",
            )

    def take_from(self, mixer: Any) -> None:
        """See `PagedLayer`: the bias of keys."""
        if self.subtracts_bias:
            self.bias = mixer.turned_bias

    @property
    def group_key(self) -> GroupKey:
        return self.spec.window or 0, self.spec.sinks, self.spec.chunked, self.spec.sees_spans

    # -- a step ---------------------------------------------------------------------------------

    def attend_heads(self, qkv: mx.array, softmax: Softmax, rows: Ints | None) -> mx.array:
        """Norm, rope and storage format in one kernel, then as `attend`.

        `qkv`: the fused projection (T, (num_heads + 2 * num_kv_heads) * head_dim).
        """
        prepared, heads, place = self.prepared, self.step_head_writer, self.prepared.place
        assert heads is not None
        assert place.positions is not None
        if self.writes_tails and place.is_decode:
            marks = place.marks(self.num_slots)
            queries, *tails = write_tails(qkv, place.positions, heads, *marks, self.tail_parts())
            self.replace_tails(tails)
        else:
            queries, stored = kv_write(qkv, place.positions, heads)
            self.write(stored, place, prepared.page_writes)
        if rows is not None:
            queries = queries[mx.array(rows)]
        return self.restored(prepared.of_rows(rows).attend(self, queries, softmax))

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        softmax: Softmax,
        choice: Choice | None = None,
        *,
        rows: Ints | None = None,
    ) -> mx.array:
        """Store keys and values, then attend over all that each token may see.

        Writing comes first, because a view that exists already would make the write a copy.

        Args:
            queries: (T, num_heads, key_dim), position-encoded.
            keys: (T, num_kv_heads, key_dim), position-encoded.
            values: (T, num_kv_heads, value_dim).
            choice: of the blocks that each token sees; None: it sees all before it.
            rows: (R,) that attend, in ascending order, the last ones of their sequences; None: all.

        Returns:
            (R, num_heads * value_dim), the heads side by side.
        """
        prepared = self.prepared
        stored = [[keys], [values]] if self._as_they_are else self.encode(keys, values)
        self.write(stored, prepared.place, prepared.page_writes)
        if self._as_they_are and choice is None and rows is None:
            return prepared.attend(self, queries, softmax)
        if choice is not None:
            outputs = self.restored(choice.attend(self, self.rotate(queries), softmax))
            return outputs if rows is None else outputs[mx.array(rows)]
        if rows is not None:
            queries = queries[mx.array(rows)]
        return self.attend_again(queries, softmax, rows)

    def attend_again(self, queries: mx.array, softmax: Softmax, rows: Ints | None) -> mx.array:
        """Queries (R, heads, D) of `rows` over what this step has stored."""
        prepared = self.prepared.of_rows(rows)
        return self.restored(prepared.attend(self, self.rotate(queries), softmax))

    def encode(self, keys: mx.array, values: mx.array) -> Stored:
        """Encode keys and values (T, H, D) as they are stored."""
        key_format, value_format = self.formats
        keys, values = self.rotate(keys), self.rotate_values(values)
        if not self.subtracts_bias:
            return [key_format.encode(keys), value_format.encode(values)]
        place = self.prepared.place
        positions = place.axes if place.positions is None else place.positions[: len(keys)]
        assert positions is not None
        stored = self._less_bias.encode_at(keys, positions)
        return [stored, value_format.encode(values)]

    def rotate(self, heads: mx.array) -> mx.array:
        """Queries or keys (T, H, D) in the basis of stored keys."""
        return mx.hadamard_transform(heads) if self.formats[0].rotates else heads

    def rotate_values(self, values: mx.array) -> mx.array:
        return mx.hadamard_transform(values) if self._rotates_values else values

    def restored(self, outputs: mx.array) -> mx.array:
        """Outputs of attention over stored values (T, heads * V), in the basis of the values."""
        if not self._rotates_values:
            return outputs
        by_head = mx.unflatten(outputs, -1, (-1, self.spec.value_dim))
        return mx.hadamard_transform(by_head).flatten(-2)

    # -- kernels --------------------------------------------------------------------------------

    def attention_variants(self, mixer: Any) -> dict[int, Variant]:
        """See `PagedLayer`.

        Numbers that share a threadgroup share the compiled kernel, and so the variant.
        """
        if self.spec.chunked or self.spec.relative or not self._in_kernels:
            return {}
        form, itemsize = self._form(mixer), self.dtype.size
        shapes = {
            count: threadgroup_shape(form.group * count, **self._dims, itemsize=itemsize)
            for count in range(1, MAX_QUERIES + 1)
            if form.group * count <= MAX_ROWS
        }
        most = {shape: count for count, shape in shapes.items()}
        return {
            count: replace(form, queries=most[shape]).variant(PAGED)
            for count, shape in shapes.items()
        }

    def prefill_variant(self, mixer: Any) -> Variant | None:
        """See `PagedLayer`: attention in tiles, unless MLX has fused attention for what is stored.

        Quantised keys may use it too: for MLX's attention all of them are decoded at once.
        """
        form = self._form(mixer)
        has_kernel = self._in_kernels and tile_queries(form.group, **self._dims)
        plain = not any(fmt.bits for fmt in self.formats)
        fused = plain and self.spec.window is None and is_fused(*self._dims.values())
        if fused or not has_kernel or self.spec.relative:
            return None
        return form.variant(PREFILL)

    def heads_of(self, mixer: Any) -> Heads | None:
        dim, joint = self.spec.key_dim, self.spec.rope_dims
        if not self._formats_in_kernels or mixer.make_heads is None:
            return None
        if dim != self.spec.value_dim or dim % 8 or dim > MAX_DIM:
            return None
        if joint and not has_joint(dim, joint, self.formats):
            return None
        heads: Heads = mixer.make_heads(*self.formats, joint)
        return heads

    @property
    def _dims(self) -> dict[str, int]:
        return {"key_dim": self.spec.key_dim, "value_dim": self.spec.value_dim}

    @property
    def _formats_in_kernels(self) -> bool:
        return all(fmt.in_kernels for fmt, _ in self._kinds)

    @property
    def _in_kernels(self) -> bool:
        dims = self.spec.key_dim, self.spec.value_dim
        return self._formats_in_kernels and has_dims(self.dtype, dims, self.spec.joint_dim)

    def _form(self, mixer: Any) -> AttentionForm:
        return AttentionForm(
            self.dtype,
            self.spec.key_dim,
            self.spec.value_dim,
            group=mixer.num_heads // self.spec.num_kv_heads,
            key_format=self.formats[0],
            value_format=self.formats[1],
            sink_logits=mixer.sinks is not None,
            joint_dim=self.spec.joint_dim,
        )

    def kernel(self, queries: mx.array, plan: AttentionPlan, softmax: Softmax) -> AttentionCall:
        load = plan.max_queries, plan.num_spans
        pairs = not plan.is_prefill and self.fastest(*load, (KERNEL, PAIRS)) == PAIRS
        arguments = queries, self.keys, self.values, plan, softmax
        return paged_attention(*arguments, value_dim=self.values.read_dim, pairs=pairs)

    def kernel_arrays(self) -> list[mx.array]:
        return arrays_of(self.keys, self.values)


class JointLayer(KeyValueLayer):
    """Key and value in one vector for each token and head: one plane.

    D = numbers of a key and of a value, t = numbers of a key that rotate with its position.

    Some layers use their keys as values too (those of Gemma 4 that see everything). Then a key
    differs from its value only in the numbers that rotate: pairs (i, i + D / 2), i < t / 2. A
    vector has three parts: the value's numbers at the places that rotate (t), its other numbers
    (D - t), and the key's numbers that rotate (t). Its first D numbers are the value and its last D
    the key. Both have an order of their own: queries are brought into it, and outputs back out of
    it. At D 512 and t 128 a vector has 640 numbers instead of 1,024, and reading computes nothing.

    With 4 bits, blocks of t numbers are multiplied by a Hadamard matrix before they are stored.
    This spreads outliers of single channels over the whole block. The matrix is its own inverse,
    because `KeyValueLayer.of` allows powers of two only.
    """

    def __init__(self, spec: KVSpec, formats: Formats, dtype: mx.Dtype) -> None:
        dim, rope_dims = spec.value_dim, spec.rope_dims
        assert spec.key_dim == dim > rope_dims > 0
        self.subtracts_bias = self._as_they_are = self._rotates_values = False
        kinds = [(formats[0], spec.joint_dim)]
        PagedLayer.__init__(self, spec, formats, dtype, kinds, heads=spec.num_kv_heads)
        self.form = ("joint", spec.num_kv_heads, dim, rope_dims, formats)
        self._block = rope_dims if formats[0].rotates else 0
        self._dim, self._rope_dims = dim, rope_dims
        is_rotated = np.arange(dim) % (dim // 2) < rope_dims // 2
        rotated, others = np.flatnonzero(is_rotated), np.flatnonzero(~is_rotated)
        value_order = np.concatenate([rotated, others])
        self._value_order = mx.array(value_order)
        self._rotated = mx.array(rotated)
        self._key_order = mx.array(np.concatenate([others, rotated]))
        self._places = mx.array(np.argsort(value_order))  # of values as they are

    def views(self) -> tuple[Plane, Plane]:
        """Keys are the last D numbers of a vector, and values the first."""
        return self.planes[0].cut(self._rope_dims, self._dim), self.planes[0].cut(0, self._dim)

    def encode(self, keys: mx.array, values: mx.array) -> Stored:
        parts = [mx.take(values, self._value_order, axis=-1), mx.take(keys, self._rotated, axis=-1)]
        return [self.formats[0].encode(self._spread(mx.concatenate(parts, axis=-1)))]

    def rotate(self, heads: mx.array) -> mx.array:
        """Queries (T, heads, D) in the order and the basis of stored keys."""
        return self._spread(mx.take(heads, self._key_order, axis=-1))

    def restored(self, outputs: mx.array) -> mx.array:
        """Sums of stored values (T, heads * D) in the order and the basis of values."""
        by_head = self._spread(mx.unflatten(outputs, -1, (-1, self._dim)))
        return mx.flatten(mx.take(by_head, self._places, axis=-1), -2)

    def _spread(self, vectors: mx.array) -> mx.array:
        if not self._block:
            return vectors
        return mx.hadamard_transform(mx.unflatten(vectors, -1, (-1, self._block))).flatten(-2)
