"""What Metal's compiler would refuse, checked without running anything. Knows no machine.

MLX compiles kernels as Metal 3.1 and 3.2 on macOS 14 and 15, which are C++14; later systems take
more. clang reads them twice: as C++14, and as C++ for OpenCL (`address_spaces`); `msl_rules` and
`msl_references` have the rest.
"""

import re
from functools import lru_cache
from pathlib import Path

from metal_cpu import address_spaces, build, msl_rules
from metal_cpu.msl_references import reference_faults
from metal_cpu.program import INCLUDES
from metal_cpu.report import Fault
from metal_cpu.source import Kernel, Part, flattened
from metal_cpu.tokens import after, before, code_of, text_at
from metal_cpu.transform import transformed

_MESSAGE = re.compile(r"^(?:.*/)?([^/:\n]+):(\d+):\d+: (error|warning): (.*)$", re.MULTILINE)
OPTIONS = (
    "-fsyntax-only", "-std=c++14", "-nostdinc++", "-DMSL_LINT", "-ferror-limit=40",
    "-Wno-everything", "-pedantic-errors", "-Wno-error=c++17-extensions", "-Werror=vla",
    "-Wc++17-extensions", "-Wc++20-extensions", "-Wimplicit-float-conversion",
    "-Wno-implicit-int-float-conversion",
)  # fmt: skip
# Headers of the shim and of MLX are the system's: C++20 in them is no fault.
SYSTEM = tuple("-isystem" if option == "-I" else option for option in INCLUDES)
ALLOWED = ("constexpr if is a C++17 extension",)  # Metal 3 has it, with a warning
IGNORED_FILES = ("utils.h",)  # MLX's own takes arrays as parameters, which only Metal allows

SPACES = {"device", "constant", "threadgroup", "thread"}


@lru_cache(maxsize=512)
def lint(kernel: Kernel) -> list[Fault]:
    """Every fault that shows without running: pointers that lose their address space, stores to
    constants, floats that become bfloats unasked, C++ beyond C++14, what no call or cast of Metal's
    takes, and what `msl_rules` finds.
    """
    text = flattened(kernel.parts)
    function = kernel.function + (f"<{kernel.instance}>" if kernel.instance else "")

    def make(work: Path, made: Path) -> None:
        source = work / "kernel.cpp"
        lines = (
            '#include "metal.h"',
            transformed(text, dict(kernel.constants), lint=True),
            f"auto* msl_kernel = &{function};\n",
        )
        source.write_text("\n".join(lines))
        try:
            shim = build.precompiled(*OPTIONS[1:], *SYSTEM)
            made.write_text(build.clang(*OPTIONS, *SYSTEM, *shim, source))
        except build.CompileError as error:
            made.write_text(str(error))

    ingredients = ("lint", text, function, kernel.constants, OPTIONS)
    said = build.kept(".txt", ingredients, make).read_text()
    refused = [
        Fault("address space", message, file, int(line))
        for file, line, severity, message in _MESSAGE.findall(said)
        if severity == "error" or "__bf16'" in message or "extension" in message
        if file not in IGNORED_FILES and not message.startswith(ALLOWED)
    ]
    places = {(fault.file, fault.line) for fault in refused}
    refused += [f for f in address_spaces.refused(kernel) if (f.file, f.line) not in places]
    refused += msl_rules.faults(kernel.parts)
    refused += reference_faults(kernel.parts)
    return [*refused, *(fault for part in kernel.parts for fault in _bare_pointers(part))]


@lru_cache(maxsize=128)
def _bare_pointers(part: Part) -> list[Fault]:
    """Pointer types in casts that name no address space: clang lets them change it."""
    pieces = code_of(part.text)
    pointers = []
    for index, piece in enumerate(pieces):
        if piece.text != "*" or text_at(pieces, after(pieces, index)) != ")":
            continue
        words: list[str] = []
        place = before(pieces, index)
        while place >= 0 and text_at(pieces, place) not in ("(", ",", ";"):
            words.append(pieces[place].text)
            place = before(pieces, place)
        if not SPACES & set(words):
            message = f"({' '.join(reversed(words))} *) names no address space"
            pointers.append(Fault("address space", message, part.file, piece.line))
    return pointers
