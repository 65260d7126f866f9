"""A kernel as a function of this process. Knows how a kernel is compiled, not how it is called."""

import ctypes
import platform
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from metal_cpu import build
from metal_cpu.call_sites import with_call_sites
from metal_cpu.signature import BUILTINS, Parameter, parameters
from metal_cpu.source import MLX_HEADERS, Kernel, flattened, stretches
from metal_cpu.tokens import tokens
from metal_cpu.transform import transformed

Library = ctypes.CDLL


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled kernel."""

    library: Library
    parameters: tuple[Parameter, ...]


@lru_cache(maxsize=512)
def program(kernel: Kernel, *, checked: bool) -> Program:
    """Compile a kernel, unless it is kept.

    Raises:
        CompileError: its source is not valid.
        ValueError: it has no such function, or a parameter cannot be bound.
    """
    text = flattened(kernel.parts)
    declaring = "".join(piece for piece in stretches(text) if kernel.function in piece)
    found = tuple(parameters(list(tokens(declaring)), kernel.function))
    options = (*build.LANGUAGE, *build.CODE, *build.arithmetic())
    options += build.CHECKED if checked else build.PLAIN

    def make(work: Path, made: Path) -> None:
        source, assembly = work / "kernel.cpp", work / "kernel.s"
        source.write_text(cpp(kernel, text, found))
        shim = build.precompiled(*options, *INCLUDES)
        build.clang("-S", *options, *INCLUDES, *shim, source, "-o", assembly)
        lines = assembly.read_text("latin-1")  # texts in it may hold any byte
        assembly.write_text(with_call_sites(lines, mach_o=build.DARWIN), "latin-1")
        build.zig(*build.link(), assembly, _machine(), "-o", made)

    ingredients = (text, kernel.function, kernel.instance, kernel.constants, options)
    path = build.kept(".so", ingredients, make)
    return Program(ctypes.CDLL(str(path)), found)


INCLUDES = ("-I", build.SHIM, "-I", build.SHIM.parent, "-I", MLX_HEADERS)


def cpp(kernel: Kernel, text: str, found: tuple[Parameter, ...]) -> str:
    """The translation unit of a kernel: library, text, entry."""
    function = kernel.function + (f"<{kernel.instance}>" if kernel.instance else "")
    bindings = ", ".join(f"{{{BUILTINS.index(p.builtin)}, {p.index}}}" for p in found)
    return "\n".join(
        (
            '#include "metal.h"',
            transformed(text, dict(kernel.constants)),
            '#include "entry.h"',
            f"#define MSL_BINDINGS {{{bindings}}}",
            f"MSL_ENTRY(MSL_BINDINGS, {function})\n",
        )
    )


@cache
def _machine() -> Path:
    """The machine's own code, compiled once for all kernels."""

    def make(work: Path, made: Path) -> None:
        build.zig("-c", *build.MACHINE, build.HERE / "machine" / "machine.cpp", "-o", made)

    return build.kept(".o", ("machine", build.MACHINE, platform.machine()), make)
