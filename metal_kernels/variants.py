"""Forms, variants, uses and self-checks of kernels in general. Knows no kernel."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from typing import Any, Self

import mlx.core as mx

from .launch import MAX_LAUNCHES, Launch

Value = str | int | bool
ANY_ROWS = 0
ReadyFor = Callable[..., bool]
"""`ready(rows, sequences)`: whether kernels may be used for these numbers of rows and sequences.

`sequences` ALL_LOADS, the default: a place that does not say for how many.
"""
ALL_LOADS = 0
DTYPES: dict[str, mx.Dtype] = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
}


def never(rows: int, sequences: int = ALL_LOADS) -> bool:
    return False


KERNEL = "kernel"  # names of ways: the kernel, another form of it that begins so,
IN_MLX = "MLX"  # and MLX's own operations, where there is one way to use them
WORTH = 1.05  # a kernel is used where it is that much faster than MLX's own operations
Fastest = Callable[[int, int, tuple[str, ...]], str]
"""`fastest(rows, load, ways)`: the fastest of `ways` for a number of rows at a load.

A load is what the kind is timed at: sequences at once, or tokens of a prompt.
"""


def first_way(rows: int, load: int, ways: tuple[str, ...]) -> str:
    return ways[0]


def is_kernel(way: str) -> bool:
    return way.startswith(KERNEL)


@dataclass(frozen=True, slots=True)
class Loads:
    """How long each way of a computation takes at each load, and so which one is used."""

    # of each way that was timed, by load; empty: nothing was
    seconds: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    right: bool = True  # whether the kernel may be used at all

    def fastest(self, load: int, ways: tuple[str, ...]) -> str:
        """The fastest of `ways`. If none of these was timed, a kernel that is right, or the first.

        A load that was not timed is as the next smaller one that was.
        """
        allowed = [way for way in ways if self.right or not is_kernel(way)]
        seconds = self._at(load)
        timed = {way: seconds[way] for way in allowed if way in seconds}
        if timed:
            return min(timed, key=lambda way: timed[way] * (WORTH if is_kernel(way) else 1.0))
        return KERNEL if KERNEL in allowed and not self.seconds else ways[0]

    def admits(self, load: int) -> bool:
        return self.right and is_kernel(self.fastest(load, (*self._at(load), KERNEL)))

    def _at(self, load: int) -> Mapping[str, float]:
        if load == ALL_LOADS or not self.seconds:
            return self._overall
        timed = [number for number in self.seconds if number <= load]
        return self.seconds[max(timed) if timed else min(self.seconds)]

    @property
    def _overall(self) -> dict[str, float]:
        loads = list(self.seconds.values())
        common = [way for way in (loads[0] if loads else ()) if all(way in load for load in loads)]
        return {way: statistics.geometric_mean([load[way] for load in loads]) for way in common}

    @property
    def some(self) -> bool:
        return any(map(self.admits, (ALL_LOADS, *self.seconds)))

    @property
    def forms(self) -> set[str]:
        loads = (ALL_LOADS, *self.seconds)
        ways = [self.fastest(load, (*self._at(load), KERNEL)) for load in loads]
        return {way for way in ways if self.right and is_kernel(way)}


class Form:
    """A description of a kernel's computation: sizes, dtypes, functions. A frozen dataclass.

    Equal arguments give the same object, so that launches are looked up by identity.
    """

    __slots__ = ()

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """The object that was made of these arguments before, or a new one."""
        made: Self = _made(cls, values, tuple(sorted(named.items())))  # type: ignore[arg-type]  # a class is hashable
        return made

    @property
    def values(self) -> dict[str, Value]:
        """The fields as a variant states them; those of a form within it stand beside them."""
        values: dict[str, Value] = {}
        for entry in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, entry.name)
            values |= value.values if isinstance(value, Form) else {entry.name: _stated(value)}
        return values


@cache
def _made(kind: type[Any], values: tuple[Any, ...], named: tuple[tuple[str, Any], ...]) -> Any:
    return object.__new__(kind)


def _stated(value: Any) -> Value:
    if isinstance(value, mx.Dtype):
        return dtype_name(value)
    if isinstance(value, tuple):
        return " ".join(map(repr, value))
    if isinstance(value, float):
        return repr(value) if value else ""
    if value is None:
        return ""
    return value if isinstance(value, str | int) else str(value)


@lru_cache(MAX_LAUNCHES)
def launch_of(form: Any, *sizes: Any) -> Launch:
    """`form.launch` for arrays of some sizes: a decode step makes the same calls in every layer."""
    launch: Launch = form.launch(*sizes)
    return launch


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of kernel and the values that are compiled into it for a model.

    Attributes:
        form: that the values were taken from; None: the values say all.
    """

    kind: str
    values: tuple[tuple[str, Value], ...]
    form: Any = field(default=None, compare=False)

    @classmethod
    def of(cls, kind: str, **values: Value) -> Self:
        """Values in the order of their names: the same ones make the same variant."""
        return cls(kind, tuple(sorted(values.items())))

    @classmethod
    def from_form(cls, kind: str, form: Form, **values: Value) -> Self:
        return cls(kind, tuple(sorted({**form.values, **values}.items())), form)

    def __getitem__(self, name: str) -> Value:
        return dict(self.values)[name]

    def number(self, name: str) -> int:
        return int(self[name])

    @property
    def dtype(self) -> mx.Dtype:
        return DTYPES[str(self["dtype"])]

    def __str__(self) -> str:
        """Values that are 0, empty or False are left out; of True the name stands alone."""
        said = [
            name if value is True else f"{name}={value}" for name, value in self.values if value
        ]
        return " ".join([self.kind, *said])


Chosen = Mapping[Variant, Loads]
"""What was found about variants; one that is not in it may not be used."""


def everywhere(variants: Iterable[Variant]) -> Chosen:
    return dict.fromkeys(variants, Loads())


@dataclass(frozen=True, slots=True)
class KernelUse:
    """One place of a model where kernels can do the work of MLX's own operations.

    The module that calls the kernels declares it. The engine checks and compiles the variants, and
    installs whether they may be used.

    Attributes:
        variants: number of rows -> the variants that together serve them. The rows are
            what the place counts: tokens of the step, or tokens of each sequence. ANY_ROWS stands
            for every number that is not named; without an entry there is no kernel.
        install: takes the function that says for how many rows the kernels may be used. It is
            called again with another function when another engine takes the model over.
        at_load: keys of `variants` that are checked before the first step. Others are checked when
            the engine is idle, after a step has asked for them.
        install_fastest: takes the function that says which of several ways is the fastest; called
            as `install` is, for a place where the work of a kernel can be done in several ways.
    """

    variants: Mapping[int, Sequence[Variant]]
    install: Callable[[ReadyFor], None] = lambda ready: None
    at_load: tuple[int, ...] = (ANY_ROWS, 1)
    install_fastest: Callable[[Fastest], None] = lambda fastest: None


@dataclass(frozen=True, slots=True)
class ModelForm:
    """The properties of a model that kernels of its layers depend on."""

    dtype: mx.Dtype  # of hidden states
    num_experts: int = 0  # of a layer; 0: there are none
    quantized: bool = False  # whether weights are quantised


def kernels_of(model: ModelForm, *parts: Any) -> list[KernelUse]:
    """All uses of kernels by several modules, in order. A module that is None has none."""
    return [use for part in parts if part is not None for use in part.kernels(model)]


Outputs = Callable[[], list[mx.array]]


@dataclass(frozen=True, slots=True)
class Case:
    """A variant beside its twin, on inputs that are always the same.

    Attributes:
        kernel, twin: compute the same outputs; the kernel through `launch`.
        tolerances: the largest difference that each output may have.
        forms: other forms of the kernel, by way. They are used where they are right and faster.
        instead: what runs where the kernel may not be used, by way, for a case that is timed; the
            first is used where nothing is known. Empty: the twin. Outputs are as the kernel's
            where there are several.
        seen: what of the outputs is compared; None: all, as they are.
        mean_share: the part of a tolerance that the mean difference may be; 0: any. A kernel that
            rounds in other places differs in many numbers, by no more than one that is right.
    """

    kernel: Outputs
    twin: Outputs
    tolerances: tuple[float, ...]
    forms: Mapping[str, Outputs] = field(default_factory=dict)
    instead: Mapping[str, Outputs] = field(default_factory=dict)
    seen: Callable[[list[mx.array]], list[mx.array]] | None = None
    mean_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of kernel that checks itself.

    Attributes:
        name: as in `Variant.kind`.
        files: files of this folder that the computation depends on; a verdict is about their text.
        case: a variant on a small input that takes every path of it.
        timed: a variant on an input as large as in use: at a load, which is a number of sequences
            or of a prompt's tokens, with the total of tokens where that matters. It is compared,
            too, and timed beside what runs instead.
        loads: loads and tokens to time it at.
        registers: 32-bit registers of a lane at its peak: an estimate from what the source keeps,
            and about 12 for places and loops.
        accumulators: matrices of 8x8 sums that a SIMD group keeps in its loop; 0: it has no such.
        samples: variants that `mlxinfer doctor --kernels` looks at, the most telling first.
    """

    name: str
    files: tuple[str, ...]
    case: Callable[[Variant], Case]
    timed: Callable[[Variant, int, int], Case]
    registers: Callable[[Variant], int]
    samples: tuple[Variant, ...]
    loads: tuple[tuple[int, int], ...] = ((1, 0), (8, 0))
    accumulators: Callable[[Variant], int] = lambda variant: 0


def dtype_name(dtype: mx.Dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)
