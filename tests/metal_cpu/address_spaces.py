"""Metal's address spaces, as clang's C++ for OpenCL has them: of pointers, references and `this`,
in casts, and in templates once a kernel uses them. Runs nothing.

Apple's compiler is a clang too, and applies the same rules. `shim/spaces` declares Metal's library.
Bare pointers pass, since they are generic in OpenCL, and so does C++17: `lint` refuses both.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from metal_cpu import build
from metal_cpu.capture import UTILITIES
from metal_cpu.report import Fault
from metal_cpu.source import Kernel, flattened
from metal_cpu.transform import transformed

OPTIONS = (
    "-triple", "spirv64", "-x", "clcpp", "-cl-std=clc++2021", "-ferror-limit", "40",
    "-cl-ext=-cl_khr_fp64,-__opencl_c_fp64,-__opencl_c_program_scope_global_variables,"
    "-__opencl_c_device_enqueue,-__opencl_c_pipes",
    "-Wno-everything", "-Werror=c++11-narrowing", "-fno-caret-diagnostics",
    "-Werror=implicit-float-conversion", "-Wno-implicit-int-float-conversion",
    "-fno-elide-type", "-fno-spell-checking", "-fvalidate-ast-input-files-content",
    *("-I", build.SPACES, "-I", build.SPACES.parent),
)  # fmt: skip
LIBRARY = "metal.h"
_MESSAGE = re.compile(r"^(?:.*/)?([^/:\n]+):(\d+):\d+: (fatal error|error|note): (.*)$", re.M)
# A float may become a half unasked, but no bfloat.
SMALLER_FLOATS = re.compile(r"loses floating-point precision: (?!.* to .*__bf16')")
# Apple's compiler takes these, as MLX's own kernels show.
_CLASS = r"'(?:const )?(?:__\w+ )?(?P<{0}>[\w:<>, ]+)'(?: \(aka '[^']*'\))?"
ALLOWED = re.compile(
    # `?:` of two objects of one class, of which one is on its way
    rf"(?:incompatible operand types \(|conditional expression is ambiguous; )"
    rf"{_CLASS.format('one')} and '(?:const )?(?:__\w+ )?(?P=one)'"
    # a member of an object on its way, which for clang is in no address space
    r"|cannot initialize object parameter of type '(?:const )?__private (?P<own>[\w:<>, ]+)' with"
    r" an expression of type '(?P=own)'"
    # a constant of a class, added to a pointer
    r"|invalid operands to binary expression .*integral_constant<"
    # a reference to a value on its way, which `msl_references` has for our own kernels
    r"|reference of type 'const __private .*' cannot bind to a temporary object because of address"
)


def refused(kernel: Kernel) -> list[Fault]:
    """What clang refuses of a kernel: its first message of each line."""
    prefix = UTILITIES in kernel.parts
    text = flattened(kernel.parts[prefix:], behind=(UTILITIES,) if prefix else ())
    function = kernel.function + (f"<{kernel.instance}>" if kernel.instance else "")

    def make(work: Path, made: Path) -> None:
        source = work / "kernel.clcpp"
        source.write_text(transformed(text, dict(kernel.constants), lint=True) + _use(function))
        made.write_text(_said("-fsyntax-only", "-include-pch", library(), source))

    said = build.kept(".txt", ("spaces", text, function, kernel.constants, OPTIONS), make)
    first: dict[tuple[str, int], Fault] = {}
    for fault in _faults(said.read_text()):
        first.setdefault((fault.file, fault.line), fault)
    return list(first.values())


def _faults(said: str) -> Iterator[Fault]:
    """Errors; of one in the library, a later note names the place that asked for it."""
    asking: str | None = None
    for file, line, severity, message in _MESSAGE.findall(said):
        if severity == "note" and not (asking and "requested here" in message):
            continue
        asking = asking if severity == "note" else message
        if file == LIBRARY or not asking:
            continue
        if not ALLOWED.search(asking) and not SMALLER_FLOATS.search(asking):
            yield Fault("compiler", asking, file, int(line))
        asking = None


def _use(function: str) -> str:
    """Templates are checked once something uses them: the address of the function."""
    return f"""
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable
void msl_use() {{ auto kernel_function = &{function}; }}
"""


@cache
def library() -> Path:
    """Metal's library, and what MLX puts before every kernel, as clang has parsed them."""
    text = '#include "metal.h"\n' + transformed(flattened((UTILITIES,)), {}, lint=True)
    header = build.kept(".h", ("spaces", text), lambda _, made: _written(made, text))

    def make(_: Path, made: Path) -> None:
        build.frontend(*OPTIONS, "-emit-pch", header, "-o", made)

    return build.kept(".pch", ("spaces", str(header), OPTIONS), make)


def _said(*arguments: str | Path) -> str:
    try:
        return build.frontend(*OPTIONS, *arguments)
    except build.CompileError as error:
        return str(error)


def _written(file: Path, text: str) -> None:
    file.write_text(text)
