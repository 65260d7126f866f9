"""GPUs that are none: a device that computes the twin, and ones that are at fault."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import mlx.core as mx

from mlxinfer.metal_kernels.bitmask import bitmask_twin, bitmask_variant
from mlxinfer.metal_kernels.launch import Launch
from mlxinfer.metal_kernels.sample import sample_twin, sample_variant
from mlxinfer.metal_kernels.selfcheck import Gpu
from mlxinfer.metal_kernels.variants import is_kernel

CHIP = "Fake M9, macOS 99, mlx 1, mlxinfer 1"
BITMASK = bitmask_variant(mx.float16)
SAMPLE = sample_variant(mx.float32, masked=True)

Fault = Callable[[list[mx.array]], list[mx.array]]


class FakeDevice:
    """Computes what the twins compute; `fault` makes something else of the outputs of `faulty`."""

    def __init__(self, fault: Fault | None = None, *, faulty: str = "bitmask") -> None:
        self.launched: list[str] = []
        self._fault, self._faulty = fault, faulty

    def __call__(self, launch: Launch, inputs: Sequence[mx.array]) -> list[mx.array]:
        name = launch.kernel.name
        self.launched.append(name)
        twin = {"bitmask": bitmask_twin, "sample": sample_twin}[name]
        outputs = [twin(*inputs)]
        return self._fault(outputs) if self._fault and name == self._faulty else outputs


def gpu(
    fault: Fault | None = None, environment: str = CHIP, kernel_s: float = 1e-5, mlx_s: float = 2e-5
) -> tuple[Gpu, FakeDevice]:
    """A GPU on which kernels take so long, and MLX's own operations."""
    device = FakeDevice(fault)
    return Gpu(device, environment, timer=lambda calls: _times(calls, kernel_s, mlx_s)), device


def _times(ways: Iterable[str], kernel_s: float, mlx_s: float) -> dict[str, float]:
    return {way: kernel_s if is_kernel(way) else mlx_s for way in ways}


def lies(outputs: list[mx.array]) -> list[mx.array]:
    return [mx.where(mx.arange(output.shape[-1]) == 7, 1.0, output) for output in outputs]


def gives_nan(outputs: list[mx.array]) -> list[mx.array]:
    return [mx.where(mx.arange(output.shape[-1]) == 7, mx.nan, output) for output in outputs]


def gives_another_dtype(outputs: list[mx.array]) -> list[mx.array]:
    return [output.astype(mx.float32) for output in outputs]


def does_not_compile(_: list[mx.array]) -> list[mx.array]:
    raise RuntimeError("[metal::Device] Unable to build metal library from source")


def is_interrupted(_: list[mx.array]) -> list[mx.array]:
    raise KeyboardInterrupt


def ends_the_process(_: list[mx.array]) -> list[mx.array]:
    os.kill(os.getpid(), 9)
    raise AssertionError("unreachable")


def crash(folder: Path) -> None:
    """The work of a process that a GPU takes down at a check; run in a process of its own."""
    from mlxinfer.metal_kernels.selfcheck import choose

    choose([SAMPLE, BITMASK], gpu=gpu(ends_the_process)[0], folder=folder)
