"""Keys and values of one layer in one vector a token and head. Knows slots; no sequences.

D = numbers of a key and of a value, t = numbers of a key that turn, H = KV heads, T = tokens.

Where a layer takes its keys for values too (the layers of Gemma 4 that see everything), a key is
its value but for the numbers that turn with its position: pairs (i, i + D / 2), i < t / 2. Then a
vector holds the value's numbers at the places that turn (t), its other numbers (D - t), and the
key's numbers that turn (t). Its first D numbers are the value and its last D the key, each with its
numbers in an order of its own, which queries are given and outputs are brought back from. At D 512
and t 128 that is 640 numbers in place of 1,024, and nothing is computed anew when it is read.
"""

import mlx.core as mx
import numpy as np

from ..core import KVSpec
from .formats import PLAIN, Bits, make_format
from .pool import PagePool, Stored


class JointPool(PagePool):
    """Pages and tails of a layer that keeps key and value in one vector: one plane.

    With 4 bits blocks of t numbers are multiplied by a Hadamard matrix before they are stored:
    outliers of single channels are spread over all of a block. The matrix is its own inverse, as
    `lay_out` allows powers of two only.
    """

    def __init__(
        self,
        spec: KVSpec,
        *,
        page_size: int,
        num_pages: int,
        num_slots: int,
        dtype: mx.Dtype,
        bits: Bits = PLAIN,
    ) -> None:
        dim, turning = spec.value_dim, spec.turning
        assert spec.key_dim == dim > turning > 0
        assert bits[0] == bits[1], "laid out apart"
        super().__init__(
            [make_format(spec.joint_dim, dtype, bits[0])],
            heads=spec.num_kv_heads,
            joined=False,
            page_size=page_size,
            num_pages=num_pages,
            num_slots=num_slots,
        )
        (plane,) = self.planes
        self.keys, self.values = plane.cut(turning, dim), plane.cut(0, dim)
        self.form = ("joint", spec.num_kv_heads, dim, turning, bits)
        self._fmt = plane.fmt
        self._block = turning if bits[0] == 4 else 0
        self._dim = dim
        turns = np.arange(dim) % (dim // 2) < turning // 2
        turning_places, others = np.flatnonzero(turns), np.flatnonzero(~turns)
        value_order = np.concatenate([turning_places, others])
        self._value_order = mx.array(value_order)
        self._turning_places = mx.array(turning_places)
        self._key_order = mx.array(np.concatenate([others, turning_places]))
        self._places = mx.array(np.argsort(value_order))  # of values as they are

    def encode(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        positions: mx.array | None = None,
    ) -> tuple[mx.array, Stored]:
        """What is stored of keys and values (T, H, D), and queries in the order of stored keys.

        Args:
            queries, keys, values: as the layer makes them.
            positions: not needed.
        """
        vectors = mx.concatenate(
            [
                mx.take(values, self._value_order, axis=-1),
                mx.take(keys, self._turning_places, axis=-1),
            ],
            axis=-1,
        )
        return self.rotate(queries), [self._fmt.encode(self._spread(vectors))]

    def rotate(self, heads: mx.array) -> mx.array:
        """Queries (T, heads, D) in the order and the basis of stored keys."""
        return self._spread(mx.take(heads, self._key_order, axis=-1))

    def restored(self, outputs: mx.array) -> mx.array:
        """Sums of stored values (T, heads * D) in the order and the basis of values."""
        by_head = self._spread(mx.unflatten(outputs, -1, (-1, self._dim)))
        return mx.flatten(mx.take(by_head, self._places, axis=-1), -2)

    def _spread(self, vectors: mx.array) -> mx.array:
        """To or from the basis in which vectors are stored."""
        if not self._block:
            return vectors
        return mx.hadamard_transform(mx.unflatten(vectors, -1, (-1, self._block))).flatten(-2)

    def read_tails(self, slots: mx.array | slice) -> tuple[mx.array, mx.array]:
        """Keys and values (B, H, 2 * P, D) of the tails `slots` (B,)."""
        parts = [part[slots] for part in self.keys.own_tails()]
        vectors = self._fmt.decode(parts)
        return vectors[..., -self._dim :], vectors[..., : self._dim]
