"""Safetensors files byte by byte, and folders of them. No mlxinfer."""

import json
from pathlib import Path
from typing import Any

import numpy as np

Stored = tuple[str, np.ndarray]  # the format's name of a dtype, and an array of as many bytes


def f32(values: Any) -> Stored:
    return "F32", np.asarray(values, np.float32)


def f16(values: Any) -> Stored:
    return "F16", np.asarray(values, np.float16)


def i32(values: Any) -> Stored:
    return "I32", np.asarray(values).astype(np.uint32).view(np.int32)


def bf16(values: Any) -> Stored:
    """Rounded to nearest, ties to even."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return "BF16", ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(stored: Stored) -> np.ndarray:
    return (stored[1].astype(np.uint32) << 16).view(np.float32)


def write_file(path: Path, tensors: dict[str, Stored]) -> None:
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, array) in tensors.items():
        end = position + array.nbytes
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for _, array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_folder(
    folder: Path,
    tensors: dict[str, Stored],
    quantization: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A checkpoint with a config that is just enough to be read."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"model_type": "llama", **config}
    if quantization is not None:
        whole["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(whole))
    write_file(folder / "model.safetensors", tensors)
    return folder
