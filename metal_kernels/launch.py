"""A custom Metal kernel and one call of it, and who runs calls. Knows no kernel and no attention.

A kernel is a file `name.metal` with a template function; MLX compiles it with a signature of its
own around a body that calls that function. Every call goes through one `Device`: Metal on a Mac;
in the tests a machine that executes the same source on the CPU.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

import mlx.core as mx

Size = tuple[int, int, int]
TemplateValue = int | bool | mx.Dtype


@dataclass(frozen=True, slots=True, eq=False)
class MetalKernel:
    """What MLX needs to compile a kernel. Equal to itself alone: its text is long.

    Args:
        name: of the kernel, and of `name.metal`, whose text comes before the body.
        inputs, outputs: names of the buffers, as the body calls them.
        body: the call of the template function. MLX passes `x_shape`, `x_strides` and thread
            positions where the body mentions them.
        includes: other files of this folder that come before `name.metal`.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    includes: tuple[str, ...] = ()

    @property
    def header(self) -> str:
        """The text of the kernel's files, in order."""
        return "\n".join(_source(name) for name in (*self.includes, f"{self.name}.metal"))

    def __call__(
        self,
        inputs: Sequence[mx.array],
        *,
        template: Sequence[tuple[str, TemplateValue]],
        grid: Size,
        threadgroup: Size,
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """One dispatch; lazy on Metal.

        Args:
            inputs: row-contiguous; whatever is not is copied first.
            template: values that are compiled in: each set of them is a variant of the kernel.
            grid: in threads.
            threadgroup: threads of one threadgroup.
        """
        launch = Launch(
            self,
            list(inputs),
            tuple(template),
            grid,
            threadgroup,
            list(output_shapes),
            list(output_dtypes),
        )
        return _devices[-1].run(launch)


@dataclass(slots=True)
class Launch:
    """One call of a kernel."""

    kernel: MetalKernel
    inputs: list[mx.array]
    template: tuple[tuple[str, TemplateValue], ...]
    grid: Size
    threadgroup: Size
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[mx.Dtype] = field(default_factory=list)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the function that `mx.fast.metal_kernel` returns."""
        return {
            "inputs": self.inputs,
            "template": list(self.template),
            "grid": self.grid,
            "threadgroup": self.threadgroup,
            "output_shapes": self.output_shapes,
            "output_dtypes": self.output_dtypes,
        }


class Device(Protocol):
    """Who runs kernels."""

    def run(self, launch: Launch) -> list[mx.array]:
        """The outputs, evaluated or not."""
        ...


class Metal:
    """The GPU, through MLX."""

    def run(self, launch: Launch) -> list[mx.array]:
        """Lazy outputs.

        Raises:
            RuntimeError: there is no Metal here.
        """
        return list(compiled(launch.kernel)(**launch.arguments()))


@cache
def compiled(kernel: MetalKernel) -> Any:
    """MLX's callable of a kernel; nothing is compiled before its first call is evaluated."""
    return mx.fast.metal_kernel(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.body,
        header=kernel.header,
    )


@contextmanager
def running_on(device: Device) -> Iterator[None]:
    """Send every call to `device` meanwhile, from whichever thread it comes."""
    _devices.append(device)
    try:
        yield
    finally:
        _devices.remove(device)


_devices: list[Device] = [Metal()]


@cache
def _source(name: str) -> str:
    return files(__package__).joinpath(name).read_text()
