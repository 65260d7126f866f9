"""What a kernel is compiled for, and how it is compared with its twin. Knows no kernel, no GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import mlx.core as mx

Value = str | int | bool
ReadyFor = Callable[[int], bool]  # whether kernels may be used for so many tokens
DTYPES: dict[str, mx.Dtype] = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
}


def never(_: int) -> bool:
    """No kernels."""
    return False


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of kernel and the values that are compiled into it for a model."""

    kind: str
    values: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, kind: str, **values: Value) -> Self:
        """Values in the order of their names: the same ones make the same variant."""
        return cls(kind, tuple(sorted(values.items())))

    def __getitem__(self, name: str) -> Value:
        return dict(self.values)[name]

    def number(self, name: str) -> int:
        """The value of this name."""
        return int(self[name])

    @property
    def dtype(self) -> mx.Dtype:
        """The value `dtype`."""
        return DTYPES[str(self["dtype"])]

    def __str__(self) -> str:
        """What is 0 or False is left out, what is True is its name alone."""
        said = [
            name if value is True else f"{name}={value}" for name, value in self.values if value
        ]
        return " ".join([self.kind, *said])


Outputs = Callable[[], list[mx.array]]


@dataclass(frozen=True, slots=True)
class Case:
    """A variant beside its twin, on inputs that are always the same.

    Attributes:
        kernel, twin: compute the same outputs; the kernel through `launch`.
        tolerances: the largest difference that each output may have.
    """

    kernel: Outputs
    twin: Outputs
    tolerances: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of kernel that checks itself.

    Attributes:
        name: as in `Variant.kind`.
        files: of this folder, that decide what it computes; a verdict is about their text.
        case: a variant on a small input that takes every path of it.
        timed: a variant beside MLX's own operations, on an input as large as in use: of so many
            sequences, with so many tokens before them where that matters.
        loads: sequences and tokens to time it at.
        registers: 32-bit registers of a lane at its peak: an estimate from what the source keeps,
            and about 12 for places and loops.
        samples: variants that `mlxinfer doctor --kernels` looks at, the most telling first.
    """

    name: str
    files: tuple[str, ...]
    case: Callable[[Variant], Case]
    timed: Callable[[Variant, int, int], Case]
    registers: Callable[[Variant], int]
    samples: tuple[Variant, ...]
    loads: tuple[tuple[int, int], ...] = ((1, 0), (8, 0))


def dtype_name(dtype: mx.Dtype) -> str:
    """'float16' of mx.float16."""
    return next(name for name, known in DTYPES.items() if known == dtype)
