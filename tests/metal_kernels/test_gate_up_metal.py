"""The kernel of gate, up and activation, executed on the CPU: against its twin and the layer."""

import os
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from metal_cpu import MetalCPU, requires_compiler
from metal_cpu.mlx_kernels import quantized_matvec
from models.runs import every

from mlxinfer.layers import mlp
from mlxinfer.layers.linear import Joined, Linear, Projection, QuantizedLinear
from mlxinfer.layers.mlp import MLP
from mlxinfer.metal_kernels.gate_up import (
    CODES,
    FUNCTIONS,
    MAX_ROWS,
    MOST_TIMED_BYTES,
    PER_THREADGROUP,
    PLAIN,
    SHARING_ROWS,
    Gate,
    GateUp,
    gate_up,
    gate_up_twin,
    gated_twin,
    timed_inner,
)
from mlxinfer.metal_kernels.launch import running_on
from mlxinfer.metal_kernels.selfcheck import WRONG, examine
from mlxinfer.metal_kernels.variants import dtype_name

SEED = int(os.environ.get("HYPOTHESIS_SEED", "0"))
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Of a row's largest output. In float32 kernel and twin are each within 2.2e-6 of sums in float64.
ROUNDING = {mx.float32: 1e-5, mx.float16: 2**-10, mx.bfloat16: 2**-7}


def drawn(rng: np.random.Generator, form: GateUp) -> list[mx.array]:
    """A matrix of the form; products are as large as what it is multiplied with."""
    numbers = rng.normal(0, form.in_dims**-0.5, (2 * form.inner, form.in_dims))
    weight = mx.array(numbers.astype(np.float32)).astype(form.stored)
    if not form.bits:
        return [weight]
    return list(mx.quantize(weight, group_size=form.group_size, bits=form.bits))


def form_of(
    function: str,
    *,
    in_dims: int,
    inner: int,
    codes: tuple[int, int],
    dtype: mx.Dtype = mx.float32,
    stored: mx.Dtype = mx.float32,
) -> GateUp:
    numbers = (1.702, 2.0) if function.startswith("cl") else ()  # the others have none
    return GateUp(Gate(function, dtype, *numbers), in_dims, inner, *codes, stored)


def on_machine(x: mx.array, matrix: list[mx.array], form: GateUp, **how: Any) -> mx.array:
    machine = MetalCPU(seed=1, **how)
    outputs = machine.clean(lambda: gate_up(x, matrix, form))
    return outputs


def assert_close(actual: mx.array, expected: mx.array) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    wide = [np.array(a.astype(mx.float32), np.float64) for a in (actual, expected)]
    largest = np.abs(wide[1]).max(axis=1, keepdims=True)
    assert (np.abs(wide[0] - wide[1]) <= ROUNDING[actual.dtype] * largest).all()


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize("codes", every(2, [(codes,) for codes in [*CODES, PLAIN]]), ids=str)
def test_agrees_with_its_twin(codes: tuple[int, int]) -> None:
    """In every format; activation, dtypes, rows and sizes are drawn.

    And to the last bit, whatever rows stand beside it: what is decoded and what is verified agree.
    """
    rng = np.random.default_rng([SEED, *codes])
    form = form_of(
        str(rng.choice(list(FUNCTIONS))),
        in_dims=(codes[1] or 8) * int(rng.integers(1, 8)),
        inner=4 * int(rng.integers(1, 6)),
        codes=codes,
        dtype=DTYPES[rng.integers(3)],
        stored=DTYPES[rng.integers(3)],
    )
    matrix = drawn(rng, form)
    rows = int(rng.integers(2, MAX_ROWS + 1))
    print(f"seed {SEED}: {form.variant(rows)}, {rows} rows")
    x = mx.array(rng.normal(0, 2, (rows, form.in_dims)).astype(np.float32))
    x = x.astype(form.gate.dtype)
    actual = on_machine(x, matrix, form, least_alignment=True)
    assert_close(actual, gate_up_twin(x, matrix, form))
    alone = on_machine(x[rows - 1 :], matrix, form)
    assert mx.array_equal(alone, actual[rows - 1 :])


@requires_compiler
@pytest.mark.slow  # some 5 s of a processor each
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("codes", [*CODES, PLAIN], ids=str)
def test_formats_activations_and_numbers_of_rows(codes: tuple[int, int], dtype: mx.Dtype) -> None:
    rng = np.random.default_rng([SEED, *codes, dtype.size])
    for function in FUNCTIONS:
        sizes = {"in_dims": (codes[1] or 8) * int(rng.integers(1, 24)), "inner": 8}
        stored = DTYPES[rng.integers(3)]
        form = form_of(function, codes=codes, dtype=dtype, stored=stored, **sizes)
        matrix = drawn(rng, form)
        for rows in range(1, MAX_ROWS + 1):
            x = mx.array(rng.normal(0, 2, (rows, form.in_dims)).astype(np.float32)).astype(dtype)
            print(f"seed {SEED}: {form.variant(rows)}, {rows} rows")
            assert_close(on_machine(x, matrix, form), gate_up_twin(x, matrix, form))


@requires_compiler
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_activation_where_it_is_clamped_and_where_exp_overflows(function: str) -> None:
    form = form_of(function, in_dims=64, inner=4, codes=(4, 64))
    matrix = drawn(np.random.default_rng(SEED), form)
    x = 96 * mx.random.normal((3, 64), key=mx.random.key(SEED))
    assert_close(on_machine(x, matrix, form), gate_up_twin(x, matrix, form))


@requires_compiler
@pytest.mark.parametrize("codes", every(2, [((4, 64),), ((8, 32),), (PLAIN,)]), ids=str)
def test_reads_the_matrix_once_for_rows_that_share_it(codes: tuple[int, int]) -> None:
    form = form_of("silu", in_dims=640, inner=16, codes=codes, stored=mx.bfloat16)
    matrix = drawn(np.random.default_rng(SEED), form)
    for rows in (1, 3, MAX_ROWS):
        machine = MetalCPU()
        with running_on(machine):
            gate_up(mx.ones((rows, 640)), matrix, form)
        (report,) = machine.reports
        weight = report.buffers["weight"]
        assert weight.unique_bytes == matrix[0].nbytes
        assert weight.requested_bytes == matrix[0].nbytes * -(-rows // SHARING_ROWS)


@requires_compiler
@pytest.mark.parametrize(("bits", "fewer"), every(2, [(4, 2), (8, 4)]))
def test_for_one_row_it_reads_what_mlxs_product_reads(bits: int, fewer: int) -> None:
    """The same bytes, the matrix in fewer loads; and the product is MLX's."""
    form = form_of("silu", in_dims=1024, inner=16, codes=(bits, 64), stored=mx.float32)
    codes, scales, biases = matrix = drawn(np.random.default_rng(SEED), form)
    x = mx.random.normal((1, 1024), key=mx.random.key(SEED))
    mlx = quantized_matvec(x, (codes, scales, biases), group_size=64, bits=bits, fast=True)
    machine = MetalCPU()
    with running_on(machine):
        assert_close(gate_up(x, matrix, form), gated_twin(mlx.output, form.gate))
    (theirs,), (ours,) = mlx.reports, machine.reports
    assert ours.buffers["weight"].requested_bytes == theirs.buffers["w"].requested_bytes
    assert ours.buffers["weight"].num_loads * fewer == theirs.buffers["w"].num_loads
    for name in ("x", "scales", "biases"):
        assert ours.buffers[name].requested_bytes <= theirs.buffers[name].requested_bytes


@requires_compiler
def test_infinities_and_nans_are_what_they_are_in_mlx() -> None:
    form = form_of("silu", in_dims=64, inner=4, codes=PLAIN)
    x = mx.ones((3, 64))
    x[0, 5], x[1, 7] = mx.inf, mx.nan
    matrix = [mx.abs(drawn(np.random.default_rng(SEED), form)[0])]
    actual, expected = on_machine(x, matrix, form), gate_up_twin(x, matrix, form)
    assert mx.isinf(actual[0]).all()
    assert mx.isnan(actual[1]).all()
    assert mx.array_equal(actual[:2], expected[:2], equal_nan=True)
    assert_close(actual[2:], expected[2:])


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("inner + first_pair);", "inner + first_pair - 1);"),
        ("biases[group]);", "scales[group]);"),
        ("sum + bias * total", "sum + bias"),
        ("first < Matrix::DIMS", "first + LANES * Run::LENGTH < Matrix::DIMS"),
        ("% PER_WORD * BITS", "% PER_WORD * (BITS - 1)"),
        ("first / GROUP;", "first / (2 * GROUP);"),
        ("min(first_row + row, num_rows - 1)", "first_row"),
    ],
)
def test_a_mutant_fails_its_self_check(old: str, new: str) -> None:
    variant = form_of("silu", in_dims=544, inner=8, codes=(4, 32)).variant(4)
    assert examine(variant, MetalCPU(checked=False, replace={old: new})).status == WRONG


# -- in a layer ---------------------------------------------------------------------------------


def projection(form: GateUp, matrix: list[mx.array], bias: mx.array | None = None) -> Projection:
    if not form.bits:
        return Linear(matrix[0], bias)
    how = {"group_size": form.group_size, "bits": form.bits, "mode": "affine"}
    return QuantizedLinear(*matrix, bias, **how)  # type: ignore[arg-type,misc]  # three arrays


def block(form: GateUp, gate_up_proj: Projection) -> MLP:
    down = Linear(mx.eye(form.inner))
    return MLP(gate_up_proj, down, mlp.gated("silu", mx.float32))


@requires_compiler
@pytest.mark.parametrize("codes", [(4, 32), PLAIN], ids=str)
def test_a_layer_gives_the_same_with_its_kernel(codes: tuple[int, int]) -> None:
    form = form_of("silu", in_dims=96, inner=8, codes=codes)
    matrix = drawn(np.random.default_rng(SEED), form)
    layer = block(form, projection(form, matrix))
    assert layer.form is form
    x = mx.random.normal((5, 96), key=mx.random.key(SEED))
    expected, before = layer(x), layer(x[:2])
    machine = MetalCPU(seed=1)
    layer.ready = lambda rows: rows > 2
    with running_on(machine):
        assert_close(layer(x), expected)
        assert mx.array_equal(layer(x[:2]), before)  # not ready for so few
    assert [report.kernel for report in machine.reports] == ["gate_up"]
    machine.assert_clean()


@pytest.mark.parametrize("codes", [(4, 64), (8, 32), PLAIN])
def test_a_large_matrix_is_timed_in_part(codes: tuple[int, int]) -> None:
    """That of a model of 70B has 0.2 to 0.9 GB, which the host would hold twice."""
    bits = codes[0] or 16
    small, large = (
        GateUp(Gate("silu", mx.bfloat16), *sizes, *codes, mx.bfloat16)
        for sizes in ((4096, 1024), (8192, 28672))
    )
    assert timed_inner(small) == 1024
    inner = timed_inner(large)
    assert inner % PER_THREADGROUP == 0
    assert 100 << 20 < 2 * inner * 8192 * bits // 8 <= MOST_TIMED_BYTES


def test_what_is_no_plain_matrix_has_no_kernel() -> None:
    form = form_of("silu", in_dims=96, inner=8, codes=(4, 32))
    matrix = drawn(np.random.default_rng(SEED), form)
    plain = projection(form, matrix)
    assert block(form, Joined([plain])).form is None
    assert block(form, projection(form, matrix, mx.zeros(16))).form is None
    assert MLP(plain, plain, mlp.gated("gelu", mx.float32)).form is None
    assert MLP(plain, plain, mlp.relu_squared).form is None
    odd = mx.quantize(mx.ones((16, 96)), group_size=32, bits=6)
    six = QuantizedLinear(*odd, group_size=32, bits=6, mode="affine")  # type: ignore[arg-type,misc]
    assert block(form, six).form is None
    assert not form_of("silu", in_dims=96, inner=6, codes=(4, 32)).has_kernel
    assert not form_of("silu", in_dims=100, inner=8, codes=PLAIN).has_kernel
