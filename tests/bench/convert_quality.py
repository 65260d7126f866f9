"""Recipes of both converters by size and by what they do to the answers. Knows LLM, no tables.

All outputs are run by mlxinfer, so what differs is the weights.
"""

import contextlib
import importlib
import io
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxinfer.convert.calibration.texts import read_text
from mlxinfer.convert.read import open_source
from mlxinfer.convert.recipes import ConversionOptions, make_recipe
from mlxinfer.convert.run import Conversion
from mlxinfer.llm import LLM
from mlxinfer.models.weights.files import read_headers
from tests.bench.quality import DTYPE, HELD_OUT, Floats, compared, log_softmax, windows

OURS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("4bit --scales minmax", {"searched": False, "calibrated": False}),
    ("4bit --calibration none", {"calibrated": False}),
    ("4bit", {}),
    ("4bit-g32", {"recipe": "4bit-g32"}),
    ("--target-bpw 3.5", {"target_bpw": 3.5}),
    ("--target-bpw 4", {"target_bpw": 4.0}),
    ("--target-bpw 4.5", {"target_bpw": 4.5}),
    ("--target-bpw 5", {"target_bpw": 5.0}),
    ("--target-bpw 6", {"target_bpw": 6.0}),
    ("8bit", {"recipe": "8bit"}),
    ("mxfp4", {"recipe": "mxfp4"}),
    ("nvfp4", {"recipe": "nvfp4"}),
)
THEIRS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("4 bits, group 64", {"q_bits": 4, "q_group_size": 64}),
    ("4 bits, group 32", {"q_bits": 4, "q_group_size": 32}),
    ("mixed_2_6", {"quant_predicate": "mixed_2_6", "q_group_size": 64}),
    ("mixed_3_4", {"quant_predicate": "mixed_3_4", "q_group_size": 64}),
    ("mixed_3_6", {"quant_predicate": "mixed_3_6", "q_group_size": 64}),
    ("mixed_4_6", {"quant_predicate": "mixed_4_6", "q_group_size": 64}),
    ("8 bits, group 64", {"q_bits": 8, "q_group_size": 64}),
    ("mxfp4", {"q_mode": "mxfp4"}),
    ("nvfp4", {"q_mode": "nvfp4"}),
)
SMALL = ("4bit --scales minmax", "4bit", "--target-bpw 4.5", "4 bits, group 64")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to convert, and what came of it."""

    converter: str  # "mlxinfer" or "mlx-lm"
    label: str
    bits_per_weight: float
    kl_mean: float  # nats, from the source to this
    kl_p99: float
    top1: float
    perplexity: float


def measure(
    model: Path, scratch: Path, *, length: int, limit: int | None, peer: bool, small: bool
) -> tuple[list[Recipe], float, int]:
    """Every recipe; the source's perplexity; and over how many held-out tokens."""
    folders = _converted(model, scratch, peer=peer, small=small)
    asked = ((converter, label, folder, folder) for converter, label, folder in folders)
    return measure_folders(model, asked, length=length, limit=limit)


def measure_folders(
    model: Path, folders: Iterable[tuple[str, str, Path, Path]], *, length: int, limit: int | None
) -> tuple[list[Recipe], float, int]:
    """The same for conversions of a model: converter, label, folder, and the folder that is run."""
    text = HELD_OUT.read_text(encoding="utf-8")
    with LLM(str(model), dtype=DTYPE) as llm:
        ids = llm.tokenizer.encode(text, parse_special=True)
        chunks = windows(ids, length, limit)
        reference = [log_softmax(llm.logits(chunk)) for chunk in chunks]
    whole = _quality(model, chunks, reference)
    found = []
    for converter, label, folder, run in folders:
        quality = _quality(run, chunks, reference)
        found.append(Recipe(converter, label, bits_per_weight(folder), **quality))
        print(found[-1], file=sys.stderr, flush=True)
    return found, whole["perplexity"], sum(map(len, chunks))


def bits_per_weight(folder: Path) -> float:
    """Bits of all arrays over the weights that they stand for, counted from the files."""
    bits = weights = 0
    for header in read_headers(folder).values():
        for name, info in header.items():
            bits += (info.end - info.start) * 8
            if name.endswith((".scales", ".biases")):
                continue
            count = 1
            for size in info.shape:
                count *= size
            quantised = f"{name.removesuffix('.weight')}.scales" in header
            weights += _unpacked(folder, name, count) if quantised else count
    return bits / weights


def _unpacked(folder: Path, name: str, words: int) -> int:
    from mlxinfer.models.config import load_config

    formats = load_config(folder).quantization
    assert formats is not None
    return words * 32 // formats.of(name.removesuffix(".weight")).bits


def _converted(
    model: Path, scratch: Path, *, peer: bool, small: bool
) -> Iterator[tuple[str, str, Path]]:
    for number, (label, options) in enumerate(OURS):
        if not small or label in SMALL:
            out = scratch / f"ours-{number}"
            _convert_ours(model, out, **options)
            yield "mlxinfer", label, out
    for number, (label, options) in enumerate(THEIRS):
        if peer and (not small or label in SMALL):
            out = scratch / f"theirs-{number}"
            convert = importlib.import_module("mlx_lm.convert").convert
            with contextlib.redirect_stdout(io.StringIO()):
                convert(str(model), str(out), quantize=True, **options)
            yield "mlx-lm", label, out


def _convert_ours(
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


def _quality(folder: Path, chunks: list[list[int]], reference: list[Floats]) -> dict[str, float]:
    with LLM(str(folder), dtype=DTYPE) as llm:
        logprobs = [log_softmax(llm.logits(chunk)) for chunk in chunks]
    found = compared("", chunks, reference, logprobs, bytes_per_token=0.0, of_bfloat16=0.0)
    return {
        "kl_mean": found.kl_mean,
        "kl_p99": found.kl_p99,
        "top1": found.top1,
        "perplexity": found.perplexity,
    }
