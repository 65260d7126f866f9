"""A launch as MLX would hand it to Metal: source, function, buffers. Runs nothing.

MLX writes the signature of a custom kernel while it traces a graph, so exporting a function that
calls the kernel yields the text that it would compile, on a machine without Metal too.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from metal_cpu import arrays
from metal_cpu.report import Size
from metal_cpu.source import Kernel, Part
from mlxinfer.metal_kernels.launch import Launch, MetalKernel

UTILITIES = Part("utils", '#include "mlx/backend/metal/kernels/utils.h"\n')  # MLX prepends it


@dataclass(frozen=True, slots=True)
class Captured:
    """What MLX would compile and bind.

    Attributes:
        inputs: (name, bytes, bytes of one item), in order: arrays, each with the shape, strides
            and number of dimensions that the body mentions.
        outputs: (name, bytes).
    """

    kernel: Kernel
    inputs: list[tuple[str, arrays.Bytes, int]]
    outputs: list[tuple[str, int]]
    grid: Size
    threadgroup: Size


def capture(
    launch: Launch, inputs: Sequence[mx.array], replacements: tuple[tuple[str, str], ...] = ()
) -> Captured:
    """Trace a launch; `replacements` are made in the source first."""
    inputs = [mx.contiguous(array) for array in inputs]
    mx.eval(inputs)
    name, source, *rest = _traced(launch, inputs)
    grid, threadgroup, infos = tuple(rest[:3]), tuple(rest[3:6]), rest[6]
    parts = tuple(_parts(launch.kernel, source))
    for old, new in replacements:
        assert any(old in part.text for part in parts), f"the source does not hold {old!r}"
        parts = tuple(Part(part.file, part.text.replace(old, new)) for part in parts)
    bound = [
        buffer
        for name, array, info in zip(launch.kernel.inputs, inputs, infos, strict=True)
        for buffer in _bound(name, array, info)
    ]
    sizes = [
        int(np.prod(shape)) * dtype.size
        for shape, dtype in zip(launch.output_shapes, launch.output_dtypes, strict=True)
    ]
    return Captured(
        Kernel(name, (UTILITIES, *parts)),
        bound,
        list(zip(launch.kernel.outputs, sizes, strict=True)),
        grid,
        threadgroup,
    )


def _traced(launch: Launch, inputs: Sequence[mx.array]) -> list[Any]:
    """The arguments of the primitive: name, source, grid, threadgroup, shape infos, and more."""
    seen: list[dict[str, Any]] = []

    def call(*traced: mx.array) -> Any:
        return launch.on_metal(list(traced))

    mx.export_function(seen.append, call, *inputs)
    (primitive,) = [record for record in seen if record.get("name") == "CustomKernel"]
    return list(primitive["arguments"])


def _parts(kernel: MetalKernel, source: str) -> Iterator[Part]:
    """The files that make up the header, then what MLX wrote around the body.

    Lines that name a file are left out: the harness writes its own.
    """
    assert source.startswith(kernel.header), "MLX puts something before the header"
    first, *named = re.split(r'^#line 1 "(.+)"\n', kernel.header, flags=re.MULTILINE)
    if first:
        yield Part(f"{kernel.name}.metal", first + "\n")
    for name, text in zip(named[::2], named[1::2], strict=True):
        yield Part(name, text.removesuffix("\n") + "\n")
    called = f'\n#line 1 "{kernel.name}, as MLX calls it"\n'
    yield Part("body", source.removeprefix(kernel.header).removeprefix(called))


def _bound(
    name: str, array: mx.array, info: tuple[bool, bool, bool]
) -> Iterator[tuple[str, arrays.Bytes, int]]:
    """Buffers of one input."""
    yield name, arrays.to_bytes(array), array.dtype.size
    if array.ndim:
        described: list[tuple[str, np.ndarray[Any, Any]]] = [
            ("shape", np.array(array.shape, np.int32)),
            ("strides", np.array(arrays.row_strides(array.shape), np.int64)),
            ("ndim", np.array([array.ndim], np.int32)),
        ]
        for (suffix, values), wanted in zip(described, info, strict=True):
            if wanted:
                yield f"{name}_{suffix}", values.view(np.uint8), values.itemsize
