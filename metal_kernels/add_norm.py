"""A residual sum and the norms around it in one dispatch, and its plain-MLX twin. Knows no layer.

x + block, or x + norm(block), and the norm of the sum if the next block reads one. Norms are RMS
norms (arXiv 1910.07467), with sums in float32. The summand and the sum are rounded to the dtype of
x before they are read again, as they are if each is an operation of its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from .launch import MIN_NUMBERS, Launch, MetalKernel
from .variants import IN_MLX, Case, Form, Kind, Variant, launch_of

LANES, MAX_THREADS = 32, 512
MAX_DIMS = 16_384  # 8 vectors of 4 numbers a lane
ROUNDING = {"float32": 2e-5, "float16": 2**-7, "bfloat16": 2**-4}  # of numbers below 16
CASE_ROWS = 3
LARGE = 300  # of a row: its sum of squares overflows 16 bits


@dataclass(frozen=True, slots=True, eq=False)
class AddNorm(Form):
    """A residual sum and the norms around it."""

    dims: int  # numbers of a row
    dtype: mx.Dtype  # of rows and weights: float32, float16 or bfloat16
    # epsilon of the norm over the block's output, before the sum; None: no norm
    after: float | None
    before: float | None  # epsilon of the norm over the sum, before the next block; None: no norm

    @property
    def has_kernel(self) -> bool:
        return self.dims % 4 == 0 and MIN_NUMBERS <= self.dims <= MAX_DIMS

    @property
    def variant(self) -> Variant:
        return Variant.from_form("add_norm", self)

    def launch(self, shape: tuple[int, ...]) -> Launch:
        """The call for rows of a shape (..., dims)."""
        assert self.has_kernel, self
        assert shape[-1] == self.dims, (shape, self)
        threads, rows = threads_of(self.dims), math.prod(shape[:-1])
        after, before = self.after is not None, self.before is not None
        return Launch(
            _kernel(self),
            template=[
                ("T", self.dtype),
                ("DIMS", self.dims),
                ("THREADS", threads),
                ("AFTER", after),
                ("BEFORE", before),
            ],
            grid=(rows * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[shape] * (1 + before),
            output_dtypes=[self.dtype] * (1 + before),
        )


def add_norm(
    x: mx.array, block: mx.array, form: AddNorm, *weights: mx.array
) -> tuple[mx.array, mx.array | None]:
    """One dispatch.

    Args:
        x, block: (..., dims), both of the form's dtype.
        weights: (dims,) of the norm over `block`, then of the norm over the sum, as far as there
            are such.

    Returns:
        The sum (..., dims), and its norm; None: the form has none.
    """
    outputs = launch_of(form, x.shape)([x, block, *weights])
    return outputs[0], outputs[1] if len(outputs) > 1 else None


def add_norm_twin(
    x: mx.array, block: mx.array, form: AddNorm, *weights: mx.array
) -> tuple[mx.array, mx.array | None]:
    if form.after is not None:
        block = mx.fast.rms_norm(block, weights[0], form.after)
    total = x + block
    if form.before is None:
        return total, None
    return total, mx.fast.rms_norm(total, weights[-1], form.before)


def threads_of(dims: int) -> int:
    """Threads of a row: each takes as many vectors of 4 numbers as the next, or one less."""
    vectors = dims // 4
    per_thread = -(-vectors // MAX_THREADS)
    needed = -(-vectors // per_thread)
    return -(-needed // LANES) * LANES


@cache
def _kernel(form: AddNorm) -> MetalKernel:
    after, before = form.after is not None, form.before is not None
    weights = [*["after"] * after, *["before"] * before]
    given = weights or ["x"]
    return MetalKernel(
        name="add_norm",
        inputs=("x", "block", *weights),
        outputs=("sums", "normed") if before else ("sums",),
        body=f"""
            threadgroup float shared[2 * THREADS / 32];
            add_norm<DIMS, THREADS, AFTER, BEFORE>(
                x, block, {given[0]}, {given[-1]}, {float(form.after or 0)!r}f,
                {float(form.before or 0)!r}f, sums, {"normed" if before else "sums"}, shared,
                threadgroup_position_in_grid.x, thread_position_in_threadgroup.x,
                simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
        """,
    )


def _adding(variant: Variant, rows: int) -> Case:
    form, rng = variant.form, np.random.default_rng(rows)
    weights = sum(eps is not None for eps in (form.after, form.before))
    shapes = [(rows, form.dims)] * 2 + [(form.dims,)] * weights
    drawn = [rng.uniform(-2, 2, shape).astype(np.float32) for shape in shapes]
    drawn[1][0, :] = 0  # a row with the norm of epsilon alone
    drawn[1][-1, :] *= LARGE
    arrays = [mx.array(numbers).astype(form.dtype) for numbers in drawn]

    def outputs(function: Callable[..., tuple[mx.array, mx.array | None]]) -> list[mx.array]:
        return [a for a in function(*arrays[:2], form, *arrays[2:]) if a is not None]

    return Case(
        lambda: outputs(add_norm),
        lambda: outputs(_in_float32),
        (ROUNDING[str(variant["dtype"])],) * (1 + (form.before is not None)),
        instead={IN_MLX: lambda: outputs(add_norm_twin)},
        mean_share=1 / 256,
    )


def _in_float32(
    x: mx.array, block: mx.array, form: AddNorm, *weights: mx.array
) -> tuple[mx.array, mx.array | None]:
    """As `add_norm_twin`, rounded where the kernel rounds and nowhere else."""

    def normed(rows: mx.array, weight: mx.array, eps: float) -> mx.array:
        exact = mx.fast.rms_norm(rows.astype(mx.float32), weight.astype(mx.float32), eps)
        return exact.astype(form.dtype)

    if form.after is not None:
        block = normed(block, weights[0], form.after)
    sums = (x.astype(mx.float32) + block.astype(mx.float32)).astype(form.dtype)
    return sums, None if form.before is None else normed(sums, weights[-1], form.before)


ADD_NORM = Kind(
    name="add_norm",
    files=("add_norm.metal", "add_norm.py"),
    case=lambda variant: _adding(variant, CASE_ROWS),
    timed=lambda variant, sequences, _: _adding(variant, sequences),
    registers=lambda variant: 14 + 4 * -(-variant.form.dims // 4 // threads_of(variant.form.dims)),
    samples=(
        AddNorm(4096, mx.bfloat16, None, 1e-6).variant,
        AddNorm(2560, mx.bfloat16, 1e-6, 1e-6).variant,
        AddNorm(2048, mx.float16, 1e-5, None).variant,
    ),
)
