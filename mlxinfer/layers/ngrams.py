"""N-gram embeddings (Engram, arXiv 2601.07372): a token adds rows of a table that its n-grams name.

The table has more rows than memory holds, and stays in its files. The tokens of a step decide which
rows it reads. So rows are read on the host, once the step before has sampled. Until then the step
is built with an empty array in their place. See `Step.on_host`.

T = tokens of the step, B = sequences of a part, L = tokens of each, n = tokens of the longest
n-gram, K = rows of a token, s = streams.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..cache_specs import StateSpec
from ..metal_kernels.variants import KernelUse, ModelForm
from .attention import Mixer
from .linear import Projection
from .norm import Norm
from .recurrent import CausalConv
from .step import Arrays, PlaceStates, ReadStates, Step

LEAST_GATE = 1e-6

Int64s = NDArray[np.int64]


class RowTable(Protocol):
    """A table in files."""

    row_bytes: int

    def read(self, rows: Int64s, memory: memoryview) -> None:
        """Fill memory (N * row_bytes) with rows (N,), as they are stored.

        Raises:
            CheckpointError: a file became shorter, or its disk fails.
        """

    def decode(self, stored: mx.array) -> mx.array:
        """Rows as they are stored, (N, row_bytes) uint8 -> (N, width)."""


@dataclass(frozen=True, slots=True)
class NgramHash:
    """The rows that the n-grams of a token name: of pairs, of triples, and so on.

    A row is the remainder of a sum without carries over id * multiplier, plus an offset.

    Attributes:
        multipliers: (n,) of the token's own id, of the one before it, and so on.
        sizes, offsets: (n - 1, rows of an n-gram) rows of each part of the table, and its first.
        end_id: the id that ends a text. It stands for all tokens before it, and before the first.
    """

    multipliers: Int64s
    sizes: Int64s
    offsets: Int64s
    end_id: int

    def __call__(self, windows: NDArray[np.int32]) -> Int64s:
        """Windows (T, n) of `TokenWindow` -> rows (T, K)."""
        ids = windows.astype(np.int64) - 1
        ids[ids < 0] = self.end_id
        ended = np.zeros(len(ids), np.bool_)
        for place in range(1, ids.shape[1]):
            ended |= ids[:, place] == self.end_id
            ids[ended, place] = self.end_id
        products = ids * self.multipliers
        mixed = np.bitwise_xor.accumulate(products, axis=1)[:, 1:, None]  # (T, n - 1, 1)
        rows: Int64s = mixed % self.sizes + self.offsets
        return rows.reshape(len(ids), -1)


@dataclass(slots=True, eq=False)
class TokenWindow(Mixer):
    """The ids of a token and of the n - 1 before it in its sequence."""

    spec: StateSpec  # of one state, (n - 1,) ids plus 1; 0: there is no token

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return []

    def __call__(self, ids: mx.array, step: Step, residual: Any = None) -> mx.array:
        """ids (T,) int32 -> (T, n) ids plus 1, the token's own first; 0: there is none."""
        windows: mx.array = step.caches[self].recur([ids[:, None] + 1], self._advance)
        return windows

    def _advance(
        self, inputs: Arrays, read: ReadStates, place: PlaceStates
    ) -> tuple[mx.array, Arrays]:
        (before,), lengths = read()
        ids, count = inputs[0][..., 0], before.shape[1]
        seen, length = mx.concatenate([before, ids], axis=1), ids.shape[1]
        firsts = range(count, -1, -1)
        windows = mx.stack([seen[:, at : at + length] for at in firsts], axis=-1)  # (B, L, n)
        if lengths is None:
            return windows, [seen[:, length:]]
        places = lengths[:, None] + mx.arange(count)
        return windows, [mx.take_along_axis(seen, places, axis=1)]


@dataclass(slots=True, eq=False)
class CausalFilter(Mixer):
    """A causal depthwise convolution, then silu."""

    conv: CausalConv  # over the channels; a dilated one has zeros between its taps
    spec: StateSpec  # of one state, the convolution's

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return []

    def __call__(self, x: mx.array, step: Step, residual: Any = None) -> mx.array:
        """x (T, channels) to the same shape."""
        filtered: mx.array = step.caches[self].recur([x], self._advance)
        return filtered

    def _advance(
        self, inputs: Arrays, read: ReadStates, place: PlaceStates
    ) -> tuple[mx.array, Arrays]:
        (before,), lengths = read()
        y, after = self.conv.step().in_mlx([inputs[0], *self.conv], before, lengths)
        return y, [after]


class NgramLayer:
    """Adds the values of a token's n-grams to each stream that asks for them.

    Args:
        key_proj: of a token's rows side by side -> (T, s * hidden), a key for each stream.
        value_proj: of the same -> (T, hidden).
        norms: over each stream (T, s, hidden), of keys, of the streams, and before `conv`.
        conv: over the values of all streams side by side.
    """

    __slots__ = ("conv", "hashing", "key_proj", "norms", "table", "value_proj", "window")

    def __init__(
        self,
        *,
        window: TokenWindow,
        hashing: NgramHash,
        table: RowTable,
        key_proj: Projection,
        value_proj: Projection,
        norms: Sequence[Norm],
        conv: CausalFilter,
    ) -> None:
        self.window = window
        self.hashing = hashing
        self.table = table
        self.key_proj = key_proj
        self.value_proj = value_proj
        self.norms = tuple(norms)
        self.conv = conv

    @property
    def parts(self) -> Sequence[Mixer]:
        return self.window, self.conv

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return []

    def __call__(self, x: mx.array, step: Step) -> mx.array:
        """Streams x (T, s * hidden) -> the values to add to them, of that shape."""
        embedded = self._embeddings(step)
        values = self.value_proj(embedded)  # (T, hidden)
        norm_key, norm_query, norm_conv = self.norms
        by_stream = -1, x.shape[-1] // values.shape[-1], values.shape[-1]
        keys = norm_key(self.key_proj(embedded).reshape(by_stream))
        queries = norm_query(x.reshape(by_stream))
        scores = (keys * queries).sum(axis=-1, keepdims=True) * values.shape[-1] ** -0.5
        gates = mx.sqrt(mx.maximum(mx.abs(scores), LEAST_GATE)) * mx.sign(scores)
        gated = mx.sigmoid(gates) * values[:, None]  # (T, s, hidden)
        local = self.conv(norm_conv(gated).flatten(-2), step)
        return gated.flatten(-2) + local.astype(gated.dtype)

    def _embeddings(self, step: Step) -> mx.array:
        """The rows of each token side by side, (T, K * width)."""
        assert step.ids is not None
        windows, table, hashing = self.window(step.ids, step), self.table, self.hashing
        count = hashing.sizes.size
        stored = mx.array(np.zeros((len(windows) * count, table.row_bytes), np.uint8))

        def fill() -> None:
            table.read(hashing(np.array(windows)).ravel(), memoryview(stored).cast("B"))  # type: ignore[arg-type]  # it is a buffer

        step.on_host(fill)
        return table.decode(stored).reshape(len(windows), -1)
