"""The common part of mixers with a recurrence, and the mixer of one convolution.

B = sequences of a part, L = tokens of each, T = tokens of the step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..cache_specs import StateSpec
from ..metal_kernels.conv_step import ConvStep
from ..metal_kernels.state_step import StateStep
from ..metal_kernels.variants import KernelUse, ModelForm, ReadyFor, never
from .attention import Mixer
from .linear import Projection
from .step import Arrays, PlaceStates, ReadStates, Step

MAX_TOKENS = 8  # of each sequence, in a step kernel
Run = Callable[..., tuple[mx.array, mx.array]]
"""`run(i, *arrays)`: outputs of recurrence i of a mixer, and its states after the tokens."""


class CausalConv(NamedTuple):
    """The weights of a causal depthwise convolution over the tokens of each sequence."""

    weight: mx.array  # (C, K, 1), the oldest token's first
    bias: mx.array | None = None  # (C,)

    def step(
        self, *, at: int = 0, gated: bool = False, outputs: mx.Dtype | None = None
    ) -> ConvStep:
        """The recurrence, see `ConvStep`; outputs of the dtype of the weights if None is given."""
        channels, length, _ = self.weight.shape
        dtype, biased = self.weight.dtype, self.bias is not None
        return ConvStep(channels, length, at, gated, biased, dtype, outputs or dtype)


class RecurrentMixer(Mixer, ABC):
    """A mixer of a layer that keeps a state of each sequence.

    Args:
        in_proj: (T, hidden) -> inputs of the recurrences.
        out_proj: outputs of `mix` -> (T, hidden).
        spec: of the states, one for each of `steps`.
        steps: the recurrences that a token goes through, one after the other.

    Attributes:
        ready: for how many tokens of a sequence the kernels are used; set by the engine.
    """

    __slots__ = ("in_proj", "out_proj", "ready", "spec", "steps")

    spec: StateSpec

    def __init__(
        self,
        *,
        in_proj: Projection,
        out_proj: Projection,
        spec: StateSpec,
        steps: Sequence[StateStep],
    ) -> None:
        self.in_proj = in_proj
        self.out_proj = out_proj
        self.spec = spec
        self.steps = tuple(steps)
        self.ready: ReadyFor = never

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (R, hidden), plus the residual."""
        return self.out_proj(step.read_checked(self.mix(x, step)), residual)

    @abstractmethod
    def mix(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> the input of out_proj."""

    @abstractmethod
    def chain(self, inputs: Arrays, run: Run) -> tuple[mx.array, Arrays]:
        """Outputs (B, L, D) and states of the recurrences; inputs (B, L, ...)."""

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """The step kernels: one set for a token of each sequence, one for up to MAX_TOKENS."""
        if not all(step.has_kernel for step in self.steps):
            return []
        one, several = ([step.variant(n) for step in self.steps] for n in (1, MAX_TOKENS))
        variants = dict.fromkeys(range(2, MAX_TOKENS + 1), several)
        return [KernelUse({1: one, **variants}, self._install)]

    def _install(self, ready: ReadyFor) -> None:
        self.ready = ready

    def recur(self, rows: Arrays, step: Step) -> mx.array:
        """Outputs of the recurrences (T, D); `rows` are their inputs (T, ...)."""
        outputs: mx.array = step.caches[self].recur(rows, self.advance)
        return outputs

    def advance(
        self, inputs: Arrays, read: ReadStates, place: PlaceStates
    ) -> tuple[mx.array, Arrays]:
        """Outputs (B, L, D), and the states after the tokens that count; inputs (B, L, ...)."""
        if self.ready(inputs[0].shape[1]):
            return self.in_kernels(inputs, *place())
        return self.in_mlx(inputs, *read())

    def in_kernels(
        self, inputs: Arrays, plan: mx.array, sources: Sequence[Arrays]
    ) -> tuple[mx.array, Arrays]:
        """`advance` by the step kernels."""

        def run(index: int, *arrays: Any) -> tuple[mx.array, mx.array]:
            return self.steps[index].in_kernel(arrays, sources[index], plan)

        return self.chain(inputs, run)

    def in_mlx(
        self, inputs: Arrays, states: Arrays, lengths: mx.array | None
    ) -> tuple[mx.array, Arrays]:
        """`advance` in MLX's own operations, for any number of tokens."""

        def run(index: int, *arrays: Any) -> tuple[mx.array, mx.array]:
            return self.steps[index].in_mlx(arrays, states[index], lengths)

        return self.chain(inputs, run)


class ShortConv(RecurrentMixer):
    """A gated short convolution (LFM2): out(c * conv(b * x)); b, c and x are projections.

    Args:
        in_proj: (T, hidden) -> (T, 3 * hidden): b, c and x.
        out_proj: (T, hidden) -> (T, hidden).
    """

    __slots__ = ("conv",)

    def __init__(
        self, *, in_proj: Projection, out_proj: Projection, conv: CausalConv, spec: StateSpec
    ) -> None:
        self.conv = conv
        steps = [conv.step(gated=True)]
        super().__init__(in_proj=in_proj, out_proj=out_proj, spec=spec, steps=steps)

    def mix(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> the input of out_proj, (T, hidden)."""
        return self.recur([self.in_proj(x)], step)

    def chain(self, inputs: Arrays, run: Run) -> tuple[mx.array, Arrays]:
        """See `RecurrentMixer`. Inputs: b, c and x side by side, (B, L, 3 * hidden)."""
        y, seen = run(0, inputs[0], *self.conv)
        return y, [seen]
