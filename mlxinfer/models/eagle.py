"""EAGLE-3: a predictor of one layer from a folder of its own, as speculators and SGLang save it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, UnsupportedModelError
from ..layers.linear import Projection
from ..layers.norm import Norm
from .config import ModelConfig, normalise
from .decoder import Model
from .families.llama import Llama
from .jsonfields import Fields, read_json
from .predictor import ConcatenatedBlock, Predictor, checked_taps, weights_beside
from .weights.weights import Weights

_FRONTS = ("midlayer.", "layers.0.")  # of the layer's names


@dataclass(slots=True, eq=False)
class NormedProjection:
    """A norm, then a projection."""

    norm: Norm
    proj: Projection

    def __call__(self, x: mx.array) -> mx.array:
        return self.proj(self.norm(x))


class EagleLayer(Llama):
    """Builds the layer: its attention reads two vectors side by side."""

    def qkv(self, index: int) -> Projection:
        config, path = self.config, f"model.layers.{index}.self_attn"
        kv_heads, dim = config.heads_of(index)
        return self.weights.fused(
            [f"{path}.{name}_proj" for name in "qkv"],
            [count * dim for count in (config.num_heads, kv_heads, kv_heads)],
            2 * config.hidden_size,
            bias=config.qkv_bias,
        )

    def block(self, *, normed_residual: bool) -> ConcatenatedBlock:
        path = "model.layers.0"
        (mixer,) = self.mixer(0).parts
        return ConcatenatedBlock(
            self.norm(f"{path}.input_layernorm"),
            self.norm(f"{path}.hidden_norm"),
            mixer,
            self.norm(f"{path}.post_attention_layernorm"),
            self.mlp(0),
            normed_residual=normed_residual,
        )


def load_eagle(folder: Path, model: Model) -> Predictor:
    """The predictor in a checkpoint folder, evaluated and ready."""
    raw = read_json(folder / "config.json", infinite=True)
    config = _config(raw)
    fields = Fields(raw, "config.json")
    weights = weights_beside(model, folder, _rename, config.quantization)
    taps = _taps(fields, model.config.num_layers)
    builder = EagleLayer(config, weights)
    embed_tokens = None
    if "embed_tokens.weight" in weights:
        shape = (config.vocab_size, config.hidden_size)
        embed_tokens = weights.embedding("embed_tokens", shape)
    elif config.hidden_size != model.config.hidden_size:
        raise CheckpointError(
            f"The head's hidden size is {config.hidden_size} and the model's "
            f"{model.config.hidden_size}, so it needs embed_tokens of its own, which are missing."
        )
    drafted = fields.integer("draft_vocab_size", default=config.vocab_size, high=2**24)
    head = Predictor(
        model,
        config,
        taps=taps,
        block=builder.block(normed_residual=fields.boolean("norm_before_residual", default=False)),
        norm=builder.norm("norm"),
        enter=_enter(builder, len(taps) * model.config.hidden_size),
        chains_normed=False,
        embed_tokens=embed_tokens,
        lm_head=weights.linear("lm_head", drafted, config.hidden_size),
        token_ids=_token_ids(weights, drafted, model.config.vocab_size),
    )
    weights.drop("t2d")
    weights.finish()
    weights.evaluate(head.arrays())
    return head


def _config(raw: dict[str, Any]) -> ModelConfig:
    """The config of the layer, which speculators' checkpoints state in a part of its own."""
    layer = raw.get("transformer_layer_config")
    stated = {**raw, **layer} if isinstance(layer, dict) else raw
    config = normalise({**stated, "model_type": "llama"})
    if config.num_layers != 1:
        raise UnsupportedModelError(
            f"num_hidden_layers of the EAGLE-3 head is {config.num_layers}; supported is 1."
        )
    return config


def _rename(name: str) -> str:
    """Tensors of the layer under the names of layer 0; other tensors under their bare names."""
    bare = name.removeprefix("model.")
    for front in _FRONTS:
        if bare.startswith(front):
            return "model.layers.0." + bare.removeprefix(front)
    return bare


def _taps(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers that give the predictor its inputs.

    speculators count hidden states, and the embeddings come first; SGLang counts layers.
    Where nothing is stated they are the inputs of layers 2, n / 2 and n - 3.
    """
    counted = fields.items("eagle_aux_hidden_state_layer_ids")
    eagle = fields.fields("eagle_config")
    by_layer = None if eagle is None else eagle.items("eagle_aux_hidden_state_layer_ids")
    if by_layer is not None:
        layers = [int(index) for index in by_layer]
    else:
        stated = counted or [2, num_layers // 2, num_layers - 3]
        layers = [max(int(index), 1) - 1 for index in stated]
    return checked_taps("EAGLE-3 head", layers, num_layers)


def _enter(builder: EagleLayer, width: int) -> Norm:
    """The projection of the layers' outputs, with a norm where the predictor has one."""
    weights = builder.weights
    normed = "input_norm.weight" in weights
    norm = builder.norm("input_norm", width) if normed else None
    proj = weights.linear("fc", builder.config.hidden_size, width)
    return proj if norm is None else NormedProjection(norm, proj)


def _token_ids(weights: Weights, drafted: int, vocab_size: int) -> mx.array | None:
    """(drafted,) the model's tokens of the predictor's vocabulary; None: they are the same."""
    if "d2t" not in weights:
        if drafted > vocab_size:
            raise CheckpointError(
                f"The head has {drafted} tokens and the model {vocab_size}: it is made for another."
            )
        return None if drafted == vocab_size else mx.arange(drafted)
    token_ids = mx.arange(drafted) + weights.raw("d2t", (drafted,)).astype(mx.int32)
    if int(mx.max(token_ids)) >= vocab_size or int(mx.min(token_ids)) < 0:
        raise CheckpointError(
            f"d2t of the EAGLE-3 head names tokens beyond the model's {vocab_size}."
        )
    return token_ids
