"""What mixers with a recurrence share: how the tokens of a step go through it, and in which form.

B = sequences of a part, L = tokens of each, T = tokens of the step.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import mlx.core as mx

from ..core import StateSpec
from ..metal_kernels.conv_step import ConvForm
from ..metal_kernels.delta_step import DeltaForm
from ..metal_kernels.ssm_step import SSMForm
from ..metal_kernels.state_cases import step_variant
from ..metal_kernels.variants import KernelUse, ModelForm, ReadyFor, never
from .step import Arrays, StateCache, StatesBefore

MAX_TOKENS = 8  # of each sequence, in a step kernel
StepForm = ConvForm | DeltaForm | SSMForm


class RecurrentMixer(ABC):
    """A mixer of a layer that keeps a state of each sequence.

    Args:
        spec: of its states.
        forms: of the step kernels that together do its work.

    Attributes:
        ready: for how many tokens of a sequence the kernels are used; set by the engine.
    """

    __slots__ = ("forms", "ready", "spec")

    def __init__(self, spec: StateSpec, forms: Sequence[StepForm]) -> None:
        self.spec = spec
        self.forms = tuple(forms)
        self.ready: ReadyFor = never

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """The step kernels: one set for a token of each sequence, one for up to MAX_TOKENS."""
        one, several = ([step_variant(form, n) for form in self.forms] for n in (1, MAX_TOKENS))
        variants = {}
        for count in range(1, MAX_TOKENS + 1):
            own = one if count == 1 else several
            variants[count] = [variant for variant in own if variant is not None]
        has_all = None not in (*one, *several)
        return [KernelUse(variants, self._install)] if has_all else []

    def _install(self, ready: ReadyFor) -> None:
        self.ready = ready

    def recur(self, rows: Arrays, cache: StateCache) -> mx.array:
        """Outputs of the recurrence (T, D) from rows (T, ...) of what it needs."""
        outputs = []
        for part in cache.parts:
            inputs = [part.take(one) for one in rows]
            y, states = self.advance(inputs, part.before)
            part.write(states, inputs, self.advance)
            outputs.append(y)
        joined: mx.array = cache.join(outputs)
        return joined

    def advance(self, inputs: Arrays, before: StatesBefore) -> tuple[mx.array, Arrays]:
        """Outputs (B, L, D), and the states after the tokens that count; inputs (B, L, ...)."""
        if self.ready(inputs[0].shape[1]):
            return self.in_kernels(inputs, before)
        return self.in_mlx(inputs, before)

    @abstractmethod
    def in_kernels(self, inputs: Arrays, before: StatesBefore) -> tuple[mx.array, Arrays]:
        """`advance` by the step kernels."""

    @abstractmethod
    def in_mlx(self, inputs: Arrays, before: StatesBefore) -> tuple[mx.array, Arrays]:
        """`advance` in MLX's own operations, for any number of tokens."""
