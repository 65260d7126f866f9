"""C++ to a shared object, kept by the hash of all that goes into it. Knows no Metal.

Objects are kept in a folder of the user's cache, or of the temporary files where there is none.
Each is written under a name of its own and then renamed, so that several processes may build the
same one at once.
"""

import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DARWIN = sys.platform == "darwin"
SHIM, SPACES = HERE / "shim" / "msl", HERE / "shim" / "spaces"
LANGUAGE = (
    "-std=c++20", "-nostdinc++", "-fno-exceptions", "-fno-rtti", "-w", "-ferror-limit=12",
    "-fsigned-char", "-fno-strict-aliasing", "-fno-math-errno", "-ffp-contract=off",
)  # fmt: skip
CODE = ("-fPIC", "-fno-stack-protector", "-fvisibility=hidden", "-fno-asynchronous-unwind-tables")
PLAIN = ("-O2", "-fno-sanitize=all")
KEPT_S = 14 * 24 * 3600.0  # objects that are not used
UNDEFINED = "shift-exponent,integer-divide-by-zero,array-bounds"
CHECKED = (  # calls of the checks in machine/checks.h, and the lines that they are of
    "-O1", "-gline-tables-only", "-fno-vectorize", "-fno-slp-vectorize", "-fno-unroll-loops",
    "-ftrivial-auto-var-init=pattern", "-fno-omit-frame-pointer", "-fstrict-flex-arrays=3",
    "-fsanitize=address", "-fsanitize-recover=address", "-fno-sanitize-address-use-after-scope",
    *(f"-fsanitize={UNDEFINED}", f"-fno-sanitize-recover={UNDEFINED}"),
    "-mllvm", "-asan-instrumentation-with-call-threshold=0", "-mllvm", "-asan-stack=0",
    "-mllvm", "-asan-globals=0", "-mllvm", "-asan-constructor-kind=none",
    "-mllvm", "-asan-opt-same-temp=0",
)  # fmt: skip

MACHINE = ("-std=c++20", "-O2", "-w", *CODE, "-fno-sanitize=all", "-I", str(SHIM))


class CompileError(Exception):
    """A kernel's source is not valid; the message is the compiler's."""


def compiler_is_here() -> bool:
    """Whether the `ziglang` package is installed, and runs on this processor."""
    known = platform.machine() in ("x86_64", "arm64", "aarch64") and os.name == "posix"
    return known and importlib.util.find_spec("ziglang") is not None


requires_compiler = pytest.mark.skipif(
    not compiler_is_here(), reason="ziglang is not installed: no compiler for Metal kernels"
)


@cache
def cache_folder() -> Path:
    """Where objects are kept, made if need be."""
    named = os.environ.get("XDG_CACHE_HOME")
    places = [Path(named)] if named else []
    places += [Path.home() / ".cache", Path(tempfile.gettempdir())]
    for place in places:
        folder = place / "mlxinfer-metal-cpu"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                _forget_unused(folder)
                return folder
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="mlxinfer-metal-cpu-"))


def arithmetic(target: str | None = None) -> tuple[str, ...]:
    """Options that round half and bfloat after each operation, as a GPU does."""
    machine = target or platform.machine()
    if not machine.startswith("x86_64"):
        return ()
    return ("-fexcess-precision=16", *(() if target else ("-march=native",)))


def _forget_unused(folder: Path) -> None:
    """Delete what no process used for two weeks."""
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process was faster
            if path.is_file() and time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink()


def link(*, darwin: bool = DARWIN) -> tuple[str, ...]:
    """Options without a C library: a process has one, and machine/rounding.h has the rest."""
    return ("-shared", "-nostdlib", "-s", *(["-Wl,-undefined,dynamic_lookup"] if darwin else []))


def clang(*arguments: str | Path) -> str:
    """Run the compiler itself, for code without headers of the system; what it says.

    Raises:
        CompileError: it fails.
    """
    return _run("clang", "-fno-spell-checking", *arguments)


def frontend(*arguments: str | Path) -> str:
    """Run the compiler's own front end, in whatever language; what it says.

    Raises:
        CompileError: it fails.
    """
    return _run("clang", "-cc1", *arguments)


def zig(*arguments: str | Path) -> str:
    """Run the compiler with the system's headers, or the linker; what it says.

    Raises:
        CompileError: it fails.
    """
    return _run("c++", *arguments)


def precompiled(*options: str | Path) -> tuple[str, ...]:
    """Options for `clang` beside these: the shim is parsed once, not with each kernel."""

    def make(work: Path, made: Path) -> None:
        header = SHIM.parent / "library.h"
        clang("-x", "c++-header", *options, by_content, header, "-o", made)

    by_content = "-fpch-validate-input-files-content"  # a checkout may have changed the times
    path = kept(".pch", ("shim", *map(str, options)), make)
    return ("-include-pch", str(path), by_content)


def _run(*arguments: str | Path) -> str:
    command = [_zig(), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stderr)
    return done.stderr


def kept(suffix: str, ingredients: Sequence[object], make: Callable[[Path, Path], None]) -> Path:
    """A file that `make(work folder, file)` writes, unless one of the same ingredients is kept."""
    key = hashlib.sha256(repr((_harness(), ingredients)).encode()).hexdigest()[:24]
    path = cache_folder() / f"{key}{suffix}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            fresh = Path(work) / f"made{suffix}"
            make(Path(work), fresh)
            fresh.replace(path)
    elif time.time() - path.stat().st_mtime > KEPT_S / 2:
        path.touch()
    return path


@cache
def _zig() -> str:
    """The program that `python -m ziglang` would start."""
    spec = importlib.util.find_spec("ziglang")
    assert spec.origin is not None, "tests without a compiler are skipped"
    return str(Path(spec.origin).parent / "zig")


@cache
def _harness() -> str:
    """Of everything that shapes what is built."""
    digest = hashlib.sha256(f"{sys.platform} {platform.machine()} {_compiler_version()}".encode())
    sources = [path for path in HERE.glob("*.py") if not path.name.startswith("test_")]
    for path in sorted([*HERE.rglob("*.h"), *HERE.rglob("*.cpp"), *sources]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _compiler_version() -> str:
    from importlib.metadata import version

    return version("ziglang")
