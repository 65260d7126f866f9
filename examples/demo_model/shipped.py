"""Reads a bundled model back, as the numbers that its 4 bits stand for."""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from .model import SHAPES, Model
from .quantise import BITS, GROUP_SIZE


def shipped_weights(folder: Path) -> dict[str, mx.array]:
    """Return the weights of a bundled folder, as the numbers that its 4 bits stand for."""
    arrays: Any = mx.load(str(folder / "model.safetensors"))
    weights = {}
    for name, array in arrays.items():
        stem = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{stem}.scales" in arrays:
            scales, biases = arrays[f"{stem}.scales"], arrays[f"{stem}.biases"]
            array = mx.dequantize(array, scales, biases, GROUP_SIZE, BITS)
        weights[name] = array.astype(mx.float32)
    return weights


def shipped_model(folder: Path) -> Model:
    """Return a bundled model as training has it."""
    model = Model(SHAPES[folder.name])
    model.update(tree_unflatten(list(shipped_weights(folder).items())))
    return model
