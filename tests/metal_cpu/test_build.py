"""Objects are kept by what goes into them; several processes may make one; other systems build."""

import ctypes
import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from metal_cpu import build, requires_compiler
from metal_cpu.build import clang, kept, zig
from metal_cpu.capture import UTILITIES
from metal_cpu.mlx_kernels import FOLDER
from metal_cpu.program import INCLUDES, cpp, with_call_sites
from metal_cpu.signature import parameters
from metal_cpu.source import Kernel, Part, flattened
from metal_cpu.tokens import tokens

pytestmark = requires_compiler
TARGETS = ["aarch64-macos", "x86_64-macos", "aarch64-linux-gnu", "x86_64-linux-gnu"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    return tmp_path


def make_at_once(name: str, folder: Path, start: object) -> str:
    build.cache_folder = lambda: folder  # type: ignore[assignment]

    def make(work: Path, path: Path) -> None:
        path.write_text("whole" * 100_000)

    start.wait()  # type: ignore[attr-defined]
    return kept(".txt", (name,), make).read_text()


def test_several_processes_may_make_the_same(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager, context.Pool(3) as pool:
        start = manager.Barrier(3)
        texts = pool.starmap(make_at_once, [("c", folder, start)] * 3)
    assert set(texts) == {"whole" * 100_000}
    assert len(list(folder.iterdir())) == 1


def test_conversions_that_a_processor_may_lack(tmp_path: Path) -> None:
    """All halves, and floats around every place where rounding changes, against NumPy."""
    source = tmp_path / "rounding.cpp"
    source.write_text(
        '#include "rounding.h"\n'
        "extern \"C\" __attribute__((visibility(\"default\"))) void convert(\n"
        "    const float* x, long n, unsigned short* halves, unsigned short* bfloats,\n"
        "    float* back) {\n"
        "  for (long i = 0; i < n; i++) {\n"
        "    halves[i] = machine::bits_of_half(x[i]);\n"
        "    bfloats[i] = machine::bits_of_bfloat(x[i]);\n"
        "    back[i] = machine::float_of_half(halves[i]);\n"
        "  }\n}\n"
    )  # fmt: skip
    library = tmp_path / "rounding.so"
    places = ("-I", build.HERE / "machine", "-I", str(build.SHIM))
    options = ("-std=c++20", "-O1", *build.CODE, "-fno-sanitize=all", *build.link())
    zig(*options, *places, source, "-o", library)
    halves = np.arange(0x10000, dtype=np.uint16).view(np.float16)
    exact = halves[np.isfinite(halves)].astype(np.float32)
    near = np.concatenate([exact * np.float32(1 + d * 2.0**-12) for d in (-1, 0, 1, 2)])
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 2**32, 50_000, dtype=np.uint32).view(np.float32)
    edges = [np.inf, -np.inf, np.nan, 65519.996, 65520, 6e-8, 3e-8]
    x = np.concatenate([near, anything, np.array(edges, np.float32)])
    got, got_bf, back = (np.empty(x.size, t) for t in (np.uint16, np.uint16, np.float32))
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (got, got_bf, back)]
    ctypes.CDLL(str(library)).convert(
        ctypes.c_void_p(x.ctypes.data), ctypes.c_long(x.size), *pointers
    )
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(np.float16)
    number = ~np.isnan(x)
    assert (got[number] == expected.view(np.uint16)[number]).all()
    assert np.isnan(got[~number].view(np.float16)).all()
    assert np.array_equal(back, got.view(np.float16).astype(np.float32), equal_nan=True)
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    assert (got_bf[number] == rounded[number]).all()


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("checked", [False, True])
def test_kernels_build_for_every_system(target: str, checked: bool, tmp_path: Path) -> None:
    text = f'#include "{FOLDER}/sdpa_vector.h"\n'
    kernel = Kernel("sdpa_vector", (UTILITIES, Part("sdpa", text)), "bfloat16_t, 64, 64")
    flat = flattened(kernel.parts)
    declared = tuple(parameters(list(tokens(flat)), kernel.function))
    source, assembly, machine = (tmp_path / name for name in ("k.cpp", "k.s", "m.o"))
    source.write_text(cpp(kernel, flat, declared))
    options = (*build.LANGUAGE, *build.CODE, *build.arithmetic(target), "-target", target)
    clang("-S", *options, *(build.CHECKED if checked else build.PLAIN), *INCLUDES, source, "-o",
          assembly)  # fmt: skip
    lines = with_call_sites(assembly.read_text("latin-1"), mach_o="macos" in target)
    assert ("msl_site_5:" in lines) is checked
    assembly.write_text(lines, "latin-1")
    code = build.HERE / "machine" / "machine.cpp"
    zig("-c", *build.MACHINE, "-target", target, code, "-o", machine)
    zig("-target", target, *build.link(darwin="macos" in target), assembly, machine, "-o",
          tmp_path / "k.so")  # fmt: skip
    magic = (tmp_path / "k.so").read_bytes()[:4]
    assert magic == (b"\xcf\xfa\xed\xfe" if "macos" in target else b"\x7fELF")
