"""The step kernels of recurrent layers, executed on the CPU: against their twins, and counted."""

import mlx.core as mx
import numpy as np
import pytest
from metal_cpu import MetalCPU, Report, requires_compiler
from models.runs import every

from mlxinfer.metal_kernels.conv_step import ConvStep
from mlxinfer.metal_kernels.delta_step import DeltaStep
from mlxinfer.metal_kernels.ssm_step import SSMStep
from mlxinfer.metal_kernels.state_step import StateStep, filled, plan_of, takes, team_lanes

pytestmark = requires_compiler

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
ROUNDING = {mx.float32: 2e-5, mx.float16: 4e-3, mx.bfloat16: 4e-2}
WIDTH, EXTRA = 8, 3  # tokens a sequence at most; numbers of a projection that a kernel skips


class Scene:
    """Sequences with states in several arrays, of which some begin, with ragged lengths."""

    def __init__(self, seed: int, shape: tuple[int, ...], count: int = 5, width: int = 5) -> None:
        self.rng = np.random.default_rng(seed)
        self.count, self.width = count, width
        self.sources = [self.normal(int(self.rng.integers(1, 5)), *shape) for _ in range(4)]
        picks = [int(self.rng.integers(4)) for _ in range(count)]
        rows = [int(self.rng.integers(-1, len(self.sources[pick]))) for pick in picks]
        self.places = list(zip(picks, rows, strict=True))
        self.lengths = [int(n) for n in self.rng.integers(0, width + 1, count)]
        self.plan = plan_of(self.places, self.lengths)

    def normal(self, *shape: int) -> mx.array:
        return mx.array(self.rng.normal(size=shape).astype(np.float32))

    def real(self) -> np.ndarray:
        """(B, L) whether a token counts."""
        return np.arange(self.width) < np.array(self.lengths)[:, None]


def wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32))


def compare(
    scene: Scene, actual: tuple[mx.array, mx.array], twin: tuple[mx.array, mx.array], off: float
) -> None:
    """Outputs of tokens that count and states agree; other outputs are zeros."""
    for ours, theirs in zip(actual, twin, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    real = scene.real()
    y, expected = wide(actual[0]), wide(twin[0])
    largest = max(1.0, np.abs(expected[real]).max(initial=0.0))
    np.testing.assert_allclose(y[real], expected[real], atol=off * largest)
    assert (y[~real] == 0).all()
    largest = max(1.0, np.abs(wide(twin[1])).max())
    np.testing.assert_allclose(wide(actual[1]), wide(twin[1]), atol=off * largest)


def arrays_of(scene: Scene, step: StateStep) -> list:
    """Random inputs, with numbers behind each row that a kernel skips."""
    arrays = step.drawn(scene.normal, (scene.count, scene.width))
    behind = len(arrays) - 3 if step.name == "delta_step" else 1  # the first is read as a whole
    for place in range(0 if step.name == "conv_step" else 1, behind + 1):
        array = arrays[place]
        if array is not None and array.ndim == 3 and len(array) == scene.count:
            arrays[place] = mx.pad(array, [(0, 0), (0, 0), (0, EXTRA)])
    return arrays


def on_machine(
    scene: Scene, step: StateStep, arrays: list, seed: int = 1, least: bool = False
) -> tuple:
    machine = MetalCPU(seed=seed, least_alignment=least)
    outputs = machine.clean(lambda: step.in_kernel(arrays, scene.sources, scene.plan))
    return outputs, machine.reports[0]


def check(scene: Scene, step: StateStep, rounding: float, **how: int) -> None:
    arrays = arrays_of(scene, step)
    result, _ = on_machine(scene, step, arrays, **how)
    compare(scene, result, step.twin(arrays, scene.sources, scene.plan), rounding)


def delta_form(seed: int, dtype: mx.Dtype = mx.float32) -> DeltaStep:
    draw = np.random.default_rng(seed)
    keys, served = int(draw.integers(1, 3)), int(draw.integers(1, 4))
    dim, value = ((8, 32), (32, 16), (64, 8), (96, 12), (24, 32))[int(draw.integers(5))]
    item = bool(draw.integers(2))
    at, bound = int(draw.integers(9)), -5.0 * int(draw.integers(2))
    strongest = float(draw.integers(1, 3))
    return DeltaStep(keys, dim, keys * served, value, item, at, 2, dtype, bound, strongest)


def ssm_form(seed: int, dtype: mx.Dtype = mx.float32) -> SSMStep:
    draw = np.random.default_rng(seed)
    groups, served = int(draw.integers(1, 3)), int(draw.integers(1, 4))
    head, state = ((8, 64), (32, 16), (16, 24), (8, 128), (4, 256))[int(draw.integers(5))]
    limits = ((0.0, float("inf")), (0.001, 0.1))[int(draw.integers(2))]
    return SSMStep(groups * served, head, groups, state, int(draw.integers(9)), limits, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biased", every(2, [False, True]))
def test_the_convolution_agrees_with_its_twin(dtype: mx.Dtype, gated: bool, biased: bool) -> None:
    channels, length = (300, 3) if gated else (70, 4)
    outputs = mx.float32 if biased and not gated else dtype
    scene = Scene(1 + gated, (length - 1, channels))
    step = ConvStep(channels, length, 5 * biased, gated, biased, dtype, outputs)
    check(scene, step, ROUNDING[dtype], least=True)


@pytest.mark.alike
@pytest.mark.parametrize("seed", range(6))
def test_the_delta_recurrence_agrees_with_its_twin(seed: int) -> None:
    dtype = DTYPES[seed % 3]
    form = delta_form(seed, dtype)
    assert takes(form.value_dim, form.key_dim)
    scene = Scene(seed, (form.value_heads, form.value_dim, form.key_dim))
    check(scene, form, ROUNDING[dtype], seed=seed)


@pytest.mark.alike
@pytest.mark.parametrize("seed", range(4))
def test_the_mamba_recurrence_agrees_with_its_twin(seed: int) -> None:
    form = ssm_form(seed, DTYPES[seed % 3])
    assert takes(form.head_dim, form.state_dim)
    scene = Scene(seed, (form.heads, form.head_dim, form.state_dim))
    check(scene, form, ROUNDING[mx.float32], seed=seed)


def state_traffic(report: Report, num_bytes: int) -> None:
    sources = report.total([f"source_{i}" for i in range(4)])
    assert sources.requested_bytes == sources.unique_bytes == num_bytes
    assert report.buffers["after"].stored_bytes == num_bytes
    assert report.buffers["after"].requested_bytes == 0


@pytest.mark.parametrize("width", [1, 8])
def test_each_number_of_a_state_is_read_and_written_once(width: int) -> None:
    """Whatever the number of tokens; the states of all sequences in one array, in any order."""
    delta = DeltaStep(2, 64, 4, 32, False, 0, 4, mx.bfloat16)
    ssm = SSMStep(4, 16, 2, 128, 0, (0.0, float("inf")), mx.bfloat16)
    conv = ConvStep(96, 4, 0, False, False, mx.bfloat16, mx.bfloat16)
    for step in (delta, ssm, conv):
        scene = Scene(1, step.state_shape, 3, width)
        scene.sources = filled([scene.normal(3, *step.state_shape)])
        scene.plan = plan_of([(0, 2), (0, 0), (0, 1)], [width, 1, max(1, width // 2)])
        _, report = on_machine(scene, step, arrays_of(scene, step))
        state_traffic(report, scene.sources[0].nbytes)
        assert report.threadgroup_bytes == 0
        assert report.num_threadgroup_barriers == 0


def test_any_split_gives_the_same_bits() -> None:
    """So a token that was verified and one that was decoded leave the same state."""
    step = DeltaStep(1, 32, 2, 16, False, 0, 2, mx.float32)
    scene = Scene(3, step.state_shape, 2, 6)
    arrays, places = arrays_of(scene, step), scene.places[:2]
    scene.plan = plan_of(places, [6, 6])
    (whole, last), _ = on_machine(scene, step, arrays)
    outputs = []
    for start, stop in ((0, 1), (1, 4), (4, 6)):
        scene.plan = plan_of(places, [stop - start] * 2)
        parts = [mx.contiguous(x[:, start:stop]) for x in arrays[:3]]
        (y, after), _ = on_machine(scene, step, [*parts, *arrays[3:]])
        outputs.append(y)
        scene.sources, places = filled([after]), [(0, 0), (0, 1)]
    assert mx.array_equal(mx.concatenate(outputs, axis=1), whole)
    assert mx.array_equal(scene.sources[0], last)


def test_teams_of_lanes_grow_with_the_width() -> None:
    assert [team_lanes(width) for width in (4, 16, 32, 64, 80, 96, 128, 256, 512)] == [
        1, 1, 2, 4, 4, 8, 8, 16, 32,
    ]  # fmt: skip
    assert team_lanes(6) is None
    assert team_lanes(36) is None
    assert takes(128, 128)
    assert not takes(5, 8)
