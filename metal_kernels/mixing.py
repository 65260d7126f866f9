"""The weights of a connection between residual streams in one dispatch, and its plain-MLX twin.

T = tokens, n = streams. A token has n weights with which a block reads the streams, n with which
they take its output, and a matrix (n, n) that mixes them. Rows and columns of the matrix are made
to sum to about 1 by dividing by their sums in turn (Sinkhorn-Knopp): in plain MLX some hundred
small operations, one after the other. All is float32. Knows no layer.
Source: manifold-constrained hyper-connections, arXiv 2512.24880.
"""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from .launch import Launch, MetalKernel
from .variants import Case, Form, Kind, Variant, launch_of

STREAMS = (2, 4)  # whose squares are lanes of a SIMD group that shuffles reach
TOKENS = 8  # of a threadgroup
ROUNDING = 2e-5  # of weights up to 2, after divisions in turn

Weights = tuple[mx.array, mx.array, mx.array]


@dataclass(frozen=True, slots=True, eq=False)
class Mixing(Form):
    """How weights follow from logits."""

    num_streams: int  # n
    rounds: int  # in which columns are divided by their sums; before each but the first, rows are
    eps: float  # added to weights and sums, so that nothing is divided by 0
    # None: as in DeepSeek V4. Else as in Xing 4.0: the matrix' logits stay within +-limit, eps is
    # added to sums alone, and a row of logits has what one stream takes, not gives.
    limit: float | None = None

    @property
    def has_kernel(self) -> bool:
        return self.num_streams in STREAMS

    @property
    def variant(self) -> Variant:
        return Variant.from_form("mixing", self)

    def launch(self, num_tokens: int) -> Launch:
        assert self.has_kernel, self
        n = self.num_streams
        return Launch(
            _kernel(self),
            template=[("N", n), ("ROUNDS", self.rounds), ("LIMITED", self.limit is not None)],
            grid=(num_tokens * n * n, 1, 1),
            threadgroup=(min(num_tokens, TOKENS) * n * n, 1, 1),
            output_shapes=[(num_tokens, n), (num_tokens, n), (num_tokens, n, n)],
            output_dtypes=[mx.float32] * 3,
        )


def mixing(logits: mx.array, form: Mixing) -> Weights:
    """One dispatch.

    Args:
        logits: (T, n + n + n * n) float32, of the weights in this order.

    Returns:
        Weights to read with (T, n) and to write with (T, n), and the matrix (T, n, n): row i says
        what stream i takes of each stream.
    """
    read, write, matrix = launch_of(form, logits.shape[0])([logits])
    return read, write, matrix


def mixing_twin(logits: mx.array, form: Mixing) -> Weights:
    n, eps = form.num_streams, form.eps
    read, write, inner = mx.split(logits, [n, 2 * n], axis=-1)
    inner, rounds = mx.unflatten(inner, -1, (n, n)), form.rounds
    if form.limit is None:
        read, rounds = mx.sigmoid(read) + eps, rounds - 1
        matrix = mx.softmax(inner, axis=-1) + eps
        matrix = matrix / (matrix.sum(axis=-2, keepdims=True) + eps)
    else:
        inner = mx.clip(inner, -form.limit, form.limit)
        read, matrix = mx.sigmoid(read), mx.exp(inner - inner.max(axis=-1, keepdims=True))
    for _ in range(rounds):
        matrix = matrix / (matrix.sum(axis=-1, keepdims=True) + eps)
        matrix = matrix / (matrix.sum(axis=-2, keepdims=True) + eps)
    return read, 2 * mx.sigmoid(write), matrix if form.limit else matrix.swapaxes(-1, -2)


@cache
def _kernel(form: Mixing) -> MetalKernel:
    return MetalKernel(
        name="mixing",
        inputs=("logits",),
        outputs=("read", "write", "matrix"),
        body=f"""
            mixing<N, ROUNDS, LIMITED>(
                logits, {float(form.eps)!r}f, {float(form.limit or 0)!r}f, read, write, matrix,
                thread_position_in_grid.x);
        """,
    )


def _of_tokens(form: Mixing, num_tokens: int) -> Case:
    rng, n = np.random.default_rng(num_tokens), form.num_streams
    logits = mx.array(rng.normal(0, 3, (num_tokens, n * (n + 2))).astype(np.float32))
    return Case(
        lambda: [*mixing(logits, form)], lambda: [*mixing_twin(logits, form)], (ROUNDING,) * 3
    )


MIXING = Kind(
    name="mixing",
    files=("mixing.metal", "mixing.py"),
    case=lambda variant: _of_tokens(variant.form, 11),
    timed=lambda variant, sequences, _: _of_tokens(variant.form, sequences),
    registers=lambda variant: 18,
    samples=(Mixing(4, 20, 1e-6).variant, Mixing(4, 20, 1e-6, limit=30.0).variant),
)
