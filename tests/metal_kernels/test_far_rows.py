"""Rows beyond 2**31 elements: kernels reach them with offsets of 64 bits.

Nothing so large is allocated. The machine tells a kernel that its data begins many rows earlier,
and the rows that the kernel is asked for are as many further on. An offset of 32 bits misses the
data, which is an access out of bounds.
"""

from collections.abc import Sequence

import mlx.core as mx
import pytest
from attention_checks import TOLERANCE
from metal_cpu import MetalCPU, requires_compiler
from models.runs import every
from scenes import Scene, build

from mlxinfer.metal_kernels.conv_step import ConvStep
from mlxinfer.metal_kernels.delta_step import DeltaStep
from mlxinfer.metal_kernels.launch import Launch, running_on
from mlxinfer.metal_kernels.paged_attention import (
    Softmax,
    paged_attention_gathered,
    paged_attention_on_metal,
)
from mlxinfer.metal_kernels.ssm_step import SSMStep
from mlxinfer.metal_kernels.state_step import StateStep, filled, plan_of

pytestmark = requires_compiler

ELEMENTS = 2**31
BF16 = mx.bfloat16


class FarPages(MetalCPU):
    """Adds a number to each page that a kernel is asked for, and moves pages as far.

    Args:
        first_page: the number.
        page_size: tokens of a page.
        replace: see MetalCPU.
    """

    def __init__(self, first_page: int, page_size: int, replace: dict[str, str]) -> None:
        super().__init__(seed=1, replace=replace, may_stay_unwritten=("outputs", "figures"))
        self._first_page, self._page_size = first_page, page_size

    def __call__(self, launch: Launch, inputs: Sequence[mx.array]) -> list[mx.array]:
        named = dict(zip(launch.kernel.inputs, inputs, strict=True))
        stored = [
            name for name in named if name.startswith(("key", "value")) and "tail" not in name
        ]
        self._before = {
            name: self._first_page * self._page_size * named[name].shape[-1] * named[name].itemsize
            for name in stored
        }
        assert stored
        named["pages"] = named["pages"] + self._first_page
        return super().__call__(launch, list(named.values()))


def attend(scene: Scene, replace: dict[str, str]) -> FarPages:
    inputs = build(scene)
    how = {"softmax": Softmax(scene.key_dim**-0.5), "value_dim": scene.value_dim}
    first_page = ELEMENTS // (scene.key_dim * scene.page_size) + 1
    machine = FarPages(first_page, scene.page_size, replace)
    arguments = inputs.queries, inputs.keys, inputs.values, inputs.plan
    with running_on(machine):
        (actual,) = paged_attention_on_metal(*arguments, log_sums=False, **how)
    if not replace:
        machine.assert_clean()
        (expected,) = paged_attention_gathered(*arguments, log_sums=False, **how)
        tolerance = TOLERANCE[inputs.queries.dtype]
        assert mx.allclose(actual, expected, rtol=0, atol=tolerance).item()
    return machine


SCENES = {
    "plain": Scene([70, 33], [1, 2], kv_heads=2, group=2),
    "8 bits": Scene([70, 33], [1, 1], group=4, bits=(8, 8), key_dim=128, value_dim=128),
    "in tiles": Scene([50, 33], [4, 1], group=16, bits=(4, 8), key_dim=128, value_dim=128),
}


@pytest.mark.parametrize("name", every(3, SCENES))
def test_attention_reads_far_pages(name: str) -> None:
    attend(SCENES[name], {})


@pytest.mark.parametrize(
    "step",
    [
        ConvStep(96, 4, 0, False, False, BF16, BF16),
        DeltaStep(2, 64, 4, 32, False, 0, 4, BF16),
        SSMStep(4, 16, 2, 128, 0, (0.0, float("inf")), BF16),
    ],
    ids=lambda step: step.name,
)
def test_recurrences_read_far_states(step: StateStep) -> None:
    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(len(shape)))

    sources, arrays = filled([normal(3, *step.state_shape)]), step.drawn(normal, (2, 3))
    size = sources[0][0].size
    first = ELEMENTS // size + 1
    machine = far_states(first * size * 4, {})
    actual = machine.clean(
        lambda: step.in_kernel(arrays, sources, plan_of([(0, first + 2), (0, first)], [3, 2]))
    )
    near = plan_of([(0, 2), (0, 0)], [3, 2])
    expected = step.twin(arrays, sources, near)
    assert mx.allclose(actual[1], expected[1], atol=0.05).item()


def far_states(num_bytes: int, replace: dict[str, str]) -> MetalCPU:
    return MetalCPU(before={f"source_{i}": num_bytes for i in range(4)}, replace=replace)


def test_an_offset_of_32_bits_into_pages_is_seen() -> None:
    narrow = {"long number = place.vector": "int number = int(place.vector)"}
    machine = attend(SCENES["plain"], narrow)
    assert machine.reports[0].kinds() == {"out of bounds"}


def test_an_offset_of_32_bits_into_states_is_seen() -> None:
    step = ConvStep(96, 4, 0, False, False, BF16, BF16)
    sources, arrays = filled([mx.ones((3, 3, 96))]), step.drawn(lambda *s: mx.ones(s), (2, 3))
    first = ELEMENTS // 288 + 1
    machine = far_states(
        first * 288 * 4, {"ulong(place.row) * size": "uint(place.row) * uint(size) * 4 / 4"}
    )
    with running_on(machine):
        step.in_kernel(arrays, sources, plan_of([(0, first + 2), (0, first)], [3, 2]))
    assert machine.reports[0].kinds() == {"out of bounds"}
