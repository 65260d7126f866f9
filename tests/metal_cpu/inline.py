"""Kernels with their text in a test, not in a file; and one launch of them. Knows no device."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from metal_cpu.device import MetalCPU
from metal_cpu.report import Size
from mlxinfer.metal_kernels.launch import Launch, MetalKernel, TemplateValue


@dataclass(frozen=True, slots=True)
class InlineKernel(MetalKernel):
    """A kernel with its text."""

    text: str = ""

    @property
    def header(self) -> str:
        """The text."""
        return self.text


@dataclass(frozen=True, slots=True)
class Example:
    """A kernel and a launch of it with one output.

    Args:
        body: calls the kernel's function, which `text` holds.
    """

    text: str
    body: str
    inputs: dict[str, mx.array]
    grid: Size
    threadgroup: Size
    output_shape: tuple[int, ...]
    output_dtype: mx.Dtype = mx.float32
    template: Sequence[tuple[str, TemplateValue]] = ()

    def launch(self) -> Launch:
        """The call, but for its inputs."""
        return Launch(
            InlineKernel("example", tuple(self.inputs), ("out",), self.body, text=self.text),
            self.template,
            self.grid,
            self.threadgroup,
            [self.output_shape],
            [self.output_dtype],
        )

    def run(self, machine: MetalCPU) -> mx.array:
        """The output."""
        (out,) = machine(self.launch(), list(self.inputs.values()))
        return out

    def line_of(self, fragment: str, replaced: dict[str, str]) -> int:
        """Number of the line of the text, after replacements, that holds a fragment."""
        text = self.text
        for old, new in replaced.items():
            text = text.replace(old, new)
        (line,) = [n for n, row in enumerate(text.splitlines(), 1) if fragment in row]
        return line
