"""Flint: experts without a bias, sinks in all layers, and positions in windowed layers alone."""

from collections.abc import Sequence
from typing import ClassVar

from ...errors import UnsupportedModelError
from ...layers.mlp import FeedForward
from ...layers.moe import ExpertChoice
from ...metal_kernels.routing import Routing
from ..config import FULL, SLIDING
from ..family import Family, HeadNorms, in_windows, learned_sinks
from ..jsonfields import Fields


class Flint(Family):
    """Flint: the attention of Qwen 3 with sinks, sigmoid scores, an expert that all tokens go to.

    Published configs list the layers without positions; where none are listed, these are the ones
    that see everything, as transformers has it.
    """

    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "sliding_window": 513,
        "num_experts": 256,
        "num_experts_per_tok": 6,
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 1024,
        "mlp_only_layers": [0, 1],
    }
    head_norms = HeadNorms()
    sinks = learned_sinks
    dense_matrices = (".mlp.gate",)
    names: ClassVar = {".softmax_offset": ".sinks"}

    @classmethod
    def unstated_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """The first two layers, each fourth and the last one see everything."""
        full = {0, num_layers - 1, *range(1, num_layers, 4)}
        return [FULL if i in full else SLIDING for i in range(num_layers)]

    @classmethod
    def layers_with_rope(cls, fields: Fields, layer_types: Sequence[str]) -> Sequence[bool]:
        """All but the layers that `no_rope_layer_indices` lists, else those with windows."""
        stated = fields.items("no_rope_layer_indices")
        if stated is None:
            return in_windows(fields, layer_types)
        return [i not in stated for i in range(len(layer_types))]

    def mlp(self, index: int) -> FeedForward:
        config, path = self.config, f"model.layers.{index}.mlp"
        if not config.sparse_layers[index]:
            return super().mlp(index)
        self._refuse_bias(f"{path}.gate.e_score_correction_bias")
        routing = Routing(config.experts_per_token, sigmoid=True, normalised=config.norm_topk_prob)
        inner = config.fields.integer("shared_expert_intermediate_size", high=2**22)
        shared = self.dense_mlp(f"{path}.shared_expert", inner)
        return self.experts(path, ExpertChoice(routing), shared=shared)

    def _refuse_bias(self, name: str) -> None:
        """Refuse a bias of the router, which one published definition reads and others do not."""
        if name in self.weights and self.weights.raw(name, (self.config.num_experts,)).any():
            raise UnsupportedModelError(
                f"{name} is not zero; Flint's definitions do not agree on what it does."
            )
