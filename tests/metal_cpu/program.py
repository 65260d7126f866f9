"""A kernel as a function of this process. Knows how a kernel is compiled, not how it is called.

Compilers say in assembly which line the next instructions are of (`.loc`), in the same words on
every system; so a table of where in the source each check is called needs no debugger's format,
only a label after each call.
"""

import ctypes
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from metal_cpu import build
from metal_cpu.signature import BUILTINS, Parameter, parameters
from metal_cpu.source import MLX_HEADERS, Kernel, flattened, stretches
from metal_cpu.tokens import tokens
from metal_cpu.transform import transformed

Library = ctypes.CDLL
_FILE = re.compile(r'\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"')
_LINE = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
_CALL = re.compile(r"\s*(?:callq?|bl)\s+_?(?:__asan_|_*msl_atomic)")
SHIM_FILES = {"simd.h", "matrix.h", "atomics.h", "math.h", "types.h", "traits.h", "machine.h"}
INCLUDES = ("-I", build.SHIM, "-I", build.SHIM.parent, "-I", MLX_HEADERS)


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
    declared = tuple(parameters(list(tokens(declaring)), kernel.function))
    options = (*build.LANGUAGE, *build.CODE, *build.arithmetic())
    options += build.CHECKED if checked else build.PLAIN

    def make(work: Path, made: Path) -> None:
        source, assembly = work / "kernel.cpp", work / "kernel.s"
        source.write_text(cpp(kernel, text, declared))
        shim = build.precompiled(*options, *INCLUDES)
        build.clang("-S", *options, *INCLUDES, *shim, source, "-o", assembly)
        lines = assembly.read_text("latin-1")  # texts in it may hold any byte
        assembly.write_text(with_call_sites(lines, mach_o=build.DARWIN), "latin-1")
        build.zig(*build.link(), assembly, _machine(), "-o", made)

    ingredients = (text, kernel.function, kernel.instance, kernel.constants, options)
    path = build.kept(".so", ingredients, make)
    return Program(ctypes.CDLL(str(path)), declared)


def cpp(kernel: Kernel, text: str, actual: tuple[Parameter, ...]) -> str:
    """The translation unit of a kernel: library, text, entry."""
    function = kernel.function + (f"<{kernel.instance}>" if kernel.instance else "")
    bindings = ", ".join(f"{{{BUILTINS.index(p.builtin)}, {p.index}}}" for p in actual)
    return "\n".join(
        (
            '#include "metal.h"', transformed(text, dict(kernel.constants)), '#include "entry.h"',
            f"#define MSL_BINDINGS {{{bindings}}}", f"MSL_ENTRY(MSL_BINDINGS, {function})\n",
        )
    )  # fmt: skip


@cache
def _machine() -> Path:
    """The machine's own code, compiled once for all kernels."""

    def make(work: Path, made: Path) -> None:
        build.zig("-c", *build.MACHINE, build.HERE / "machine" / "machine.cpp", "-o", made)

    return build.kept(".o", ("machine", build.MACHINE, platform.machine()), make)


def with_call_sites(assembly: str, *, mach_o: bool) -> str:
    """The assembly with `msl_call_sites`: address, file and line of each call of a check.

    A call in the library's own code has the line of the kernel's code before it.
    """
    prefix = "L" if mach_o else ".L"
    files: dict[str, str] = {}
    sites: list[tuple[str, int]] = []
    place, lines = ("", 0), []
    for line in assembly.splitlines():
        lines.append(line)
        if match := _FILE.match(line):
            files[match[1]] = match[2].rsplit("/", 1)[-1]
        elif match := _LINE.match(line):
            file, number = files.get(match[1], ""), int(match[2])
            if number and file not in SHIM_FILES and file != "entry.h":
                place = (file, number)
        elif _CALL.match(line):
            lines.append(f"{prefix}msl_site_{len(sites)}:")
            sites.append(place)
    return "\n".join([*lines, *_table(sites, prefix, mach_o=mach_o)]) + "\n"


def _table(sites: list[tuple[str, int]], prefix: str, *, mach_o: bool) -> Iterator[str]:
    names = sorted({file for file, _ in sites})
    symbol = "_msl_call_sites" if mach_o else "msl_call_sites"
    yield ".section __DATA,__const" if mach_o else '.section .data.rel.ro.msl,"aw"'
    yield f"  .globl {symbol}"
    if not mach_o:
        yield f"  .hidden {symbol}"
    yield "  .p2align 3"
    yield f"{symbol}:"
    for number, (file, line) in enumerate(sites):
        yield f"  .quad {prefix}msl_site_{number}, {prefix}msl_file_{names.index(file)}, {line}"
    yield "  .quad 0, 0, 0"
    for number, name in enumerate(names):
        yield f"{prefix}msl_file_{number}:"
        yield f'  .asciz "{name}"'
