"""One step of a recurrence over the few tokens of decoding and verification: kernel and twin.

B = sequences, L = tokens that each brings to a step. A step leaves the states of its sequences in
one array. The next step may have others of them, in another order, beside some that begin. So a
kernel gets `SOURCES` arrays as they are, and a plan: array and row of each sequence's state, and
how many of its L tokens count. Nothing is gathered before it, and nothing is scattered behind it.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from .launch import MIN_NUMBERS, Launch, MetalKernel, TemplateValue
from .variants import IN_MLX, Case, Form, Kind, Variant, launch_of

SOURCES = 4  # arrays
PLAN = 3  # numbers of a sequence in the plan: source, row (-1: zeros), tokens that count
LANES = 32
TEAMS = 8  # SIMD-groups of a threadgroup
MAX_PER_LANE = 16  # numbers of a state row that a lane holds, where the row allows it
WIDEST_PER_LANE = 32
NAMES = tuple(f"source_{i}" for i in range(SOURCES))
INPUTS = ("plan", *NAMES)  # of every such kernel, at the end
ARRAYS = ", ".join(NAMES)  # in the call of `state_at`
ROUNDING = {"float32": 2e-4, "float16": 2e-2, "bfloat16": 0.15}  # of numbers below 16

StateRow = tuple[int, int]  # source and row
Arrays = Sequence[Any]  # arrays; None in place of one that there is not
Result = tuple[mx.array, mx.array]  # outputs (B, L, ...), and states (B, ...) float32


class StateStep(Form):
    """The sizes of a recurrence, its kernel and its plain-MLX form.

    `arrays` stands for what a recurrence reads beside the states; each class lists it. The first
    of them is (B, L, ...), and its shape is what `launch` takes.
    """

    __slots__ = ()

    name: ClassVar[str]  # of the kernel

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one sequence's state."""

    @property
    @abstractmethod
    def has_kernel(self) -> bool:
        """Whether the kernel takes such sizes."""

    @property
    @abstractmethod
    def registers(self) -> int:
        """32-bit registers of a lane at its peak: an estimate."""

    @abstractmethod
    def in_mlx(self, arrays: Arrays, state: mx.array, lengths: mx.array | None) -> Result:
        """Outputs, and the states after the tokens that count, in MLX's own operations.

        Args:
            state: (B, *state_shape) float32, before the tokens.
            lengths: (B,) tokens that count; None: all. Outputs behind them may be anything.
        """

    @abstractmethod
    def drawn(self, normal: Callable[..., mx.array], lead: tuple[int, int]) -> list[Any]:
        """Inputs of a self-check; `lead`: B and L."""

    def in_kernel(self, arrays: Arrays, sources: Sequence[mx.array], plan: mx.array) -> Result:
        """The same as `in_mlx` in one dispatch. Outputs behind the tokens that count are zeros.

        Args:
            arrays: inputs; the kernel does not read one that is None.
            sources: `SOURCES` arrays (N, *state_shape) float32.
            plan: see `plan_of`.
        """
        given = [arrays[1] if array is None else array for array in arrays]
        outputs, after = launch_of(self, arrays[0].shape)([*given, plan, *sources])
        return outputs, after

    def twin(self, arrays: Arrays, sources: Sequence[mx.array], plan: mx.array) -> Result:
        """The same as `in_kernel` in plain MLX."""
        count = len(arrays[0])
        return self.in_mlx(arrays, gathered(sources, plan, count), plan[:count, 2])

    def variant(self, tokens: int) -> Variant:
        """The kernel for up to `tokens` tokens of a sequence. It is timed at that number."""
        return Variant.from_form(self.name, self, tokens=tokens)


def plan_of(places: Sequence[StateRow], counts: Sequence[int]) -> mx.array:
    """(max(B, 3), 3) int32: longer than what MLX would pass in another address space.

    Args:
        places: (B,) of the state before the step; row -1: zeros.
        counts: (B,) tokens that count.
    """
    rows = [[*place, count] for place, count in zip(places, counts, strict=True)]
    rows += [[0, -1, 0]] * (-(-MIN_NUMBERS // PLAN) - len(rows))
    return mx.array(np.array(rows, dtype=np.int32))


def filled(arrays: Sequence[mx.array]) -> list[mx.array]:
    """`SOURCES` arrays: the first stands for those that are missing."""
    assert 0 < len(arrays) <= SOURCES, len(arrays)
    return [*arrays, *[arrays[0]] * (SOURCES - len(arrays))]


def gathered(sources: Sequence[mx.array], plan: mx.array, count: int) -> mx.array:
    """The states (B, ...) that a plan for B sequences names, in plain MLX."""
    rows = []
    for source, row, _ in np.array(plan)[:count].tolist():
        zeros = mx.zeros((1, *sources[0].shape[1:]), sources[0].dtype)
        rows.append(zeros if row < 0 else sources[source][row : row + 1])
    return mx.concatenate(rows)


def team_lanes(width: int) -> int | None:
    """Lanes that share a row of `width` numbers, four neighbours a load; None: no such number."""
    teams = [lanes for lanes in (1, 2, 4, 8, 16, 32) if width % (4 * lanes) == 0]
    for lanes in teams:
        if width // lanes <= MAX_PER_LANE:
            return lanes
    return teams[-1] if teams and width // teams[-1] <= WIDEST_PER_LANE else None


def takes(rows: int, width: int) -> bool:
    """Whether a matrix (rows, width) is divided into whole SIMD-groups."""
    lanes = team_lanes(width)
    return lanes is not None and rows * lanes % LANES == 0


def matrix_launch(
    step: StateStep,
    kernel: MetalKernel,
    template: Sequence[tuple[str, TemplateValue]],
    lead: tuple[int, int],
    dtype: mx.Dtype,
) -> Launch:
    """The dispatch of a recurrence with a matrix (rows, width) for each of H heads as its state.

    Args:
        kernel, template: of the launch; TEAM, the lanes that share a row, is added.
        dtype: of the outputs (B, L, H * rows).
    """
    heads, rows, width = step.state_shape
    lanes = team_lanes(width)
    assert lanes is not None, step
    across, count = rows * lanes, lead[0]
    return Launch(
        kernel,
        template=[*template, ("TEAM", lanes)],
        grid=(across, heads, count),
        threadgroup=(min(TEAMS * LANES, across), 1, 1),
        output_shapes=[(*lead, heads * rows), (count, *step.state_shape)],
        output_dtypes=[dtype, mx.float32],
    )


# -- self-checks --------------------------------------------------------------------------------


def step_kind(*samples: StateStep, rounding: dict[str, float] | None = None) -> Kind:
    """The kind of a step kernel; samples are checked for verification and for decoding."""
    name, rounding = samples[0].name, rounding or ROUNDING
    return Kind(
        name=name,
        files=(f"{name}.metal", f"{name}.py", "state_rows.h", "state_step.py"),
        case=lambda variant: _case(variant, rounding),
        timed=lambda variant, sequences, _: _timed(variant, sequences, rounding),
        registers=lambda variant: variant.form.registers,
        samples=tuple(step.variant(tokens) for tokens in (8, 1) for step in samples),
    )


def _case(variant: Variant, rounding: dict[str, float]) -> Case:
    """States of three sequences in two arrays. One begins; two do not fill the step."""
    step, tokens, normal = variant.form, variant.number("tokens"), _normal()
    sources = filled([normal(2, *step.state_shape), normal(1, *step.state_shape)])
    plan = plan_of([(0, 1), (1, 0), (0, -1)], [tokens, max(1, tokens // 2), tokens])
    arrays = step.drawn(normal, (3, tokens))
    real = (mx.arange(tokens) < plan[:3, 2:])[..., None]  # (B, L, 1)

    def masked(result: Result) -> list[mx.array]:
        outputs, states = result
        return [mx.where(real, outputs, mx.zeros_like(outputs)), states]

    return Case(
        lambda: masked(step.in_kernel(arrays, sources, plan)),
        lambda: masked(step.twin(arrays, sources, plan)),
        (rounding[str(variant["dtype"])],) * 2,
    )


def _timed(variant: Variant, sequences: int, rounding: dict[str, float]) -> Case:
    step, tokens, normal = variant.form, variant.number("tokens"), _normal()
    sources = filled([normal(sequences, *step.state_shape)])
    plan = plan_of([(0, row) for row in range(sequences)], [tokens] * sequences)
    arrays = step.drawn(normal, (sequences, tokens))
    return Case(
        lambda: [*step.in_kernel(arrays, sources, plan)],
        lambda: [*step.twin(arrays, sources, plan)],
        (rounding[str(variant["dtype"])],) * 2,
        instead={IN_MLX: lambda: [*step.in_mlx(arrays, sources[0], None)]},
    )


def _normal() -> Callable[..., mx.array]:
    rng = np.random.default_rng(0)
    return lambda *shape: mx.array(rng.normal(size=shape).astype(np.float32))
