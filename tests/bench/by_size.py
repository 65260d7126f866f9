"""`bench quality`: what a size costs in quality, beside every method of mlx-lm that makes one.

Each converter calibrates on the same text, which shares nothing with the held-out one; all results
are run by mlxinfer, so what differs is the weights. On MLX's CPU backend products of bfloat16 and
of quantised matrices are many times slower than those of float32: both work on a float32 copy,
scales become bfloat16 as a Mac's would be, and outputs are compared as the float32 values that
their codes stand for.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx

from mlxinfer.bench.peer import require_peer
from mlxinfer.bench.report import Report
from mlxinfer.convert.calibration.texts import read_text
from mlxinfer.convert.quantise import dequantised
from mlxinfer.convert.read import open_source
from mlxinfer.convert.recipes import ConversionOptions, make_recipe
from mlxinfer.convert.run import Conversion
from mlxinfer.errors import InvalidRequestError
from mlxinfer.models.config import load_config
from tests.bench.convert import DEMO, ROOT, check_model, quality_table
from tests.bench.convert_quality import measure_folders

SIZES = (3.0, 3.5, 4.0, 4.5, 5.0)
LEARNED = 4.5
UNIFORM = [["-q", "--q-bits", str(b), "--q-group-size", str(g)] for b, g in
           ((3, 64), (3, 32), (4, 64), (4, 32))]  # fmt: skip
MIXED = [["-q", "--quant-predicate", name] for name in ("mixed_3_6", "mixed_4_6")]
CALIBRATED: dict[str, list[list[str]]] = {
    "dynamic_quant": [
        ["--target-bpw", "3.5", "--low-bits", "3", "--high-bits", "5"],
        ["--target-bpw", "4.0", "--low-bits", "3", "--high-bits", "5"],
        ["--target-bpw", "4.5", "--low-bits", "3", "--high-bits", "5"],
        ["--target-bpw", "5.0", "--low-bits", "4", "--high-bits", "6"],
    ],
    "awq": [["--bits", b, "--num-samples", "16", "--n-grid", "10"] for b in ("3", "4")],
    "gptq": [["--bits", "4"], ["--bits", "4", "--fallback-bits", "4"]],
    "dwq": [["--bits", b, "--steps", "256", "--learning-rate", "1e-5"] for b in ("3", "4")],
}
LAUNCHER = """
from tests.bench.blas import preload_openblas
preload_openblas()
from {module} import main
main()
"""
SMALL_SIZES, TIMEOUT_S = (4.5,), 1200
CALIBRATION = Path(".cache/mlx-lm/calibration_v5.txt")  # in the home folder, where mlx-lm looks


def run(
    *,
    model: Path | None = None,
    learn: float | None = None,
    nearest: bool = False,
    small: bool = False,
    peer: bool = True,
) -> Report:
    """Measure.

    Args:
        model: a folder with unquantised weights; None: the demo model's, of a checkout.
        learn: minutes for `--learn` at one of the sizes; None: it is left out.
        nearest: also without error feedback.
        small: one size on few tokens.
        peer: also mlx-lm.

    Raises:
        ModelNotFoundError: no such folder.
    """
    if peer:
        require_peer()
    folder = DEMO if model is None else model
    check_model(folder)
    length, limit = (128, 2) if small else (512, 8)
    with TemporaryDirectory() as scratch:
        place = Path(scratch)
        wide = _plain(folder, place / "float32")
        ours = _ours(wide, place, _asked(learn, nearest or small, small))
        theirs = _theirs(wide, place, small) if peer else ()
        plain = (
            (converter, label, converted, _plain(converted, place / "plain"))
            for converter, label, converted in chain(ours, theirs)
        )
        recipes, perplexity, num_tokens = measure_folders(folder, plain, length=length, limit=limit)
    table = quality_table(recipes, perplexity, num_tokens, length)
    data = {"tokens": num_tokens, "source_perplexity": perplexity}
    return Report("quality", [table], {**data, "recipes": [asdict(r) for r in recipes]})


def _asked(learn: float | None, nearest: bool, small: bool) -> list[tuple[str, dict[str, Any]]]:
    """Ours: labels and options."""
    found: list[tuple[str, dict[str, Any]]] = []
    for size in SMALL_SIZES if small else SIZES:
        label = f"--target-bpw {size:g}"
        found.append((label, {"target_bpw": size}))
        if nearest:
            options = {"target_bpw": size, "error_feedback": False}
            found.append((f"{label} --rounding nearest", options))
    if learn is not None:
        label = f"--target-bpw {LEARNED:g} --learn {learn:g}"
        found.append((label, {"target_bpw": LEARNED, "learn_minutes": learn}))
    return found


def _ours(
    model: Path, scratch: Path, asked: Sequence[tuple[str, dict[str, Any]]]
) -> Iterator[tuple[str, str, Path]]:
    """Those with formats that are small enough."""
    for number, (label, more) in enumerate(asked):
        out = scratch / f"ours-{number}"
        options = ConversionOptions(
            recipe=make_recipe("4bit", dtype="bfloat16"),
            calibration=read_text(None),
            figures=False,
            **more,
        )
        with closing(open_source(model)) as source, suppress(InvalidRequestError):
            Conversion(source, out, options).run()
            yield "mlxinfer", label, out


def _theirs(model: Path, scratch: Path, small: bool) -> Iterator[tuple[str, str, Path]]:
    """Those that come to an end: not every method takes every architecture."""
    for number, (program, options) in enumerate(_peers(small)):
        out = scratch / f"theirs-{number}"
        paths = ["--hf-path" if program == "convert" else "--model", str(model)]
        if _ends(program, [*paths, "--mlx-path", str(out), *options], scratch):
            _cast(out, out, mx.bfloat16)
            yield "mlx-lm", " ".join([program, *options]), out


def _plain(folder: Path, out: Path) -> Path:
    """The float32 values that a checkpoint stands for."""
    formats = load_config(folder).quantization
    _cast(folder, out, mx.float32)
    for path in out.glob("*.safetensors"):
        stored = cast(dict[str, mx.array], mx.load(str(path)))
        for name in [name for name in stored if name.endswith(".scales")]:
            assert formats is not None
            stem = name.removesuffix(".scales")
            form, biases = formats.of(stem), stored.pop(f"{stem}.biases", None)
            stored[f"{stem}.weight"] = dequantised(
                stored[f"{stem}.weight"], stored.pop(name), biases, form
            )
        mx.eval(stored)
        mx.save_safetensors(str(path), stored, metadata={"format": "mlx"})
    path = out / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in config.items() if "quantization" not in k}))
    return out


def _cast(folder: Path, out: Path, dtype: mx.Dtype) -> Path:
    """A checkpoint with floats of another dtype."""
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


def _ends(program: str, arguments: list[str], home: Path) -> bool:
    """Whether it came to an end."""
    text = home / CALIBRATION
    text.parent.mkdir(parents=True, exist_ok=True)
    whole = read_text(None)
    text.write_text(whole[: len(whole) * 2 // 3], encoding="utf-8")  # the part that we calibrate on
    module = "mlx_lm.convert" if program == "convert" else f"mlx_lm.quant.{program}"
    if program == "dwq":
        module, arguments = "tests.bench.dwq", [*arguments, "--text", str(text)]
    known = home / f"sensitivities-{'-'.join(arguments[-4:])}.json"
    if program == "dynamic_quant" and known.exists():
        arguments = [*arguments, "--sensitivities", str(known)]
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
    for path in home.glob("*_sensitivities.json"):
        path.rename(known)
    return done.returncode == 0
