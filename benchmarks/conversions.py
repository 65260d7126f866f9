"""Conversions of mlxinfer and mlx-lm: size, quality, and the cost of each as a process."""

import sys
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.processes import run_python
from benchmarks.quality import HeldOut
from mlxinfer.models.config import load_config
from mlxinfer.models.weights.files import read_headers

Options = dict[str, list[str]]  # of the command, by label
OURS: Options = {
    "--fast": ["--fast"],
    "4bit": [],
    "--target-bpw 4.5": ["--target-bpw", "4.5"],
    "8bit": ["--recipe", "8bit"],
}
KEPT = ["--keep-format"]  # of a source that is quantised
THEIRS: Options = {
    f"{bits} bits": ["-q", "--q-bits", str(bits), "--q-group-size", "64"] for bits in (4, 5, 6, 8)
}


def made(
    source: Path, quantised: Path | None, out: Path, *, peer: bool
) -> Iterator[dict[str, Any]]:
    """Convert, each in a process; yields the label, the folder and the cost.

    Args:
        source: a folder of unquantised weights.
        quantised: the file that they are from, whose formats are kept in one row; None: no row.
        out: for the folders.
        peer: also mlx-lm.
    """
    ours = ["mlxinfer.cli", "convert"]
    commands = {
        f"mlxinfer {label}": [*ours, str(source), "{}", *how] for label, how in OURS.items()
    }
    if quantised is not None:
        commands["mlxinfer --keep-format"] = [*ours, str(quantised), "{}", *KEPT]
    theirs = ["mlx_lm", "convert", "--hf-path", str(source), "--mlx-path", "{}"]
    for label, options in THEIRS.items() if peer else ():
        commands[f"mlx-lm {label}"] = [*theirs, *options]
    for number, (label, command) in enumerate(commands.items()):
        folder = out / str(number)
        arguments = [str(folder) if word == "{}" else word for word in command]
        yield {
            "label": label,
            "folder": folder,
            **run_python("-m", "benchmarks.blas", *arguments).cost,
        }


def measured(
    source: Path,
    quantised: Path | None,
    given: Sequence[Path],
    held_out: HeldOut,
    scratch: Path,
    *,
    peer: bool,
) -> list[dict[str, Any]]:
    """Size and quality of each conversion: of the folders given, else of all that are made here."""
    folders: list[dict[str, Any]] = [{"label": path.name, "folder": path} for path in given]
    results = []
    for one in folders or made(source, quantised, scratch, peer=peer):
        folder = one.pop("folder")
        quality = _quality(folder, held_out, scratch)
        results.append({**one, "bits": bits_per_weight(folder), **quality})
        print(results[-1], file=sys.stderr, flush=True)
    return results


def _quality(folder: Path, held_out: HeldOut, scratch: Path) -> dict[str, float]:
    """Of the values in float32: products with codes take minutes on a CPU."""
    with TemporaryDirectory(dir=scratch) as name:
        values = Path(name) / "values"
        unpack = ["mlxinfer.cli", "convert", str(folder), str(values)]
        run_python("-m", *unpack, "--recipe", "fp32", "--fast")
        return held_out.quality(values)


def bits_per_weight(folder: Path) -> float:
    """Bits of all arrays over the weights that they stand for, counted from the files."""
    bits = weights = 0
    formats = load_config(folder).quantization
    for header in read_headers(folder).values():
        for name, info in header.items():
            bits += (info.end - info.start) * 8
            path = name.removesuffix(".weight")
            if f"{path}.scales" in header:
                assert formats is not None
                weights += prod(info.shape) * 32 // formats.of(path).bits
            elif not name.endswith((".scales", ".biases")):
                weights += prod(info.shape)
    return bits / weights
