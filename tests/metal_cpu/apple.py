"""Apple's compiler on the kernels that `mlxinfer doctor --kernels` looks at; no GPU is needed.

`PYTHONPATH=tests python -m metal_cpu.apple FOLDER` on a Mac with Xcode writes each library to
FOLDER as MLX would compose it, compiles it as each version of Metal that MLX picks, and writes what
was said to FOLDER/compiled.txt. The exit status is 1 where any is refused.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import mlx.core as mx

from metal_cpu.capture import UTILITIES, capture
from metal_cpu.source import MLX_HEADERS
from mlxinfer.metal_kernels.launch import Launch, running_on
from mlxinfer.metal_kernels.selfcheck import KINDS

VERSIONS = ("metal3.1", "metal3.2", "metal4.0")  # of macOS 14, 15 and 26
COMPILER = ("xcrun", "-sdk", "macosx", "metal")
LINES = 12  # of what is said about a library


class Writer:
    """A device that runs nothing: its outputs are zeros. It writes down each library once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, launch: Launch, inputs: Sequence[mx.array]) -> list[mx.array]:
        parts = capture(launch, inputs).kernel.parts
        texts = [f'#line 1 "{p.file}"\n{p.text}' for p in parts if p is not UTILITIES]
        text = "\n".join([UTILITIES.text, *texts])
        name = f"{launch.kernel.name}_{sha256(text.encode()).hexdigest()[:12]}.metal"
        (self.folder / name).write_text(text)
        shapes = zip(launch.output_shapes, launch.output_dtypes, strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in shapes]


def libraries(folder: Path) -> list[Path]:
    """Write the libraries of all samples, and return their files."""
    with running_on(Writer(folder)):
        for kind in KINDS.values():
            for variant in kind.samples:
                kind.case(variant).kernel()
    return sorted(folder.glob("*.metal"))


def compiled(file: Path, compiler: Sequence[str] = COMPILER) -> Iterator[tuple[str, str]]:
    """Versions of Metal that refuse a library, and what the compiler says."""
    for version in VERSIONS:
        options = (f"-std={version}", "-w", "-fsyntax-only", "-I", str(MLX_HEADERS))
        done = subprocess.run([*compiler, *options, str(file)], capture_output=True, text=True)
        if done.returncode:
            yield version, "\n".join(done.stderr.splitlines()[:LINES])


def main(folder: Path, compiler: Sequence[str] = COMPILER) -> int:
    """The exit status."""
    files = libraries(folder)
    with ThreadPoolExecutor() as pool:
        result = list(pool.map(lambda file: list(compiled(file, compiler)), files))
    lines = [
        f"{file.name} {version}: refused\n{said}"
        for file, refused in zip(files, result, strict=True)
        for version, said in refused
    ]
    lines.append(f"{sum(not refused for refused in result)} of {len(files)} libraries compile")
    (folder / "compiled.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return int(any(result))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
