"""Runs Metal kernels on the CPU, as MLX would hand them to Metal, and says what is wrong with them.

README.md has the page that explains it.
"""

from metal_cpu.build import compiler_is_here, requires_compiler
from metal_cpu.device import MetalCPU
from metal_cpu.report import Fault, KernelStopped, Report, Traffic

__all__ = [
    "Fault",
    "KernelStopped",
    "MetalCPU",
    "Report",
    "Traffic",
    "compiler_is_here",
    "requires_compiler",
]
