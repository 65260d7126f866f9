"""`bench quality`: what a size costs in quality, beside every method of mlx-lm that makes one.

Each converter calibrates on the same text, which shares nothing with the held-out one; all results
are run by mlxinfer, so what differs is the weights. mlx-lm works on a float32 copy, since MLX's CPU
backend multiplies bfloat16 a dozen times slower; what it writes becomes bfloat16 as a Mac's would
be. Its DWQ is left out: a step of it, which needs hundreds, takes minutes here.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import mlx.core as mx

from mlxinfer.bench.peer import require_peer
from mlxinfer.bench.report import Report
from mlxinfer.convert.calibration.texts import read_text
from mlxinfer.convert.read import open_source
from mlxinfer.convert.recipes import ConversionOptions, make_recipe
from mlxinfer.convert.run import Conversion
from mlxinfer.errors import InvalidRequestError
from tests.bench.convert import DEMO, ROOT, check_model, quality_table
from tests.bench.convert_quality import measure_folders

SIZES = (3.0, 3.5, 4.0, 4.5, 5.0)
LEARNED = 4.5
UNIFORM = [["-q", "--q-bits", str(b), "--q-group-size", str(g)] for b, g in
           ((3, 64), (3, 32), (4, 64), (4, 32), (5, 64))]  # fmt: skip
MIXED = [["-q", "--quant-predicate", name] for name in
         ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")]  # fmt: skip
CALIBRATED: dict[str, list[list[str]]] = {
    "dynamic_quant": [
        ["--target-bpw", "4.0", "--low-bits", "3", "--high-bits", "5"],
        ["--target-bpw", "4.8", "--low-bits", "4", "--high-bits", "6"],
        ["--target-bpw", "5.0", "--low-bits", "4", "--high-bits", "6"],
    ],
    "awq": [["--bits", "3"], ["--bits", "4"]],
    "gptq": [["--bits", "3"], ["--bits", "4"], ["--bits", "4", "--fallback-bits", "4"]],
}
LAUNCHER = """
from tests.bench.blas import preload_openblas
preload_openblas()
from {module} import main
main()
"""
SMALL_SIZES, TIMEOUT_S = (4.5,), 900
CALIBRATION = Path(".cache/mlx-lm/calibration_v5.txt")  # in the home folder, where mlx-lm looks


def run(
    *,
    model: Path | None = None,
    learn: float | None = None,
    small: bool = False,
    peer: bool = True,
) -> Report:
    """Measure.

    Args:
        model: a folder with unquantised weights; None: the demo model's, of a checkout.
        learn: minutes for `--learn` at one of the sizes; None: it is left out.
        small: one size on few tokens.
        peer: also mlx-lm.

    Raises:
        ModelNotFoundError: no such folder.
    """
    if peer:
        require_peer()
    folder = DEMO if model is None else model
    check_model(folder)
    length, limit = (128, 2) if small else (512, 16)
    with TemporaryDirectory() as scratch:
        folders = _converted(folder.resolve(), Path(scratch), learn=learn, small=small, peer=peer)
        recipes, perplexity, num_tokens = measure_folders(
            folder, folders, length=length, limit=limit
        )
    table = quality_table(recipes, perplexity, num_tokens, length)
    data = {"tokens": num_tokens, "source_perplexity": perplexity}
    return Report("quality", [table], {**data, "recipes": [asdict(r) for r in recipes]})


def _converted(
    model: Path, scratch: Path, *, learn: float | None, small: bool, peer: bool
) -> Iterator[tuple[str, str, Path]]:
    ours: list[tuple[float, bool, float | None]] = []
    for size in SMALL_SIZES if small else SIZES:
        ours += [(size, False, None), (size, True, None)]
    if learn is not None:
        ours.append((LEARNED, True, learn))
    for number, (size, feedback, minutes) in enumerate(ours):
        out = scratch / f"ours-{number}"
        if _ours(model, out, size, feedback=feedback, minutes=minutes):
            more = "" if feedback else " --rounding nearest"
            more += "" if minutes is None else f" --learn {minutes:g}"
            yield "mlxinfer", f"--target-bpw {size:g}{more}", out
    wide = _cast(model, scratch / "float32", mx.float32) if peer else model
    for number, (program, options) in enumerate(_peers(small) if peer else ()):
        out = scratch / f"theirs-{number}"
        paths = ["--hf-path" if program == "convert" else "--model", str(wide)]
        if _theirs(program, [*paths, "--mlx-path", str(out), *options], scratch):
            _cast(out, out, mx.bfloat16)
            yield "mlx-lm", " ".join([program, *options]), out


def _cast(folder: Path, out: Path, dtype: mx.Dtype) -> Path:
    """A checkpoint whose floats have another dtype."""
    out.mkdir(exist_ok=True)
    for path in sorted(folder.iterdir()):
        if path.suffix != ".safetensors":
            if out != folder and path.is_file():
                shutil.copyfile(path, out / path.name)
            continue
        stored = cast(dict[str, mx.array], mx.load(str(path)))
        arrays = {
            name: array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
            for name, array in stored.items()
        }
        mx.eval(arrays)
        mx.save_safetensors(str(out / path.name), arrays, metadata={"format": "mlx"})
    return out


def _peers(small: bool) -> list[tuple[str, list[str]]]:
    if small:
        return [("convert", UNIFORM[2]), ("gptq", CALIBRATED["gptq"][1])]
    calibrated = [(name, each) for name, options in CALIBRATED.items() for each in options]
    return [*(("convert", options) for options in [*UNIFORM, *MIXED]), *calibrated]


def _ours(model: Path, out: Path, size: float, *, feedback: bool, minutes: float | None) -> bool:
    """Whether any formats are so small."""
    options = ConversionOptions(
        recipe=make_recipe("4bit"),
        calibration=read_text(None),
        target_bpw=size,
        error_feedback=feedback,
        learn_minutes=minutes,
    )
    source = open_source(model)
    try:
        Conversion(source, out, options).run()
    except InvalidRequestError:
        return False
    finally:
        source.close()
    return True


def _theirs(program: str, arguments: list[str], home: Path) -> bool:
    """Whether it came to an end: not every method takes every architecture."""
    text = home / CALIBRATION
    text.parent.mkdir(parents=True, exist_ok=True)
    whole = read_text(None)
    text.write_text(whole[: len(whole) * 2 // 3], encoding="utf-8")  # the part that we calibrate on
    module = "mlx_lm.convert" if program == "convert" else f"mlx_lm.quant.{program}"
    command = [sys.executable, "-c", LAUNCHER.format(module=module), *arguments]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT)},
            cwd=home,  # where it leaves files of its own
            capture_output=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
