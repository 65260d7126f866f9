"""A tiny checkpoint with its experts stored otherwise."""

import json
import re
from pathlib import Path

import mlx.core as mx
from models.tiny import write

_ONE = re.compile(r"(.+)\.experts\.(\d+)\.(.+)")


def with_stacks(folder: Path) -> Path:
    """The checkpoint with tensors of single experts stacked, as mlx-lm stores them."""
    file = folder / "model.safetensors"
    tensors = mx.load(str(file))
    assert isinstance(tensors, dict)
    stacks: dict[str, dict[int, mx.array]] = {}
    for name in list(tensors):
        if one := _ONE.fullmatch(name):
            stacks.setdefault(f"{one[1]}.switch_mlp.{one[3]}", {})[int(one[2])] = tensors.pop(name)
    assert stacks, f"no tensor of a single expert in {folder}"
    for name, each in stacks.items():
        tensors[name] = mx.stack([each[i] for i in range(len(each))])
    mx.eval(tensors)
    config = json.loads((folder / "config.json").read_text())
    return write(folder.with_name(f"{folder.name}-stacks"), config, tensors)
