"""Tiny sources with a tokenizer, and conversions of them. Knows no test."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from models.cases import CASES
from models.dense_kv import DenseCache
from models.random_weights import tiny_tensors
from oracles.checkpoints import Stored, bf16, write_folder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mlxinfer import LLM
from mlxinfer.convert.read import Packed, SourceModel, SourceTensor, open_source
from mlxinfer.convert.recipes import ConversionOptions, make_recipe
from mlxinfer.convert.report import ConversionReport
from mlxinfer.convert.run import Conversion
from mlxinfer.convert.verify import Progress
from mlxinfer.errors import CheckpointError
from mlxinfer.models import load

TEXT = "The quick brown fox jumps over the lazy dog, 12 times; then it sleeps. " * 5
NAMES = {mx.bfloat16: "bfloat16", mx.float32: "float32"}
Outcome = Callable[..., SimpleNamespace]  # of `mlxinfer convert ARGS`: code, out, err
IDS = [5, 17, 3, 80, 41, 9, 22, 64]  # no longer than the shortest window: mlx-lm ignores some
NUM_TOKENS = 95  # below every case's vocabulary


def write_source(
    folder: Path,
    case: str = "qwen3-v4",
    *,
    shards: int = 1,
    dtype: mx.Dtype = mx.bfloat16,
    changes: dict[str, Any] | None = None,
    inner: str | None = None,
    more: dict[str, mx.array] | None = None,
) -> Path:
    """A tiny checkpoint of a family, with a tokenizer of single characters.

    Args:
        changes: of the config; None: without this key.
        inner: prefix of the tensors of a multimodal model: its config has this one inside.
        more: tensors beside those of the family.
    """
    dropped = [key for key, value in (changes or {}).items() if value is None]
    config = {**CASES[case], **(changes or {})}
    config = {key: value for key, value in config.items() if key not in dropped}
    config["dtype" if "dtype" in config else "torch_dtype"] = NAMES[dtype]
    folder.mkdir(parents=True)
    whole = config if inner is None else {"model_type": "gemma3", "text_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    write_tokenizer(folder)
    tensors = {**tiny_tensors(config), **(more or {})}
    arrays = {(inner or "") + n: mx.array(v).astype(dtype) for n, v in tensors.items()}
    names = list(arrays)
    size = -(-len(names) // shards)
    weight_map = {}
    for number in range(shards):
        part = {name: arrays[name] for name in names[number * size : (number + 1) * size]}
        file = "model.safetensors" if shards == 1 else f"model-{number:05d}.safetensors"
        mx.save_safetensors(str(folder / file), part)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_tokenizer(folder: Path) -> None:
    """Of single characters."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet())[: NUM_TOKENS - 1], "Ġ"]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def convert(
    source: Path, out: Path, recipe: str = "4bit-g32", *, run: dict[str, Any] | None = None,
    overrides: tuple[str, ...] = (), compares: bool = False, tower_bits: int | None = None,
    progress: Progress = lambda *_: None,
    **options: Any,
) -> ConversionReport:  # fmt: skip
    """Convert without calibration or logits unless told otherwise."""
    how = make_recipe(recipe, overrides=overrides, tower_bits=tower_bits)
    made = ConversionOptions(recipe=how, **options)
    return Conversion(open_source(source), out, made, compares, progress).run(**run or {})


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by its name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def logits(folder: Path, ids: Iterable[int] = range(3, 33)) -> np.ndarray:
    """(T, vocab) float32, of a model that is held whole."""
    model = load(folder, dtype="float32")
    return np.array(DenseCache(model).run(model, [("a", list(ids))]).astype(mx.float32))


def dequantised(packed: Packed, info: SourceTensor) -> np.ndarray:
    """Codes as MLX reads them, scales in float32."""
    form = info.lossless
    parts = [packed.weight, packed.scales]
    if packed.biases is not None:
        parts = [packed.weight, *(p.astype(mx.float32) for p in (packed.scales, packed.biases))]
    how = {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}
    return np.array(mx.dequantize(*parts, **how, dtype=mx.float32))


def check_values(source: SourceModel, name: str, expected: np.ndarray, *, codes: bool) -> None:
    """A matrix is read as these numbers: whole, in part, and by MLX from its codes if it has any.

    They are compared in the dtype of `expected`.
    """
    for rows in (slice(None), slice(len(expected) // 3, len(expected) * 3 // 4)):
        read = np.array(source.read(name, rows).astype(mx.float32))
        assert np.array_equal(read.astype(expected.dtype), expected[rows])
    info = source.tensors[name]
    assert (info.lossless is not None) == codes
    if codes:
        values = dequantised(source.read_packed(name), info)
        assert np.array_equal(values.astype(expected.dtype), expected)
    else:
        with pytest.raises(CheckpointError, match="values"):
            source.read_packed(name)


def opened(
    folder: Path, leaves: dict[str, Stored], quantization: dict[str, Any] | None, *, path: str
) -> SourceModel:
    """A checkpoint of one module at a path, with a norm that is not quantised."""
    tensors = {f"{path}.{leaf}": stored for leaf, stored in leaves.items()}
    tensors["model.norm.weight"] = bf16(np.ones(8))
    return open_source(write_folder(folder, tensors, quantization))


def by_mlxinfer(folder: Path, ids: list[int] = IDS) -> np.ndarray:
    with LLM(str(folder), dtype="float32") as llm:
        return llm.logits(ids)


def by_mlx_lm(folder: Path, ids: list[int] = IDS) -> np.ndarray:
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array([ids]))[0].astype(mx.float32))


def agreed(folder: Path, ids: list[int] = IDS) -> np.ndarray:
    """The logits of a folder, after a look whether mlx-lm finds the same."""
    ours, theirs = by_mlxinfer(folder, ids), by_mlx_lm(folder, ids)
    assert np.abs(ours - theirs).max() <= 2e-4 * max(1.0, theirs.std())
    return ours
