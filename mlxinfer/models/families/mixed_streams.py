"""Parts of a decoder whose streams are mixed between blocks: GLM 5.3 Flash and DeepSeek V4."""

from collections.abc import Sequence
from typing import ClassVar

import mlx.core as mx

from ...layers.hyper_connections import MixingConnection, StreamLogits, Streams
from ...layers.norm import Norm
from ...metal_kernels.mixing import Mixing
from ..config import ModelConfig
from ..decoder import Entry
from ..family import Family
from ..stage import BetweenStages

_NAMES = ("attn_hc.", "hc_attn_"), ("ffn_hc.", "hc_ffn_")  # as transformers saves, and the hub


class MixedStreams(Family):
    """The residual is `hc_mult` streams, see `MixingConnection`."""

    stream_defaults: ClassVar = {"hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20}

    @classmethod
    def runs_by_layer(cls, config: ModelConfig) -> bool:
        """Never: layers read and give all streams."""
        return False

    @classmethod
    def between_stages(cls, config: ModelConfig) -> BetweenStages:
        """All streams."""
        return BetweenStages((config.fields.integer("hc_mult") * config.hidden_size,))

    @classmethod
    def rename(cls, name: str) -> str | None:
        """Names of connections as the hub has them."""
        for theirs, ours in _NAMES:
            name = name.replace(theirs, ours)
        return super().rename(name)

    @property
    def num_streams(self) -> int:
        """Residual streams."""
        return self.config.fields.integer("hc_mult", low=2, high=64)

    def entry(self) -> Entry:
        """All streams begin with the embedding."""
        return Streams(self.num_streams)

    def connection(self, path: str, norm: Norm) -> MixingConnection:
        """The way into a block and back; `norm` is over what the block reads."""
        fields, n = self.config.fields, self.num_streams
        form = Mixing(n, fields.integer("hc_sinkhorn_iters", high=1000), fields.number("hc_eps"))
        return MixingConnection(self.stream_logits(path, [n, n, n * n]), norm, form)

    def stream_logits(self, path: str, counts: Sequence[int]) -> StreamLogits:
        """Numbers of the streams, of several kinds: `counts` of each. A kind has one scale."""
        width, raw = self.num_streams * self.config.hidden_size, self.weights.raw
        scales = raw(f"{path}_scale", (len(counts),))
        scale = mx.concatenate([mx.repeat(scales[i], count) for i, count in enumerate(counts)])
        weight, base = raw(f"{path}_fn", (sum(counts), width)), raw(f"{path}_base", scale.shape)
        weight, scale, base = (part.astype(mx.float32) for part in (weight, scale, base))
        return StreamLogits(weight, scale, base, self.config.rms_norm_eps)
