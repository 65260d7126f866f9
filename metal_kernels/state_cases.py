"""Self-checks of the step kernels of recurrent layers: sequences, variants, tolerances. No GPU."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from .conv_step import MAX_LENGTH, ConvForm, conv_in_mlx, conv_step, conv_step_twin
from .delta_step import DeltaForm, delta_in_mlx, delta_step, delta_step_twin
from .launch import MIN_NUMBERS
from .ssm_step import SSMForm, ssm_in_mlx, ssm_step, ssm_step_twin
from .state_rows import FILES, filled, plan_of, takes, team_lanes
from .variants import DTYPES, Case, Kind, Value, Variant, dtype_name

StepForm = ConvForm | DeltaForm | SSMForm
F = TypeVar("F", ConvForm, DeltaForm, SSMForm)
ROUNDING = {"float32": 2e-4, "float16": 2e-2, "bfloat16": 0.15}  # of numbers below 16
SUMS = 1e-3  # of float32 in another order
Results = Callable[[], tuple[mx.array, mx.array]]


def step_variant(form: StepForm, tokens: int) -> Variant | None:
    """What a form compiles; None: it has no kernel.

    Args:
        form: of a layer.
        tokens: most tokens of a sequence. One kernel serves all; it is timed at that many.
    """
    if isinstance(form, ConvForm):
        if not 2 <= form.length <= MAX_LENGTH or form.channels < MIN_NUMBERS:
            return None
        kind = "conv_step"
    elif isinstance(form, DeltaForm):
        if not takes(form.value_dim, form.key_dim):
            return None
        kind = "delta_step"
    else:
        if not takes(form.head_dim, form.state_dim):
            return None
        kind = "ssm_step"
    values = {each.name: _plain(getattr(form, each.name)) for each in fields(form)}
    return Variant.of(kind, tokens=tokens, **values)


def _plain(value: object) -> Value:
    if isinstance(value, mx.Dtype):
        return dtype_name(value)
    if isinstance(value, tuple):
        return " ".join(map(repr, value))
    assert isinstance(value, int), value
    return value


def _form(variant: Variant, kind: type[F]) -> F:
    """The form that `step_variant` was given."""
    values: dict[str, Any] = dict(variant.values)
    del values["tokens"]
    for name, value in values.items():
        if value in DTYPES:
            values[name] = DTYPES[str(value)]
        elif isinstance(value, str):
            values[name] = tuple(map(float, value.split()))
    return kind(**values)


class _Scene:
    """States of three sequences in two arrays, one of which begins, or of many in one array."""

    def __init__(self, variant: Variant, shape: tuple[int, ...], sequences: int | None) -> None:
        self.rng = np.random.default_rng(0)
        tokens = variant.number("tokens")
        if sequences is None:
            self.sources = filled([self.normal(2, *shape), self.normal(1, *shape)])
            counts = [tokens, max(1, tokens // 2), tokens]
            self.plan = plan_of([(0, 1), (1, 0), (0, -1)], counts)
        else:
            self.sources = filled([self.normal(sequences, *shape)])
            self.plan = plan_of([(0, row) for row in range(sequences)], [tokens] * sequences)
        self.lead = sequences or 3, tokens
        real = mx.arange(tokens) < self.plan[: self.lead[0], 2:]
        self.real = mx.array(np.array(real)[..., None])  # (B, L, 1)
        self.timed = sequences is not None

    def normal(self, *shape: int) -> mx.array:
        return mx.array(self.rng.normal(size=shape).astype(np.float32))

    def case(
        self,
        kernel: Results,
        twin: Results,
        rounding: float,
    ) -> Case:
        """Outputs of tokens that count, and states."""

        def masked(call: Results) -> list[mx.array]:
            y, state = call()
            return [y, state] if self.timed else [mx.where(self.real, y, mx.zeros_like(y)), state]

        return Case(lambda: masked(kernel), lambda: masked(twin), (rounding, rounding))


def _conv(variant: Variant, sequences: int | None = None) -> Case:
    form = _form(variant, ConvForm)
    scene = _Scene(variant, (form.length - 1, form.channels), sequences)
    width = form.at + (3 if form.gated else 1) * form.channels
    inputs = scene.normal(*scene.lead, width).astype(form.dtype)
    weight = scene.normal(form.channels, form.length).astype(form.dtype)
    bias = scene.normal(form.channels).astype(form.dtype) if form.biased else None
    call, state = (inputs, weight, bias), scene.sources[0]
    return scene.case(
        lambda: conv_step(*call, scene.sources, scene.plan, form),
        (lambda: conv_in_mlx(*call, state, None, form))
        if scene.timed
        else lambda: conv_step_twin(*call, scene.sources, scene.plan, form),
        ROUNDING[str(variant["dtype"])],
    )


def _delta(variant: Variant, sequences: int | None = None) -> Case:
    form = _form(variant, DeltaForm)
    heads = form.value_heads, form.value_dim
    scene = _Scene(variant, (*heads, form.key_dim), sequences)
    width = form.strengths_at + form.value_heads
    if not form.each:  # time steps stand among what is projected
        width = max(width, form.times_at + form.num_times)
    mixed = scene.normal(*scene.lead, form.key_width + heads[0] * heads[1]).astype(form.dtype)
    projected = scene.normal(*scene.lead, width).astype(form.dtype)
    times = scene.normal(*scene.lead, form.times_at + form.num_times).astype(form.dtype)
    times = times if form.each else projected
    rates, biases = mx.exp(scene.normal(form.num_times)), scene.normal(form.num_times)
    call, state = (mixed, projected, times, rates, biases), scene.sources[0]
    return scene.case(
        lambda: delta_step(*call, scene.sources, scene.plan, form),
        (lambda: delta_in_mlx(*call, state, None, form))
        if scene.timed
        else lambda: delta_step_twin(*call, scene.sources, scene.plan, form),
        ROUNDING[str(variant["dtype"])],
    )


def _ssm(variant: Variant, sequences: int | None = None) -> Case:
    form = _form(variant, SSMForm)
    scene = _Scene(variant, (form.heads, form.head_dim, form.state_dim), sequences)
    width = form.inner + 2 * form.groups * form.state_dim
    mixed = 0.3 * scene.normal(*scene.lead, width)
    projected = scene.normal(*scene.lead, form.times_at + form.heads).astype(form.dtype)
    heads = mx.exp(scene.normal(form.heads)), scene.normal(form.heads), scene.normal(form.heads)
    call, state = (mixed, projected, *heads), scene.sources[0]
    return scene.case(
        lambda: ssm_step(*call, scene.sources, scene.plan, form),
        (lambda: ssm_in_mlx(*call, state, None, form))
        if scene.timed
        else lambda: ssm_step_twin(*call, scene.sources, scene.plan, form),
        SUMS,
    )


def _samples(*forms: StepForm) -> tuple[Variant, ...]:
    """Of each form, verification and decoding."""
    variants = [step_variant(form, tokens) for tokens in (8, 1) for form in forms]
    return tuple(variant for variant in variants if variant is not None)


def _own_numbers(width: int) -> int:
    """Numbers of a row of `width` that a lane holds of the state, and of each that it meets."""
    return width // (team_lanes(width) or 1)


_F32, _BF16, _UNLIMITED = mx.float32, mx.bfloat16, (0.0, float("inf"))
CONV_STEP = Kind(
    name="conv_step",
    files=("conv_step.metal", "conv_step.py", *FILES),
    case=_conv,
    timed=lambda variant, sequences, _: _conv(variant, sequences),
    registers=lambda variant: 16 + 2 * variant.number("length"),
    samples=_samples(
        ConvForm(2048, 3, 0, True, False, _BF16, _BF16),  # LFM2 1.2B
        ConvForm(3072, 4, 2048, False, True, _BF16, _F32),  # Mamba-2
        ConvForm(8192, 4, 0, False, False, _BF16, _BF16),  # Qwen 3.5 35B-A3B
    ),
)
DELTA_STEP = Kind(
    name="delta_step",
    files=("delta_step.metal", "delta_step.py", *FILES),
    case=_delta,
    timed=lambda variant, sequences, _: _delta(variant, sequences),
    registers=lambda variant: 20 + 4 * _own_numbers(variant.number("key_dim")),
    samples=_samples(
        DeltaForm(4, 128, 8, 128, False, 64, 72, _BF16),  # a quarter of Qwen 3.5 35B-A3B
        DeltaForm(2, 128, 2, 128, True, 0, 0, _BF16),  # Kimi Linear, some of its heads
    ),
)
SSM_STEP = Kind(
    name="ssm_step",
    files=("ssm_step.metal", "ssm_step.py", *FILES),
    case=_ssm,
    timed=lambda variant, sequences, _: _ssm(variant, sequences),
    registers=lambda variant: 20 + 3 * _own_numbers(variant.number("state_dim")),
    samples=_samples(
        SSMForm(8, 64, 1, 128, 64, _UNLIMITED, _BF16),  # Granite 4-H, some of its heads
        SSMForm(8, 64, 2, 256, 64, (0.001, 0.1), _BF16),  # as Falcon-H1, with limits
    ),
)
