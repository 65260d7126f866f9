"""The kernel of residual sums and norms, executed on the CPU: against its twin and in layers."""

from collections.abc import Sequence
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from metal_cpu import MetalCPU, requires_compiler

from mlxinfer.layers.norm import Join, LayerNorm, Norm, RMSNorm
from mlxinfer.layers.step import Step
from mlxinfer.metal_kernels.add_norm import (
    MAX_DIMS,
    MAX_THREADS,
    AddNorm,
    add_norm,
    add_norm_twin,
    threads_of,
)
from mlxinfer.metal_kernels.variants import ModelForm
from mlxinfer.models.decoder import ResidualLayer, link_norms

# Of max(1, |expected|); in 16 bits the twin rounds four times, the kernel three times.
ROUNDING = {mx.float32: 2e-5, mx.float16: 2**-8, mx.bfloat16: 2**-5}
NORMS = ((None, 1e-6), (1e-5, 1e-6), (1e-5, None))  # of what is added, of the sum
LAYOUTS = {"pre": (1, 0, 1, 0), "post": (0, 1, 0, 1), "sandwich": (1, 1, 1, 1)}


def inputs(form: AddNorm, *rows: int, seed: int = 0) -> list[mx.array]:
    rng = np.random.default_rng(seed)
    weights = sum(eps is not None for eps in (form.after, form.before))
    shapes = [(*rows, form.dims)] * 2 + [(form.dims,)] * weights
    return [
        mx.array(rng.normal(size=shape).astype(np.float32)).astype(form.dtype) for shape in shapes
    ]


def on_machine(form: AddNorm, arrays: list[mx.array], **options: bool) -> list[mx.array]:
    machine = MetalCPU(seed=3, **options)
    outputs = machine.clean(lambda: add_norm(*arrays[:2], form, *arrays[2:]))
    (report,) = machine.reports
    assert report.bank_ways <= 2
    assert np.prod(report.threadgroup) <= MAX_THREADS
    return [array for array in outputs if array is not None]


def check(actual: list[mx.array], form: AddNorm, arrays: list[mx.array]) -> None:
    expected = [a for a in add_norm_twin(*arrays[:2], form, *arrays[2:]) if a is not None]
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, form.dtype)
        wide = [np.array(array.astype(mx.float32)) for array in (ours, theirs)]
        error = np.abs(wide[0] - wide[1]) / np.maximum(1, np.abs(wide[1]))
        assert error.max() <= ROUNDING[form.dtype], error.max()


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize(
    ("rows", "dims", "dtype"),
    [((3,), 300, mx.float32), ((1,), 2560, mx.bfloat16), ((2, 1), 128, mx.float16)],
)
def test_agrees_with_its_twin(
    norms: tuple[float | None, float | None], rows: tuple[int, ...], dims: int, dtype: mx.Dtype
) -> None:
    form = AddNorm(dims, dtype, norms[0], norms[1])
    arrays = inputs(form, *rows)
    check(on_machine(form, arrays), form, arrays)


@requires_compiler
def test_a_zero_row_is_epsilons_alone() -> None:
    form = AddNorm(64, mx.float32, 1e-6, 1e-6)
    arrays = [mx.zeros_like(array) for array in inputs(form, 2)]
    assert all(not mx.any(array) for array in on_machine(form, arrays))


@requires_compiler
def test_rows_need_no_more_alignment_than_a_number() -> None:
    form = AddNorm(72, mx.float16, None, 1e-6)
    arrays = inputs(form, 3)
    check(on_machine(form, arrays, least_alignment=True), form, arrays)


@pytest.mark.parametrize("dims", [8, 128, 2048, 2052, 2560, 4096, 5120, 7168, 8192, MAX_DIMS])
def test_threads_share_a_row(dims: int) -> None:
    threads = threads_of(dims)
    per_thread = -(-dims // 4 // threads) if dims >= 4 * threads else 1
    assert threads % 32 == 0
    assert threads <= MAX_THREADS
    assert per_thread <= 8
    assert threads * per_thread * 4 >= dims
    assert (threads - 32) * per_thread * 4 < dims


def test_rows_that_have_no_kernel() -> None:
    for dims, taken in ((4096, True), (4098, False), (4, False), (MAX_DIMS + 4, False)):
        assert AddNorm(dims, mx.float16, None, 1e-6).has_kernel is taken


def layer(norms: Sequence[Norm | None]) -> ResidualLayer:
    """Blocks that stand for a mixer and an MLP; norms before and after each."""

    def mixer(x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        y = mx.sin(x) + step.positions[:, None]
        return y if residual is None else residual + y

    def mlp(x: mx.array, residual: mx.array | None = None) -> mx.array:
        y = x * mx.sigmoid(x)
        return y if residual is None else residual + y

    return ResidualLayer(mixer, mlp, before=norms[::2], after=norms[1::2])


def use_kernel(join: Join) -> AddNorm | None:
    for use in join.kernels(ModelForm(mx.float32, quantized=True)):
        use.install(lambda _: True)
    return join.form


@requires_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_give_the_same_with_the_kernel(layout: str) -> None:
    rng = np.random.default_rng(len(layout))

    def norm() -> Norm:
        return RMSNorm(mx.array(rng.normal(1, 0.2, 64).astype(np.float32)), 1e-6)

    layers = [layer([norm() if has else None for has in LAYOUTS[layout]]) for _ in range(3)]
    last = norm()
    link_norms(layers, last)
    x = mx.array(rng.normal(size=(5, 64)).astype(np.float32))

    def run() -> list[mx.array]:
        outputs, normed, step = [x], None, Step(mx.arange(5), {})
        for item in layers:
            output, normed = item(outputs[-1], normed, step)
            outputs.append(output)
        return [*outputs, last(output) if normed is None else normed]

    plain, machine = run(), MetalCPU(seed=2)
    for item in layers:
        for join in item.joins:
            use_kernel(join)
    outputs = machine.clean(lambda: run())
    assert len(machine.reports) == 2 * len(layers)
    for ours, theirs in zip(outputs, plain, strict=True):
        assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4).item()


def test_only_rms_norms_have_a_form() -> None:
    weight = mx.ones(64)
    rms, layer_norm = RMSNorm(weight, 1e-6), LayerNorm(weight, 1e-6)
    assert use_kernel(Join(None, rms)) is use_kernel(Join(None, RMSNorm(weight + 1, 1e-6)))
    assert use_kernel(Join(rms, RMSNorm(weight.astype(mx.float16), 1e-6))) is None
    for pair in ((None, None), (None, layer_norm), (layer_norm, rms)):
        assert use_kernel(Join(*pair)) is None


def test_where_a_product_adds_the_residual_the_kernel_serves_norms_behind_blocks_alone() -> None:
    norm, dense = RMSNorm(mx.ones(64), 1e-6), ModelForm(mx.float32)
    assert not Join(None, norm).kernels(dense)
    assert Join(norm, None).kernels(dense)
    assert not Join(norm, None).kernels(ModelForm(mx.float16)), "the rows are of another dtype"


@requires_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dims", [8, 96, 2048, 3072, 5120, 7168, MAX_DIMS])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_every_form_agrees_with_its_twin(dims: int, dtype: mx.Dtype) -> None:
    for seed, (norms, rows) in enumerate(product(NORMS, (1, 5))):
        form = AddNorm(dims, dtype, norms[0], norms[1])
        arrays = inputs(form, rows, seed=seed)
        check(on_machine(form, arrays), form, arrays)
