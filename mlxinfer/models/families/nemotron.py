"""Nemotron-H and Nemotron 3: one block a layer, be it Mamba-2, attention, an MLP or experts.

Time steps are kept within `time_step_limit`, as in NVIDIA's own code and mlx-lm; transformers 5
raises those of a prompt to `time_step_min`, which is the range that training began with.
"""

import re
from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import mlx.core as mx

from ...errors import CheckpointError, UnsupportedModelError
from ...layers.attention import LayerMixer
from ...layers.linear import Projection
from ...layers.mlp import MLP, FeedForward, relu_squared
from ...layers.moe import MoE
from ...layers.norm import Norm
from ...layers.step import Layer, Passed, Step
from ...metal_kernels.variants import KernelUse, ModelForm, kernels_of
from ..config import FULL, ModelConfig
from ..family import Family, MTPForm, no_positions
from ..jsonfields import Fields
from .deepseek import PLAIN_ROUTING, biased_routing, with_experts
from .mamba import MambaDims, plain_mamba_mixer

_ATTENTION = re.compile(r"\.mixer\.([qkvo])_proj\.")
MAMBA, ATTENTION, DENSE, EXPERTS = "M", "*", "-", "E"
_KINDS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": DENSE,
    "moe": EXPERTS,
}
_NAMES = {  # of the config, and what other families with Mamba-2 call the same
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "layer_norm_epsilon": "rms_norm_eps",
}


@dataclass(slots=True, eq=False)
class MixerLayer(Layer):
    """x + mixer(norm(x))."""

    norm: Norm
    mixer: LayerMixer

    def __call__(self, x: mx.array, normed: mx.array | None, step: Step) -> Passed:
        """x (T, hidden) -> (T, hidden)."""
        normed = self.norm(x)
        return self.mixer(normed, step, step.narrow(x) if step.narrows else x), None


@dataclass(slots=True, eq=False)
class FeedForwardLayer(Layer):
    """x + mlp(norm(x))."""

    norm: Norm
    mlp: FeedForward

    def __call__(self, x: mx.array, normed: mx.array | None, step: Step) -> Passed:
        """x (T, hidden) -> (T, hidden)."""
        return self.mlp(self.norm(x), x), None


@dataclass(slots=True, eq=False)
class LatentExperts:
    """Experts between projections to a smaller size and back, beside a shared expert."""

    down: Projection  # (T, hidden) -> (T, latent)
    experts: MoE  # its router reads what `down` reads
    up: Projection  # (T, latent) -> (T, hidden)
    shared: FeedForward  # the expert that every token goes to

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return kernels_of(model, self.experts, self.shared)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus the residual."""
        y = self.up(self.experts.mix(self.down(x), self.experts.router(x)), residual)
        return self.shared(x, y)


class NemotronH(Family):
    """Attention without positions; blocks without gates, of squared ReLU."""

    defaults: ClassVar = {
        **PLAIN_ROUTING,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_n_groups": 8,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "use_bias": False,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "first_k_dense_replace": 0,
    }
    mtp = MTPForm()
    rope_specs = staticmethod(no_positions)
    keys = _NAMES
    dense_matrices = (".mixer.gate",)
    final_norm = "model.norm_f"

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        fields, blocks = super().language_model(config), _blocks(config)
        stated = {"hybrid_override_pattern": blocks, "num_hidden_layers": len(blocks)}
        return Fields({**fields.values, **stated}, config.where)

    @classmethod
    def layer_types(cls, fields: Fields, num_layers: int) -> list[str]:
        if fields.get("sliding_window") is not None:
            raise UnsupportedModelError(
                f"sliding_window is set in {fields.where}, which 'nemotron_h' is computed without "
                "here; 'nemotron_h' models that do not set it run."
            )
        return [FULL] * num_layers

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        fields = config.fields
        fields.require({"mlp_hidden_act": ["relu2"], "mamba_hidden_act": ["silu"]})
        state = MambaDims.of(fields, width=None).spec
        blocks = tuple(fields.text("hybrid_override_pattern"))
        return replace(
            with_experts(config),
            blocks=blocks,
            states=tuple(state if kind == MAMBA else None for kind in blocks),
            without_cache=tuple(kind not in (MAMBA, ATTENTION) for kind in blocks),
        )

    @classmethod
    def mtp_blocks(cls, config: ModelConfig) -> tuple[str, ...]:
        """Attention and experts, unless others are stated."""
        return tuple(_blocks(config.fields, "mtp_", ATTENTION + EXPERTS))

    @classmethod
    def rename(cls, name: str) -> str | None:
        inner = name.removeprefix("backbone.").removeprefix("model.")
        if inner.startswith("lm_head."):
            return inner
        inner = _ATTENTION.sub(r".self_attn.\1_proj.", inner)
        return "model." + inner.replace("embeddings.", "embed_tokens.", 1)

    def layer(self, index: int) -> Layer:
        path, kind = f"model.layers.{index}", self._kind(index)
        norm = self.norm(f"{path}.norm")
        if kind in (MAMBA, ATTENTION):
            return MixerLayer(norm, self.mixer(index))
        return FeedForwardLayer(norm, self.mlp(index))

    def mixer(self, index: int) -> LayerMixer:
        """Mamba-2 or attention."""
        if self._kind(index) == ATTENTION:
            return super().mixer(index)
        fields, path = self.config.fields, f"model.layers.{index}.mixer"
        dims, bias = MambaDims.of(fields, width=None), fields.boolean("use_bias")
        return plain_mamba_mixer(self, path, dims, bias=bias)

    def mlp(self, index: int) -> FeedForward:
        path = f"model.layers.{index}.mixer"
        if self._kind(index) == DENSE:
            return self._relu_mlp(path, self.config.intermediate_size)
        fields, weights, hidden = self.config.fields, self.weights, self.config.hidden_size
        inner = fields.integer("moe_shared_expert_intermediate_size", high=2**22)
        shared = self._relu_mlp(f"{path}.shared_experts", inner)
        if fields.get("moe_latent_size") is None:
            return weights.block(self._experts(path, hidden, shared))
        latent, bias = fields.integer("moe_latent_size", high=2**20), self.config.mlp_bias
        if weights.share is not None:
            raise UnsupportedModelError(
                f"The experts of {path} work on fewer numbers than the hidden state has, which "
                "ranks cannot share: divide this model by layers (pipeline), or run it with "
                "ranks=1."
            )
        return LatentExperts(
            weights.linear(f"{path}.fc1_latent_proj", latent, hidden, bias=bias),
            self._experts(path, latent, None),
            weights.linear(f"{path}.fc2_latent_proj", hidden, latent, bias=bias),
            shared,
        )

    def _experts(self, path: str, hidden: int, shared: FeedForward | None) -> MoE:
        config, weights = self.config, self.weights
        count, inner = config.num_experts, config.moe_intermediate_size
        up, down = (
            weights.experts(
                f"{path}.switch_mlp.{stack}", f"{path}.experts.{{}}.{projection}_proj", shape
            ).expert_projection()
            for stack, projection, shape in (
                ("fc1", "up", (count, inner, hidden)),
                ("fc2", "down", (count, hidden, inner)),
            )
        )
        return weights.moe(
            router=weights.linear(f"{path}.gate", count, config.hidden_size),
            choose=biased_routing(self, path),
            gate_up_proj=up,
            down_proj=down,
            activation=relu_squared,
            shared=shared,
        )

    def _relu_mlp(self, path: str, inner: int) -> MLP:
        weights, hidden, bias = self.weights, self.config.hidden_size, self.config.mlp_bias
        return MLP(
            weights.linear(f"{path}.up_proj", inner, hidden, bias=bias),
            weights.linear(f"{path}.down_proj", hidden, inner, bias=bias),
            relu_squared,
        )

    def _kind(self, index: int) -> str:
        return self.config.blocks[index]


class NemotronHPuzzle(NemotronH):
    """Nemotron models that a search made smaller: each layer of experts has sizes of its own."""

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        blocks = config.items("block_configs")
        if not blocks or not all(isinstance(block, dict) for block in blocks):
            raise CheckpointError(f"{config.where} must list its layers as block_configs.")
        kinds = [block.get("block_type") for block in blocks]
        return super().language_model(
            Fields({**config.values, "layers_block_type": kinds}, config.where)
        )

    def mlp(self, index: int) -> FeedForward:
        stated = self.config.listed("block_configs", index) or {}
        sizes = {key: value for key, value in stated.items() if value is not None}
        fields = Fields({**self.config.fields.values, **sizes}, self.config.fields.where)
        builder = copy(self)
        builder.config = with_experts(replace(self.config, fields=fields))
        return NemotronH.mlp(builder, index)


def _blocks(config: Fields, front: str = "", default: str | None = None) -> str:
    """The kind of each block, one letter each.

    Args:
        default: where none of them is there; None: one must be.
    """
    listed = config.items(f"{front}layers_block_type", f"{front}layer_types")
    pattern = config.get(f"{front}hybrid_override_pattern") or default
    if listed is None:
        kinds = list(pattern) if isinstance(pattern, str | list) else []
    else:
        kinds = [_KINDS.get(str(kind), "") for kind in listed]
    if not kinds or not all(kind in (MAMBA, ATTENTION, DENSE, EXPERTS) for kind in kinds):
        raise CheckpointError(
            f"{config.where} must list its blocks, as {front}layers_block_type of "
            f"{', '.join(_KINDS)}, or as {front}hybrid_override_pattern of the letters {MAMBA}, "
            f"{ATTENTION}, {DENSE}, {EXPERTS}."
        )
    return "".join(kinds)
