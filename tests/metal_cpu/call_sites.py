"""Adds to assembly a table of where in the source each call of a check is. Knows no machine.

Compilers say in assembly which line the next instructions are of (`.loc`), in the same words on
every system; so the lines of a table need no debugger's format, only a label after each call.
"""

import re
from collections.abc import Iterator

_FILE = re.compile(r'\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"')
_LINE = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
_CALL = re.compile(r"\s*(?:callq?|bl)\s+_?(?:__asan_|_*msl_atomic)")
SHIM_FILES = {"simd.h", "matrix.h", "atomics.h", "math.h", "types.h", "traits.h", "machine.h"}


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
        if found := _FILE.match(line):
            files[found[1]] = found[2].rsplit("/", 1)[-1]
        elif found := _LINE.match(line):
            file, number = files.get(found[1], ""), int(found[2])
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
