"""Tiny random checkpoints, for any test that needs a model: the same seed, the same weights.

folder = tiny_checkpoint(tmp_path, "qwen3-v4")          # or just "qwen3"
folder = tiny_checkpoint(tmp_path, "llama", quantize={"group_size": 32, "bits": 4})
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from models.cases import CASES
from models.random_weights import tiny_tensors


def tiny_config(case: str) -> dict[str, Any]:
    """The config of a case ("qwen3-v4"), or of the first case of a family ("qwen3")."""
    return CASES[case if case in CASES else f"{case}-v4"]


def tiny_checkpoint(
    folder: Path,
    case: str,
    *,
    quantize: dict[str, Any] | None = None,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write config.json, with these changes, and model.safetensors into `folder` and return it.

    `quantize` ({"group_size", "bits"} and perhaps "mode") quantises every matrix that has inputs in
    whole groups, as mlx-lm does; the experts of gpt_oss stay as they are.
    """
    config = tiny_config(case) | changes
    arrays = arrays_of(config, seed)
    if quantize is not None:
        arrays = quantized(arrays, quantize)
        config["quantization"] = quantize
    return write(folder, config, arrays)


def write(folder: Path, config: dict[str, Any], tensors: Mapping[str, Any]) -> Path:
    """Write a checkpoint of a config and tensors, arrays of MLX or NumPy, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: mx.array(value) for name, value in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """What a checkpoint states, after these changes to it."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text()) | changes
    if changes:
        (folder / "config.json").write_text(json.dumps(config))
    return config


def arrays_in(folder: Path) -> dict[str, mx.array]:
    """What `write` wrote."""
    return dict(mx.load(str(folder / "model.safetensors")))


def arrays_of(config: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Every tensor of a checkpoint with this config, random."""
    return {name: mx.array(value) for name, value in tiny_tensors(config, seed).items()}


def quantized(arrays: dict[str, mx.array], how: dict[str, Any]) -> dict[str, mx.array]:
    """weight -> weight, scales and (affine) biases, for every matrix that can be quantised."""
    result: dict[str, mx.array] = {}
    for name, array in arrays.items():
        if not name.endswith(".weight") or array.ndim != 2 or array.shape[1] % how["group_size"]:
            result[name] = array
            continue
        path = name.removesuffix("weight")
        names = (name, f"{path}scales", f"{path}biases")
        result |= dict(zip(names, mx.quantize(array, **how), strict=False))
    return result
