"""How one layer treats the heads of its fused QKV projection: settings and arrays made once.

Knows no kernel. D = head_dim, H = query heads, K = KV heads.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .launch import MIN_NUMBERS
from .stored import PLAIN, KVFormat, group_size
from .variants import Form

MAX_DIM = 512
HADAMARD_ORDERS = (28, 20, 12, 1)


@dataclass(frozen=True, slots=True, eq=False)
class HeadsForm(Form):
    """The form that one launch serves: layers of equal form differ in arrays and scalars alone.

    Attributes:
        num_heads, num_kv_heads, head_dim: H, K and D; D a multiple of 8, up to 512.
        key_format, value_format: how they are stored. Keys of a format that rotates are multiplied
            by a Hadamard matrix (D as `hadamard_order` knows), and queries too; values as
            `rotates_values` says. With `joint` all are, in blocks of `joint` numbers.
        rope_dims: leading dims of a head that rope rotates; 0: none.
        traditional: pairs are neighbours, not half of the rotated dims apart.
        joint: numbers of a key that are stored behind its value, in one vector (see
            `cache.keys_values.JointLayer`); 0: they are apart. As `has_joint` says.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    key_format: KVFormat = PLAIN
    value_format: KVFormat = PLAIN
    norm: bool = False
    norms_values: bool = False
    rope_dims: int = 0
    traditional: bool = False
    joint: int = 0

    @property
    def width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def hadamard_order(self) -> int:
        """The size of the matrix that keys or values are multiplied by; 0: there is none."""
        rotates = self.key_format.rotates or self.rotates_values
        return hadamard_order(self.joint or self.head_dim) if rotates else 0

    @property
    def rotates_values(self) -> bool:
        if self.joint:
            return self.key_format.rotates
        return self.value_format.rotates_values(self.head_dim)

    @property
    def joined(self) -> bool:
        return not self.joint and self.key_format == self.value_format

    @property
    def stored_dim(self) -> int:
        return self.head_dim + self.joint

    @property
    def num_stored(self) -> int:
        return 2 * self.num_kv_heads if self.joined else self.num_kv_heads

    @property
    def in_one(self) -> bool:
        return self.joined or self.joint > 0


class Heads:
    """How the heads of a layer are treated.

    Args:
        norm_weight: (H + K, D) or (D,) of the RMS norm of queries and keys; None: no norm.
        frequencies: (rope_dims / 2,) float32 radians a token of the pairs of the leading dims that
            rotate; None: there is no rope.
    """

    def __init__(
        self,
        form: HeadsForm,
        *,
        norm_weight: mx.array | None = None,
        norm_eps: float = 0.0,
        frequencies: mx.array | None = None,
        magnitude: float = 1.0,
    ) -> None:
        assert form.head_dim % 8 == 0, form
        assert form.head_dim <= MAX_DIM, form
        assert form.norm == (norm_weight is not None), form
        assert form.rope_dims == (0 if frequencies is None else 2 * len(frequencies)), form
        assert form.rope_dims <= form.head_dim, form
        assert form.hadamard_order or not form.key_format.rotates, form
        formats = form.key_format, form.value_format
        assert not form.joint or has_joint(form.head_dim, form.joint, formats), form
        self.form = form
        self.norm_weight, self.norm_eps = norm_weight, norm_eps
        self.frequencies, self.magnitude = frequencies, magnitude
        self.constants = self._constants()  # as kv_write.metal reads them
        mx.eval(self.constants)

    def _constants(self) -> mx.array:
        """Scalars, weights, frequencies and signs, float32; see `MIN_NUMBERS`."""
        form = self.form
        scale = np.float32(1) / np.sqrt(np.float32(form.joint or form.head_dim))
        parts = [mx.array([self.norm_eps, self.magnitude, float(scale)])]
        if self.norm_weight is not None:
            shape = (form.num_heads + form.num_kv_heads, form.head_dim)
            parts.append(mx.broadcast_to(self.norm_weight, shape).flatten())
        if self.frequencies is not None:
            parts.append(self.frequencies)
        if form.hadamard_order:
            parts.append(hadamard_signs(form.hadamard_order).flatten())
        numbers = mx.concatenate([part.astype(mx.float32) for part in parts])
        return mx.pad(numbers, (0, max(MIN_NUMBERS - len(numbers), 0)))


def has_joint(dim: int, joint: int, formats: tuple[KVFormat, KVFormat]) -> bool:
    """Whether there is a kernel for vectors of a value, and `joint` numbers of its key behind it.

    Lanes hold equally many numbers, blocks are whole, and so are groups of codes of either part.
    """
    group = group_size(dim + joint) if formats[0].bits else 1
    return formats[0] == formats[1] and not any((dim % 32, dim % joint, dim % group, joint % group))


def hadamard_order(dim: int) -> int:
    """M where `dim` is M times a power of two from 2 up, M of 28, 20, 12 or 1; 0: nowhere."""
    for order in HADAMARD_ORDERS:
        rest = dim // order
        if dim % order == 0 and rest >= 2 and rest & (rest - 1) == 0:
            return order
    return 0


def hadamard_signs(order: int) -> mx.array:
    """(order, order) int8: +1 and -1 of MLX's transform; row: input, column: output."""
    doubled = mx.hadamard_transform(mx.eye(2 * order), scale=1.0, stream=mx.cpu)
    signs: mx.array = doubled[::2, ::2].astype(mx.int8)
    return signs
