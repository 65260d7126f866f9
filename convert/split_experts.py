"""Stacks of experts in finished files, taken apart: all matrices of an expert lie side by side.

A model that is larger than memory reads experts one by one. Of a stack, an expert's part is in one
piece, and a layer has nine stacks (gate, up and down, each with words, scales and biases): nine
reads, of which six are small. Apart, in the order of the experts, it is one read. The tensors are
named as the hub names single experts, `experts.7.gate_proj.weight`; their bytes are the same.
Biases of outputs stay together: they are few numbers, which a model holds in memory.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, ConversionError, InvalidRequestError
from ..models.weights.files import TensorInfo, read_header
from .files import ShardFile
from .plan import ConversionPlan, PlannedArray
from .sidefiles import write_json

_STACK = re.compile(
    r"(.+?)\.(?:switch_mlp|experts\.switch_glu|experts)"
    r"\.((?:gate|up|gate_up|down)_proj|fc1|fc2)\.(weight|scales|biases)"
)
_OF_ONE = {"fc1": "up_proj", "fc2": "down_proj"}  # Nemotron's names of stacks, and of one's
BLOCK = 64 << 20  # bytes that are read and written at once
Piece = tuple[PlannedArray, int]  # what is written, and where its bytes are in the old file


def single_name(stack: str, expert: int) -> str | None:
    """What an expert's part of a stack is called by itself; None: the name is none of a stack."""
    found = _STACK.fullmatch(stack)
    if found is None:
        return None
    mixture, matrix, field = found.groups()
    return f"{mixture}.experts.{expert}.{_OF_ONE.get(matrix, matrix)}.{field}"


def with_stacks(
    header: Mapping[str, TensorInfo], names: Iterable[str]
) -> tuple[dict[str, TensorInfo], dict[str, list[str]]]:
    """A header as it was before its stacks were taken apart, and the parts of each.

    Args:
        header: of a file.
        names: of stacks that may be in it, taken apart, and of any other tensors.

    Raises:
        CheckpointError: an expert's part is not as the first one's.
    """
    whole, parts = dict(header), {}
    for name in names:
        found: list[str] = []
        while name not in header and (single := single_name(name, len(found))) in header:
            assert single is not None
            found.append(single)
        if found:
            first = header[found[0]]
            parts[name] = found
            whole[name] = replace(first, shape=(len(found), *first.shape))
            for single in found:
                _require_alike(single, whole.pop(single), found[0], first)
    return whole, parts


def _require_alike(name: str, info: TensorInfo, other: str, first: TensorInfo) -> None:
    """Raise CheckpointError where parts of one stack have different dtypes or shapes."""
    if (info.dtype, info.shape) != (first.dtype, first.shape):
        raise CheckpointError(
            f"Tensor {name!r} is {info.dtype} {info.shape}; expected {first.dtype} {first.shape}, "
            f"as {other!r}: convert the model again."
        )


def check_splits(plan: ConversionPlan) -> None:
    """Raise InvalidRequestError where a model has no stacks of experts."""
    if not any(_STACK.fullmatch(array.name) for t in plan.tensors for array in t.arrays):
        raise InvalidRequestError(
            "This model has no mixtures of experts; leave --split-experts out.",
            param="split_experts",
        )


def split_experts(folder: Path, plan: ConversionPlan) -> None:
    """Take the stacks of all files apart; files that were, before an interruption, stay."""
    weight_map: dict[str, str] = {}
    for name, _ in plan.shards():
        path = folder / name
        if any(_STACK.fullmatch(tensor) for tensor in read_header(path)):
            _split(path)
        weight_map |= dict.fromkeys(read_header(path), name)
    sizes = {"total_size": plan.num_bytes, "total_parameters": plan.num_weights}
    index: dict[str, Any] = {"metadata": sizes, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def _split(path: Path) -> None:
    """One file; until the new one is complete on the disk, the old one has its name."""
    header = read_header(path)
    old = os.open(path, os.O_RDONLY)
    try:
        start = 8 + int.from_bytes(os.pread(old, 8, 0), "little")
        pieces = list(_pieces(header))
        with ShardFile(path, [array for array, _ in pieces]) as new:
            for array, at in pieces:
                _copy(old, start + at, new, array)
            new.finish()
    finally:
        os.close(old)


def _copy(old: int, start: int, new: ShardFile, array: PlannedArray) -> None:
    """Write the bytes of a file from `start` on; one read gives less than 2 GB, or less still."""
    done = 0
    while done < array.num_bytes:
        data = os.pread(old, min(BLOCK, array.num_bytes - done), start + done)
        if not data:
            raise ConversionError(f"{new.path} became shorter while it was read; convert again.")
        done += new.write(array.name, done, np.frombuffer(data, np.uint8))


def _pieces(header: dict[str, TensorInfo]) -> Iterator[Piece]:
    """Every tensor of the new file, in order; a mixture stands where its first stack stood."""
    mixtures: dict[str, list[tuple[str, TensorInfo]]] = {}
    for name, info in header.items():
        if found := _STACK.fullmatch(name):
            mixtures.setdefault(found[1], []).append((name, info))
    for name, info in header.items():
        found = _STACK.fullmatch(name)
        if found is None:
            size = info.end - info.start
            yield PlannedArray(name, info.dtype, info.shape, size), info.start
        elif found[1] in mixtures:
            yield from _singles(mixtures.pop(found[1]))


def _singles(stacks: Sequence[tuple[str, TensorInfo]]) -> Iterator[Piece]:
    for expert in range(stacks[0][1].shape[0]):
        for name, info in stacks:
            own = single_name(name, expert)
            assert own is not None
            size = (info.end - info.start) // info.shape[0]
            array = PlannedArray(own, info.dtype, info.shape[1:], size)
            yield array, info.start + expert * size
