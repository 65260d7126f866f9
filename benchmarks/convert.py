"""`bench convert`: what recipes cost in quality, and conversions in time and memory.

All outputs of the recipes are run by mlxinfer, so what differs is the weights.
"""

import contextlib
import importlib
import io
import shutil
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.processes import run_python
from benchmarks.quality import COLUMNS, MODEL, HeldOut, cells
from benchmarks.tables import Figures
from mlxinfer.bench.peer import require_peer
from mlxinfer.bench.report import Report, Table, ratio
from mlxinfer.convert.calibration.texts import read_text
from mlxinfer.convert.read import open_source
from mlxinfer.convert.recipes import ConversionOptions, make_recipe
from mlxinfer.convert.run import Conversion
from mlxinfer.errors import ModelNotFoundError
from mlxinfer.memory import parse_bytes
from mlxinfer.models.config import load_config
from mlxinfer.models.weights.files import read_headers

# -- recipes by what they do to the answers -------------------------------------------------------

Recipes = dict[str, dict[str, Any]]
OURS: Recipes = {
    "4bit --fast": {"searched": False, "calibrated": False},
    "4bit --calibration none": {"calibrated": False},
    **{name: {"recipe": name} for name in ("4bit", "4bit-g32", "8bit", "mxfp4", "nvfp4")},
    **{f"--target-bpw {bits:g}": {"target_bpw": bits} for bits in (3.5, 4.0, 4.5, 5.0, 6.0)},
}
MIXED = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
THEIRS: Recipes = {
    "4 bits, group 64": {"q_bits": 4, "q_group_size": 64},
    "4 bits, group 32": {"q_bits": 4, "q_group_size": 32},
    "8 bits, group 64": {"q_bits": 8, "q_group_size": 64},
    **{name: {"quant_predicate": name, "q_group_size": 64} for name in MIXED},
    **{name: {"q_mode": name} for name in ("mxfp4", "nvfp4")},
}
SMALL = ("4bit --fast", "4bit", "--target-bpw 4.5", "4 bits, group 64")


def converted(
    model: Path, scratch: Path, *, peer: bool, small: bool
) -> Iterator[tuple[str, str, Path]]:
    """Converter, label and folder of every recipe."""
    sides = {"mlxinfer": (OURS, convert_ours), "mlx-lm": (THEIRS, convert_theirs)}
    for converter in sides if peer else ("mlxinfer",):
        recipes, convert = sides[converter]
        for number, (label, options) in enumerate(recipes.items()):
            if not small or label in SMALL:
                out = scratch / f"{converter}-{number}"
                convert(model, out, **options)
                yield converter, label, out


def convert_ours(
    model: Path,
    out: Path,
    *,
    recipe: str = "4bit",
    searched: bool = True,
    calibrated: bool = True,
    target_bpw: float | None = None,
) -> None:
    options = ConversionOptions(
        recipe=make_recipe(recipe),
        searched=searched,
        calibration=read_text(None) if calibrated else None,
        target_bpw=target_bpw,
    )
    Conversion(open_source(model), out, options).run()


def convert_theirs(model: Path, out: Path, **options: Any) -> None:
    convert = importlib.import_module("mlx_lm.convert").convert
    with contextlib.redirect_stdout(io.StringIO()):
        convert(str(model), str(out), quantize=True, **options)


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


def _quality(model: Path, scratch: Path, *, peer: bool, small: bool) -> Report:
    held_out = HeldOut(model, 128 if small else 1024, 2 if small else None)
    source = held_out.quality(model)["perplexity"]
    recipes: list[dict[str, Any]] = []
    for converter, label, folder in converted(model, scratch, peer=peer, small=small):
        size = {"bits_per_weight": bits_per_weight(folder)}
        recipes.append({"converter": converter, "label": label, **size, **held_out.quality(folder)})
        print(recipes[-1], file=sys.stderr, flush=True)
    rows = [
        [
            recipe["converter"],
            recipe["label"],
            f"{recipe['bits_per_weight']:.3f}",
            *cells(recipe, 5),
        ]
        for recipe in sorted(recipes, key=lambda r: (r["bits_per_weight"], r["kl_mean"]))
    ]
    table = Table(
        f"Recipes by size, {held_out.num_tokens:,} held-out tokens",
        ["converter", "recipe", "bits/weight", *COLUMNS],
        rows,
        f"In windows of {len(held_out.windows[0]):,} tokens; perplexity of the source "
        f"{source:.4f}. KL in nats, from the source to the recipe. mlxinfer calibrates on its own "
        "text, which shares nothing with the held-out one; all are run by mlxinfer.",
    )
    data = {"tokens": held_out.num_tokens, "source_perplexity": source, "recipes": recipes}
    return Report("convert", [table], data)


# -- time and memory of whole processes ---------------------------------------------------------

CAP = "300MB"
PLAIN = ("--calibration", "none", "--check", "none")
VARIANTS = {  # of mlxinfer's, by their name in the data: label, and options
    "fast": ("--fast", ("--fast",)),  # scales as mlx-lm
    "capped": (f"--fast --max-memory {CAP}", ("--fast", "--max-memory", CAP)),
    "searched": ("searched scales", PLAIN),  # by squared error
}


def conversions(
    scratch: Path, num_bytes: int, tokenizer: Path, *, runs: int, peer: bool
) -> list[dict[str, Any]]:
    """Dense and mixture of experts, to 4 bits in groups of 64.

    Converters take turns; the run with the least wall time counts.
    """
    conversions = []
    for label in ("dense", "mixture of experts"):
        source, out = scratch / label.replace(" ", "-"), scratch / "out"
        making = ["benchmarks.checkpoints", str(source), label, str(num_bytes), str(tokenizer)]
        run_python("-m", *making)
        ours = ["mlxinfer.cli", "convert", str(source), str(out), "--bits", "4"]
        commands = {name: [*ours, *options] for name, (_, options) in VARIANTS.items()}
        if peer:
            theirs = ["mlx_lm", "convert", "--hf-path", str(source), "--mlx-path", str(out)]
            commands["theirs"] = [*theirs, "-q", "--q-bits", "4", "--q-group-size", "64"]
        costs: dict[str, list[Figures]] = {name: [] for name in commands}
        for _ in range(runs):
            for name, command in commands.items():
                costs[name].append(run_python("-m", *command).cost)
                shutil.rmtree(out)
        best = {name: min(value, key=lambda cost: cost["wall_s"]) for name, value in costs.items()}
        total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        conversions.append({"label": label, "num_bytes": total, **best})
        shutil.rmtree(source)
    return conversions


def _speed(scratch: Path, num_bytes: int, model: Path, *, runs: int, peer: bool) -> Report:
    costs = conversions(scratch, num_bytes, model, runs=runs, peer=peer)
    rows = []
    for item in costs:
        for name, (label, _) in VARIANTS.items():
            both = [item[name], item["theirs"]] if peer else [item[name]]
            rows.append([f"{item['label']}, {label}", *_speed_cells(*both)])
    table = Table(
        f"Whole processes, {costs[0]['num_bytes'] / 1e9:.2f} GB of bf16 to 4 bits",
        ["", "s", "mlx-lm s", "times as fast", "CPU s", "mlx-lm CPU s", "peak MB",
         "mlx-lm peak MB", "share of its peak"],
        rows,
        "--fast: scales as mlx-lm's, nothing compared.",
    )  # fmt: skip
    return Report("convert", [table], {"conversions": costs})


def _speed_cells(ours: Figures, theirs: Figures | None = None) -> list[str]:
    def both(name: str, form: str, unit: float = 1) -> list[str]:
        other = "-" if theirs is None else format(theirs[name] / unit, form)
        return [format(ours[name] / unit, form), other]

    speed = share = "-"
    if theirs is not None:
        speed = ratio(theirs["wall_s"], ours["wall_s"])
        share = f"{ours['peak_bytes'] / theirs['peak_bytes']:.2f}"
    memory = both("peak_bytes", ",.0f", 1e6)
    return [*both("wall_s", ".1f"), speed, *both("cpu_s", ".1f"), *memory, share]


def run(*, model: Path | None, synthetic: str | None, runs: int, small: bool, peer: bool) -> Report:
    """Measure.

    Args:
        model: a folder with unquantised weights; None: the tests' own.
        synthetic: instead of quality, speed: the size of random checkpoints, such as "3GB".
        runs: with `synthetic`: of each converter; the quickest counts.
        small: few recipes on few tokens.
        peer: also mlx-lm.

    Raises:
        ModelNotFoundError: no such folder.
    """
    if peer:
        require_peer()
    folder = MODEL if model is None else model
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"{folder} has no model; --model takes a folder of unquantised weights."
        )
    with TemporaryDirectory() as scratch:
        if synthetic is None:
            return _quality(folder, Path(scratch), peer=peer, small=small)
        size = parse_bytes(synthetic, param="synthetic")
        return _speed(Path(scratch), size, folder, runs=runs, peer=peer)
