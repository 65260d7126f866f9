"""A tiny checkpoint with its experts stored otherwise."""

import re
from pathlib import Path

import mlx.core as mx
from models.tiny import arrays_in, config_of, write

_ONE = re.compile(r"(.+)\.experts\.(\d+)\.(.+)")


def stacked(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Tensors with those of single experts stacked, as mlx-lm stores them."""
    result: dict[str, mx.array] = {}
    stacks: dict[str, dict[int, mx.array]] = {}
    for name, array in tensors.items():
        if one := _ONE.fullmatch(name):
            stacks.setdefault(f"{one[1]}.switch_mlp.{one[3]}", {})[int(one[2])] = array
        else:
            result[name] = array
    for name, value in stacks.items():
        result[name] = mx.stack([value[i] for i in range(len(value))])
    return result


def with_stacks(folder: Path) -> Path:
    """The checkpoint with tensors of single experts stacked, as mlx-lm stores them."""
    plain = arrays_in(folder)
    assert isinstance(plain, dict)
    tensors = stacked(plain)
    assert len(tensors) < len(plain), f"no tensor of a single expert in {folder}"
    mx.eval(tensors)
    config = config_of(folder)
    return write(folder.with_name(f"{folder.name}-stacks"), config, tensors)
