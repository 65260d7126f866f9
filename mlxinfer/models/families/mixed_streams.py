"""Decoders with mixed residual streams: Xing 4, and parts of GLM 5.3 Flash and DeepSeek V4."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import mlx.core as mx

from ...errors import UnsupportedModelError
from ...layers.hyper_connections import (
    MeanOfStreams,
    MixingConnection,
    StreamLayer,
    StreamLogits,
    Streams,
)
from ...layers.norm import Norm
from ...layers.step import Layer
from ...metal_kernels.mixing import Mixing
from ..config import ModelConfig
from ..decoder import Entry
from ..family import Family
from ..stage import BetweenStages
from .deepseek import DeepseekV3


class MixedStreams(Family):
    """The residual is `hc_mult` streams, see `MixingConnection`."""

    stream_defaults: ClassVar = {"hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20}
    names: ClassVar = {"attn_hc.": "hc_attn_", "ffn_hc.": "hc_ffn_"}  # of transformers, and the hub

    @classmethod
    def between_stages(cls, config: ModelConfig) -> BetweenStages:
        return BetweenStages((config.fields.integer("hc_mult") * config.hidden_size,))

    @property
    def num_streams(self) -> int:
        return self.config.fields.integer("hc_mult", low=2, high=64)

    def entry(self) -> Entry:
        return Streams(self.num_streams)

    def last_norm(self) -> Norm:
        return MeanOfStreams(super().last_norm(), self.num_streams)

    def layer(self, index: int) -> Layer:
        """Connections around both blocks; norms are over what the blocks read."""
        path = f"model.layers.{index}"
        norms = self.norm(f"{path}.input_layernorm"), self.norm(f"{path}.post_attention_layernorm")
        to_mixer = self.connection(f"{path}.hc_attn", norms[0])
        to_mlp = self.connection(f"{path}.hc_ffn", norms[1])
        return StreamLayer((to_mixer, to_mlp), self.mixer(index), self.mlp(index))

    def mixing(self) -> Mixing:
        """How the weights of a connection follow from their logits."""
        fields, rounds = self.config.fields, "hc_sinkhorn_iters"
        return Mixing(self.num_streams, fields.integer(rounds, high=1000), fields.number("hc_eps"))

    def connection(self, path: str, norm: Norm) -> MixingConnection:
        """The way into a block and back; `norm` is over what the block reads."""
        form, n = self.mixing(), self.num_streams
        return MixingConnection(self.stream_logits(path, [n, n, n * n]), norm, form)

    def stream_logits(self, path: str, counts: Sequence[int]) -> StreamLogits:
        """Numbers of the streams, of several kinds: `counts` of each. A kind has one scale."""
        width, raw = self.num_streams * self.config.hidden_size, self.weights.raw
        scales = raw(f"{path}_scale", (len(counts),))
        scale = mx.concatenate([mx.repeat(scales[i], count) for i, count in enumerate(counts)])
        weight, base = raw(f"{path}_fn", (sum(counts), width)), raw(f"{path}_base", scale.shape)
        weight, scale, base = (part.astype(mx.float32) for part in (weight, scale, base))
        return StreamLogits(weight, scale, base, self.config.rms_norm_eps)


class Xing4(MixedStreams, DeepseekV3):
    """Xing 4.0: the blocks of DeepSeek V3. Its head that predicts further ahead has no streams.

    Sources: vLLM, SGLang and llama.cpp; transformers has no class for it.
    """

    defaults: ClassVar = {
        **DeepseekV3.defaults,
        **MixedStreams.stream_defaults,
        "n_group": 1,
        "topk_group": 1,
        "mhc_h_res_clamp_min": -30.0,
        "mhc_h_res_clamp_max": 30.0,
    }
    mtp_streams = 1

    @classmethod
    def rename(cls, name: str) -> str | None:
        renamed = super().rename(name)
        return None if renamed is None else renamed.replace("_hc_", "_")

    def layer(self, index: int) -> Layer:
        """A head that predicts further ahead is a layer of DeepSeek V3, behind the others."""
        ahead = index >= self.config.fields.integer("num_hidden_layers")
        return DeepseekV3.layer(self, index) if ahead else super().layer(index)

    def mixing(self) -> Mixing:
        fields = self.config.fields
        limits = [fields.number(f"mhc_h_res_clamp_{end}") for end in ("min", "max")]
        if limits[0] != -limits[1] or limits[1] <= 0:
            raise UnsupportedModelError(
                f"mhc_h_res_clamp_min and _max in {fields.where} are {limits}; expected one number "
                "and its negative."
            )
        return replace(super().mixing(), limit=limits[1])
