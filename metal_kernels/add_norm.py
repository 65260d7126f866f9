"""A residual sum and the norms around it in one dispatch, and its plain-MLX twin. Knows no layer.

x + block, or x + norm(block), and the norm of that sum where the next block reads one. Norms are
RMS norms (arXiv 1910.07467), with sums in float32. What is added and the sum are rounded to the
dtype of x before they are read again, as they are where each is an operation of its own.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache

import mlx.core as mx
import numpy as np

from .launch import MIN_NUMBERS, Launch, MetalKernel
from .variants import Case, Kind, Variant, dtype_name

LANES, MAX_THREADS = 32, 512
MAX_DIMS = 16_384  # 8 vectors of 4 numbers a lane
MAX_LAUNCHES = 64  # that are remembered: a decode step makes the same in every layer
ROUNDING = {"float32": 2e-5, "float16": 2**-7, "bfloat16": 2**-4}  # of numbers below 16
CASE_ROWS = 3


@dataclass(frozen=True, slots=True, eq=False)
class AddNorm:
    """Which norms stand around a sum.

    From `add_norm_of`: layers look up launches by the object.

    Attributes:
        dims: numbers of a row.
        dtype: of rows and weights: float32, float16 or bfloat16.
        after_eps: of the norm over what is added; None: there is none.
        before_eps: of the norm over the sum; None: there is none.
    """

    dims: int
    dtype: mx.Dtype
    after_eps: float | None
    before_eps: float | None


_add_norm = cache(AddNorm)


def add_norm_of(
    dims: int, dtype: mx.Dtype, *, after_eps: float | None, before_eps: float | None
) -> AddNorm:
    """The same object for the same values."""
    eps = [None if value is None else float(value) for value in (after_eps, before_eps)]
    return _add_norm(dims, dtype, *eps)


def has_rows(form: AddNorm) -> bool:
    """Whether the kernel takes rows of so many numbers."""
    return form.dims % 4 == 0 and MIN_NUMBERS <= form.dims <= MAX_DIMS


def add_norm(
    x: mx.array, block: mx.array, form: AddNorm, *weights: mx.array
) -> tuple[mx.array, mx.array | None]:
    """One dispatch.

    Args:
        x, block: (..., dims), both of the form's dtype.
        form: which norms.
        weights: (dims,) of the norm over `block`, then of the norm over the sum, as far as there
            are such.

    Returns:
        The sum (..., dims), and its norm; None: the form has none.
    """
    outputs = _launch(form, x.shape)([x, block, *weights])
    return outputs[0], outputs[1] if len(outputs) > 1 else None


def add_norm_twin(
    x: mx.array, block: mx.array, form: AddNorm, *weights: mx.array
) -> tuple[mx.array, mx.array | None]:
    """The same in plain MLX."""
    if form.after_eps is not None:
        block = mx.fast.rms_norm(block, weights[0], form.after_eps)
    total = x + block
    if form.before_eps is None:
        return total, None
    return total, mx.fast.rms_norm(total, weights[-1], form.before_eps)


def threads_of(dims: int) -> int:
    """Threads of a row: each takes as many vectors of 4 numbers as the next, or one less."""
    vectors = dims // 4
    own = -(-vectors // MAX_THREADS)
    needed = -(-vectors // own)
    return -(-needed // LANES) * LANES


@lru_cache(MAX_LAUNCHES)
def _launch(form: AddNorm, shape: tuple[int, ...]) -> Launch:
    assert has_rows(form), form
    assert shape[-1] == form.dims, (shape, form)
    threads, rows = threads_of(form.dims), math.prod(shape[:-1])
    after, before = form.after_eps is not None, form.before_eps is not None
    return Launch(
        _kernel(form),
        template=[
            ("T", form.dtype),
            ("DIMS", form.dims),
            ("THREADS", threads),
            ("AFTER", after),
            ("BEFORE", before),
        ],
        grid=(rows * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape] * (1 + before),
        output_dtypes=[form.dtype] * (1 + before),
    )


@cache
def _kernel(form: AddNorm) -> MetalKernel:
    after, before = form.after_eps is not None, form.before_eps is not None
    weights = [*["after"] * after, *["before"] * before]
    given = weights or ["x"]
    return MetalKernel(
        name="add_norm",
        inputs=("x", "block", *weights),
        outputs=("sums", "normed") if before else ("sums",),
        body=f"""
            threadgroup float shared[2 * THREADS / 32];
            add_norm<DIMS, THREADS, AFTER, BEFORE>(
                x, block, {given[0]}, {given[-1]}, {form.after_eps or 0.0!r}f,
                {form.before_eps or 0.0!r}f, sums, {"normed" if before else "sums"}, shared,
                threadgroup_position_in_grid.x, thread_position_in_threadgroup.x,
                simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
        """,
    )


def add_norm_variant(form: AddNorm) -> Variant:
    """What `add_norm` compiles."""
    return Variant.of(
        "add_norm",
        dtype=dtype_name(form.dtype),
        dims=form.dims,
        after="" if form.after_eps is None else repr(form.after_eps),
        before="" if form.before_eps is None else repr(form.before_eps),
    )


def _inputs(variant: Variant, rows: int) -> tuple[AddNorm, list[mx.array]]:
    eps = [float(str(variant[name])) if variant[name] else None for name in ("after", "before")]
    form = add_norm_of(variant.number("dims"), variant.dtype, after_eps=eps[0], before_eps=eps[1])
    rng = np.random.default_rng(rows)
    shapes = [(rows, form.dims)] * 2 + [(form.dims,)] * sum(value is not None for value in eps)
    drawn = [rng.uniform(-2, 2, shape).astype(np.float32) for shape in shapes]
    drawn[1][0, :] = 0  # a row with the norm of epsilon alone
    return form, [mx.array(numbers).astype(form.dtype) for numbers in drawn]


def _case(variant: Variant) -> Case:
    return _adding(variant, CASE_ROWS)


def _timed(variant: Variant, sequences: int, _: int) -> Case:
    return _adding(variant, sequences)


def _adding(variant: Variant, rows: int) -> Case:
    form, (x, block, *weights) = _inputs(variant, rows)

    def outputs(pair: tuple[mx.array, mx.array | None]) -> list[mx.array]:
        return [array for array in pair if array is not None]

    return Case(
        lambda: outputs(add_norm(x, block, form, *weights)),
        lambda: outputs(add_norm_twin(x, block, form, *weights)),
        (ROUNDING[str(variant["dtype"])],) * (1 + (form.before_eps is not None)),
    )


def _sample(dims: int, dtype: mx.Dtype, after: float | None, before: float | None) -> Variant:
    return add_norm_variant(add_norm_of(dims, dtype, after_eps=after, before_eps=before))


ADD_NORM = Kind(
    name="add_norm",
    files=("add_norm.metal", "add_norm.py"),
    case=_case,
    timed=_timed,
    registers=lambda variant: (
        14 + 4 * -(-variant.number("dims") // 4 // threads_of(variant.number("dims")))
    ),
    samples=(
        _sample(4096, mx.bfloat16, None, 1e-6),
        _sample(2560, mx.bfloat16, 1e-6, 1e-6),
        _sample(2048, mx.float16, 1e-5, None),
    ),
)
