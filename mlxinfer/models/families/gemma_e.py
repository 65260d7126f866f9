"""Parts of Gemma 3n and the E models of Gemma 4: per-layer inputs, and layers without keys.

Every layer adds a vector that depends on the token itself. T = tokens of the step, L = layers,
P = numbers of one layer's input for a token.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import mlx.core as mx

from ...errors import CheckpointError
from ...layers.attention import Attention, LayerMixer, SharedAttention
from ...layers.linear import Embedding, Projection
from ...layers.mlp import Gated
from ...layers.norm import Norm
from ...layers.step import Step
from ..config import ModelConfig
from ..family import Family
from ..stage import BetweenStages

_MIX = 2.0**-0.5  # of the two parts of an input


@dataclass(slots=True, eq=False)
class PerLayerInputs:
    """Each layer's input: a row of a table, and a projection of the token's embedding."""

    table: Embedding  # of (vocabulary, L * P)
    _: KW_ONLY
    vocab_size: int  # rows of it; tokens beyond take the first
    picture_id: int  # the token whose row the features of a picture take
    projection: Projection  # (T, hidden) -> (T, L * P)
    norm: Norm  # over the P numbers of a projected embedding
    num_layers: int  # L
    scale: float  # multiplies projected embeddings

    def __call__(self, ids: mx.array, x: mx.array, step: Step) -> mx.array:
        """Leave the inputs (T, L, P) in the step; embeddings x (T, hidden) stay as they are."""
        rows = self.table(mx.where(ids < self.vocab_size, ids, 0))
        if step.features is not None:
            rows[step.features.rows] = self.table(mx.array([self.picture_id]))
        by_layer = mx.unflatten(rows, -1, (self.num_layers, -1))
        mixed = mx.unflatten(self.projection(x) * self.scale, -1, (self.num_layers, -1))
        step.per_layer = (self.norm(mixed) + by_layer * by_layer.shape[-1] ** 0.5) * _MIX
        return x


@dataclass(slots=True, eq=False)
class PerLayerGate:
    """The share of one layer: norm(up(act(gate(x)) * input))."""

    index: int  # of the layer
    _: KW_ONLY
    gate: Projection  # (T, hidden) -> (T, P)
    up: Projection  # (T, P) -> (T, hidden)
    norm: Norm  # over the hidden size
    activation: Gated  # of what `gate` gives, times the input

    def __call__(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> (T, hidden)."""
        assert step.per_layer is not None
        gate_and_input = mx.concatenate([self.gate(x), step.per_layer[:, self.index]], axis=-1)
        return self.norm(self.up(self.activation(gate_and_input)))


_KEYS = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")


def sources(config: ModelConfig) -> list[int | None]:
    """For each layer, the earlier layer whose keys and values it reads; None: it has its own.

    The last `num_kv_shared_layers` read those of the last layer before them that has their window.
    """
    count = config.fields.integer("num_kv_shared_layers", low=0)
    num_own = max(config.num_layers - count, 0)
    last = {window: index for index, window in enumerate(config.windows[:num_own])}
    missing = [window for window in config.windows[num_own:] if window not in last]
    if missing:
        raise CheckpointError(
            f"num_kv_shared_layers in {config.fields.where} is {count}, which leaves no layer with "
            f"keys and values for those of window {missing[0]}."
        )
    return [None] * num_own + [last[window] for window in config.windows[num_own:]]


def shared(config: ModelConfig) -> tuple[bool, ...]:
    """For each layer, whether it reads keys and values of an earlier one; see `sources`."""
    return tuple(source is not None for source in sources(config))


FROM_ELSEWHERE = "its layers read inputs and keys that other layers made"


def between_stages(config: ModelConfig, *, num_streams: int = 1) -> BetweenStages:
    """Per-layer inputs, several hidden states of a token, and keys that later layers read."""
    hidden = config.hidden_size
    read = [source for source in sources(config) if source is not None]
    return BetweenStages(
        (hidden,) if num_streams == 1 else (num_streams, hidden),
        per_layer=config.fields.integer("hidden_size_per_layer_input", low=0),
        bound=frozenset(range(min(read) + 1, config.num_layers) if read else ()),
    )


def shared_or_own(family: Family, index: int, build: Callable[[int], LayerMixer]) -> LayerMixer:
    """The attention of a layer, which `build` makes where it has keys and values of its own.

    Checkpoints hold keys of layers that do not use them; those are left out.
    """
    config, source = family.config, sources(family.config)[index]
    if source is None:
        made = family.attentions[index] = build(index)
        return made
    path, (_, dim) = f"model.layers.{index}.self_attn", config.heads_of(index)
    family.weights.drop_below([f"{path}.{key}" for key in _KEYS])
    attention = family.attentions[source]
    assert isinstance(attention, Attention)
    inner = config.num_heads * dim
    return SharedAttention(
        q_proj=family.weights.linear(
            f"{path}.q_proj", inner, config.hidden_size, bias=config.qkv_bias
        ),
        o_proj=family.attention_output(f"{path}.o_proj", inner),
        source=attention,
        q_norm=family.norm(f"{path}.q_norm", dim),
    )


def per_layer_inputs(family: Family) -> PerLayerInputs | None:
    """The table and the projection of all layers' inputs; None: there are none."""
    config, weights, fields = family.config, family.weights, family.config.fields
    if not (dims := fields.integer("hidden_size_per_layer_input", low=0, high=2**16)):
        return None
    vocab = fields.integer("vocab_size_per_layer_input", high=2**24, default=config.vocab_size)
    width = config.num_layers * dims
    return PerLayerInputs(
        weights.embedding("model.embed_tokens_per_layer", (vocab, width)),
        vocab_size=vocab,
        picture_id=fields.integer("pad_token_id", low=0, high=vocab - 1, default=0),
        projection=weights.linear("model.per_layer_model_projection", width, config.hidden_size),
        norm=family.norm("model.per_layer_projection_norm", dims),
        num_layers=config.num_layers,
        scale=config.hidden_size**-0.5,
    )


def per_layer_gate(family: Family, index: int) -> PerLayerGate | None:
    """The gate of layer `index` for its per-layer input; None: the model has no such inputs."""
    config, weights, path = family.config, family.weights, f"model.layers.{index}"
    dims = config.fields.integer("hidden_size_per_layer_input", low=0, high=2**16)
    if not dims:
        return None
    return PerLayerGate(
        index,
        gate=weights.linear(f"{path}.per_layer_input_gate", dims, config.hidden_size),
        up=weights.linear(f"{path}.per_layer_projection", config.hidden_size, dims),
        norm=family.norm(f"{path}.post_per_layer_input_norm"),
        activation=family.activation,
    )
