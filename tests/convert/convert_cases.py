"""Tiny sources with a tokenizer, and conversions of them. Knows no test."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlxinfer.convert.options import Options
from mlxinfer.convert.read import open_source
from mlxinfer.convert.recipes import make_recipe
from mlxinfer.convert.report import Report
from mlxinfer.convert.run import Conversion
from models.cases import CASES
from models.random_weights import tiny_tensors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEXT = "The quick brown fox jumps over the lazy dog, 12 times; then it sleeps. " * 12
NAMES = {mx.bfloat16: "bfloat16", mx.float32: "float32"}
NUM_TOKENS = 95  # below every case's vocabulary


def write_source(
    folder: Path, case: str = "qwen3-v4", *, shards: int = 1, dtype: mx.Dtype = mx.bfloat16
) -> Path:
    """A tiny checkpoint of a family, with a tokenizer of single characters."""
    config = dict(CASES[case])
    config["dtype" if "dtype" in config else "torch_dtype"] = NAMES[dtype]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet())[: NUM_TOKENS - 1], "Ġ"]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    arrays = {n: mx.array(v).astype(dtype) for n, v in tiny_tensors(config).items()}
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


def convert(
    source: Path, out: Path, recipe: str = "4bit-g32", *, run: dict[str, Any] | None = None,
    overrides: tuple[str, ...] = (), open_model: Any = None, **options: Any,
) -> Report:  # fmt: skip
    """Convert without calibration or logits unless told otherwise."""
    opened = open_source(source)
    try:
        made = Options(recipe=make_recipe(recipe, overrides=overrides), **options)
        return Conversion(opened, out, made, open_model).run(**run or {})
    finally:
        opened.close()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by its name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
