"""Gemma 3n: several hidden states a token. Each layer computes one of them (AltUp, 2301.13310).

T = tokens of the step, S = streams, that is hidden states of a token. Layers predict all streams,
compute the active one, and correct the others by what came out. Beside attention runs a product of
low rank (Laurel), and some gates of feed-forward blocks are cut to their largest numbers.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from statistics import NormalDist
from typing import ClassVar

import mlx.core as mx

from ...errors import CheckpointError
from ...layers.attention import LayerMixer
from ...layers.linear import Projection
from ...layers.mlp import MLP, Activation, FeedForward, Gated
from ...layers.norm import Norm, RMSNorm
from ...layers.step import Layer, Passed, Step
from ..config import ModelConfig
from ..decoder import Entry
from ..family import Family, HeadNorms, root_of_width
from ..jsonfields import Fields
from ..stage import BetweenStages
from .gemma import Gemma2, language_fields
from .gemma_e import (
    FROM_ELSEWHERE,
    PerLayerGate,
    PerLayerInputs,
    between_stages,
    per_layer_gate,
    per_layer_inputs,
    shared,
    shared_or_own,
)

_LEAST = 1e-5  # of a mean square that is divided by


@dataclass(slots=True, eq=False)
class SparseGate:
    """A gated activation that sets gates below mean + cut * standard deviation to zero."""

    activation: Gated
    cut: float

    def __call__(self, gate_up: mx.array) -> mx.array:
        """gate_up (..., 2 * dims) -> (..., dims)."""
        gate, up = mx.split(gate_up, 2, axis=-1)
        mean, deviation = mx.mean(gate, -1, keepdims=True), mx.std(gate, -1, keepdims=True)
        gate = mx.maximum(gate - (mean + deviation * self.cut), 0.0)
        return self.activation(mx.concatenate([gate, up], axis=-1))


@dataclass(slots=True, eq=False)
class StreamedEntry:
    """The streams of a token's embedding: itself, and projections of it that are as long."""

    inputs: PerLayerInputs  # leaves the per-layer inputs in the step
    projection: Projection  # (T, hidden) -> (T, (S - 1) * hidden)

    def __call__(self, ids: mx.array, x: mx.array, step: Step) -> mx.array:
        """ids (T,) and x (T, hidden) -> (T, S, hidden)."""
        x = self.inputs(ids, x, step)[:, None]
        streams = mx.unflatten(self.projection(x[:, 0]), -1, (-1, x.shape[-1]))
        return mx.concatenate([x, _as_long(streams, x)], axis=1)


class StreamedNorm:
    """The mean of all streams, the later ones projected back, and a norm over it.

    Args:
        projections: (T, hidden) -> (T, hidden), of all streams but the first.
    """

    __slots__ = ("norm", "projections")

    def __init__(self, projections: Sequence[Projection], norm: Norm) -> None:
        self.projections = tuple(projections)
        self.norm = norm

    def __call__(self, x: mx.array) -> mx.array:
        """x (T, S, hidden) -> (T, hidden)."""
        back = [project(x[:, i + 1]) for i, project in enumerate(self.projections)]
        first = x[:, :1]
        streams = mx.concatenate([first, _as_long(mx.stack(back, axis=1), first)], axis=1)
        return self.norm(mx.mean(streams, axis=1))


def _as_long(x: mx.array, other: mx.array) -> mx.array:
    """x (T, S, hidden), each as long as `other` (T, 1, hidden)."""
    length = mx.sqrt(mx.mean(mx.square(other), axis=-1, keepdims=True))
    square = mx.mean(mx.square(x), axis=-1, keepdims=True)
    return x * length * mx.rsqrt(mx.maximum(square, _LEAST))


@dataclass(slots=True, eq=False)
class AltUp:
    """Predicts all streams from all streams, and corrects them by the error of the active one."""

    active: int  # the stream that a layer computes
    _: KW_ONLY
    norm: Norm  # before the router, over the hidden size; it also divides by that
    router: Projection  # (T, hidden) -> (T, S)
    prediction: Projection  # coefficients (T, S * S) of what the router gives
    correction: Projection  # coefficients (T, S) of the same

    def predict(self, streams: mx.array) -> mx.array:
        """(T, S, hidden) -> the same, as expected behind the layer."""
        count = streams.shape[1]
        routed = self._routed(streams[:, self.active])
        coefficients = mx.unflatten(self.prediction(routed), -1, (count, count))
        return coefficients @ streams + streams

    def correct(self, predicted: mx.array, computed: mx.array) -> mx.array:
        """Predictions (T, S, hidden), moved by how far the active one (T, hidden) was off."""
        coefficients = self.correction(self._routed(computed)) + 1.0  # (T, S)
        off = computed - predicted[:, self.active]
        return predicted + coefficients[..., None] * off[:, None]

    def _routed(self, x: mx.array) -> mx.array:
        return mx.tanh(self.router(self.norm(x)).astype(mx.float32)).astype(x.dtype)


@dataclass(slots=True, eq=False)
class Laurel:
    """x + norm(right(left(x))): a product of low rank beside attention (arXiv 2411.07501)."""

    left: Projection
    right: Projection
    norm: Norm

    def __call__(self, x: mx.array) -> mx.array:
        """x (T, hidden) -> (T, hidden)."""
        return x + self.norm(self.right(self.left(x)))


class StreamedLayer(Layer):
    """A sandwich layer over the active stream, between a prediction and a correction of all.

    Args:
        norms: before and behind the mixer, before and behind the feed-forward block.
        gate: adds what the layer makes of its per-layer input to all streams but the first.
        scale: (hidden,) of what the gate reads; None: 1.
    """

    __slots__ = ("altup", "gate", "laurel", "mixer", "mlp", "norms", "scale")

    def __init__(
        self,
        norms: Sequence[Norm],
        mixer: LayerMixer,
        mlp: FeedForward,
        *,
        altup: AltUp,
        laurel: Laurel,
        gate: PerLayerGate,
        scale: mx.array | None,
    ) -> None:
        self.norms = tuple(norms)
        self.mixer = mixer
        self.mlp = mlp
        self.altup = altup
        self.laurel = laurel
        self.gate = gate
        self.scale = scale

    def __call__(self, x: mx.array, normed: mx.array | None, step: Step) -> Passed:
        """x (T, S, hidden) to the same shape."""
        before, behind, before_mlp, behind_mlp = self.norms
        predicted = self.altup.predict(x)
        normed = before(predicted[:, self.altup.active])
        predicted = step.narrow(predicted) if step.narrows else predicted
        y = predicted[:, self.altup.active] + behind(self.mixer(normed, step))
        y = (y + self.laurel(step.read(normed))) * 2.0**-0.5
        y = y + behind_mlp(self.mlp(before_mlp(y)))
        corrected = self.altup.correct(predicted, y)
        first, streams = mx.split(corrected, [1], axis=1)
        read = corrected[:, self.altup.active]
        added = self.gate(read if self.scale is None else read * self.scale, step)
        return mx.concatenate([first, streams + added[:, None]], axis=1), None


class Gemma3n(Family):
    """Gemma 3n E2B and E4B, alone or as the language model of a multimodal checkpoint."""

    defaults: ClassVar = {
        "vocab_size": 262_400,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32_768,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "final_logit_softcapping": 30.0,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 15,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "laurel_rank": 64,
        "tie_word_embeddings": True,
    }
    fits_float16 = False
    embed_scale = root_of_width
    head_norms = HeadNorms(values=True)

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """The text_config of a multimodal model, with one width of feed-forward blocks for all."""
        fields = language_fields(config, "gemma3n")
        widths = fields.get("intermediate_size")
        if not isinstance(widths, list):
            return fields
        first = widths[0] if widths else None
        sizes = {"intermediate_size": first, "intermediate_sizes": widths}
        return Fields({**fields.values, **sizes}, fields.where)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        fields, count = config.fields, config.num_layers
        _widths(fields, config.intermediate_size, count)
        _sparsity(fields, count)
        streams = fields.integer("altup_num_inputs", low=2, high=64)
        fields.integer("altup_active_idx", low=0, high=streams - 1)
        return replace(config, attention_scale=1.0, without_cache=shared(config))

    @classmethod
    def whole_because(cls, config: ModelConfig) -> str:
        return FROM_ELSEWHERE

    @classmethod
    def between_stages(cls, config: ModelConfig) -> BetweenStages:
        """All streams of a token, and the arrays that Gemma 4 passes on."""
        return between_stages(config, num_streams=config.fields.integer("altup_num_inputs"))

    @property
    def num_streams(self) -> int:
        return self.config.fields.integer("altup_num_inputs")

    def entry(self) -> Entry:
        inputs, hidden = per_layer_inputs(self), self.config.hidden_size
        if inputs is None:
            where = self.config.fields.where
            raise CheckpointError(f"hidden_size_per_layer_input in {where} is 0; expected more.")
        paths = [f"model.altup_projections.{i}" for i in range(self.num_streams - 1)]
        projection = self.weights.fused(paths, [hidden] * len(paths), hidden)
        return StreamedEntry(inputs, projection)

    def last_norm(self) -> Norm:
        hidden = self.config.hidden_size
        return StreamedNorm(
            [
                self.weights.linear(f"model.altup_unembed_projections.{i}", hidden, hidden)
                for i in range(self.num_streams - 1)
            ],
            super().last_norm(),
        )

    def layer(self, index: int) -> Layer:
        path, hidden = f"model.layers.{index}", self.config.hidden_size
        rank = self.config.fields.integer("laurel_rank", high=2**16)
        gate = per_layer_gate(self, index)
        assert gate is not None, "see entry"
        scale = self.weights.take(f"{path}.altup.correct_output_scale", (hidden,))
        return StreamedLayer(
            [self.norm(f"{path}.{name}") for name in Gemma2.block_norms],
            self.mixer(index),
            self.mlp(index),
            altup=self._altup(f"{path}.altup"),
            laurel=Laurel(
                self.weights.linear(f"{path}.laurel.linear_left", rank, hidden),
                self.weights.linear(f"{path}.laurel.linear_right", hidden, rank),
                self.norm(f"{path}.laurel.post_laurel_norm"),
            ),
            gate=gate,
            scale=scale if self.config.fields.boolean("altup_correct_scale") else None,
        )

    def _altup(self, path: str) -> AltUp:
        config, weights, count = self.config, self.weights, self.num_streams
        hidden = config.hidden_size
        weight = weights.take(f"{path}.router_norm.weight", (hidden,)) / hidden
        return AltUp(
            config.fields.integer("altup_active_idx", low=0),
            norm=RMSNorm(weight, config.rms_norm_eps),
            router=weights.linear(f"{path}.modality_router", count, hidden),
            prediction=weights.linear(f"{path}.prediction_coefs", count * count, count),
            correction=weights.linear(f"{path}.correction_coefs", count, count),
        )

    def mixer(self, index: int) -> LayerMixer:
        return shared_or_own(self, index, super().mixer)

    def mlp(self, index: int) -> FeedForward:
        config, path = self.config, f"model.layers.{index}.mlp"
        inner = _widths(config.fields, config.intermediate_size, config.num_layers)[index]
        made = self.dense_mlp(path, inner)
        sparsity = _sparsity(config.fields, config.num_layers)[index]
        if not sparsity:
            return made
        cut: Activation = SparseGate(self.activation, NormalDist().inv_cdf(sparsity))
        return MLP(made.gate_up_proj, made.down_proj, cut)


def _widths(fields: Fields, width: int, num_layers: int) -> list[int]:
    """The width of each layer's feed-forward block."""
    stated = fields.items("intermediate_sizes")
    if stated is None:
        return [width] * num_layers
    if len(stated) != num_layers or not all(type(one) is int and 0 < one < 2**22 for one in stated):
        raise CheckpointError(
            f"intermediate_size in {fields.where} must be a number or {num_layers} of them."
        )
    return stated


def _sparsity(fields: Fields, num_layers: int) -> list[float]:
    stated = fields.items("activation_sparsity_pattern")
    if stated is None:
        sparse = 10 if num_layers > 10 else 0
        return [0.95] * sparse + [0.0] * (num_layers - sparse)
    if len(stated) != num_layers or not all(
        type(one) in (int, float) and 0 <= one < 1 for one in stated
    ):
        raise CheckpointError(
            f"activation_sparsity_pattern in {fields.where} must be {num_layers} numbers from 0 to "
            "below 1."
        )
    return [float(one) for one in stated]
