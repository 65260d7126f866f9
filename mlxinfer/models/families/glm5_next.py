"""GLM 5.3 Flash: delta attention, latent attention with an index over blocks, mixed streams."""

from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import mlx.core as mx

from ...cache_specs import PooledSpec
from ...errors import CheckpointError, UnsupportedModelError
from ...layers.latent_attention import LatentAttention, PooledAttention
from ...layers.linear import Linear
from ...layers.mlp import Gated, clipped_swiglu
from ...layers.norm import LayerNorm
from ...layers.pooled_index import GatedIndexer
from ..config import FULL, ModelConfig
from ..jsonfields import Fields
from ..stage import BetweenStages
from .deepseek import LatentDims
from .glm import indexer_kinds
from .kimi_linear import KimiLinear
from .mixed_streams import MixedStreams

_INDEX_EPS = 1e-6  # of the norm of index keys, whatever the config says


class Glm5Next(MixedStreams, KimiLinear):
    """Kimi Linear's layers, with bounded decays and limited activations, between mixed streams.

    Attention layers see the best blocks of `index_kpool` tokens. No layer encodes positions.
    """

    defaults: ClassVar = {
        **KimiLinear.defaults,
        **MixedStreams.stream_defaults,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "qk_nope_head_dim": 256,
        "n_routed_experts": 288,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "linear_num_heads": 64,
        "linear_lower_bound": -5.0,
        "swiglu_limit": 10.0,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_kpool": 16,
        "num_nextn_predict_layers": 1,
    }
    inner_eps = None
    names: ClassVar = {".self_attn.forget_gate.": ".self_attn."}

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """The config under the names of Kimi Linear; layers with an index attend."""
        fields = super().language_model(config)
        kinds = fields.items("layer_types") or [
            "indexed_attention" if index % 4 == 3 else "linear_attention"
            for index in range(fields.integer("num_hidden_layers", high=2000))
        ]
        kinds = [FULL if kind == "indexed_attention" else kind for kind in kinds]
        values = {**fields.values, "layer_types": kinds}
        delta = fields.fields("linear_attn_config")
        if delta is not None:
            bound = delta.values.get("gate_lower_bound", values.get("linear_lower_bound", -5.0))
            safe = delta.boolean("safe_gate", default=True)
            values["linear_lower_bound"] = -5.0 if bound is None and safe else bound
        return Fields(values, fields.where)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        config, fields = super().configure(config), config.fields
        dims = LatentDims.of(fields)
        if dims.rope or dims.query_rank is None:
            raise UnsupportedModelError(
                f"{fields.where} has qk_rope_head_dim {dims.rope} and q_lora_rank "
                f"{dims.query_rank}; supported is attention without positions that compresses "
                "queries."
            )
        fields.require({"index_kpool_always_select_tail": [True]})
        spec, shared = _index_spec(fields), _shared(config)
        attends = [state is None for state in config.states]
        indexes = tuple(spec if one and i not in shared else None for i, one in enumerate(attends))
        return replace(config, extra_specs=indexes)

    @classmethod
    def between_stages(cls, config: ModelConfig) -> BetweenStages:
        return replace(super().between_stages(config), bound=_shared(config))

    @property
    def decay_bound(self) -> float:
        """The stated one; null: there is none."""
        return self.config.fields.number("linear_lower_bound", low=-1e4, high=0.0, default=0.0)

    @cached_property
    def activation(self) -> Gated:
        limit = self.config.fields.number("swiglu_limit", above=0.0)
        return clipped_swiglu(self.weights.dtype, limit=limit)

    def attention(self, index: int, **parts: Any) -> LatentAttention:
        return PooledAttention(self._index(index), **parts)

    def _index(self, index: int) -> GatedIndexer | None:
        config, fields, weights = self.config, self.config.fields, self.weights
        path, spec = f"model.layers.{index}.self_attn.indexer", config.extra_specs[index]
        if not isinstance(spec, PooledSpec):
            return None
        rank, heads = LatentDims.of(fields).query_rank, fields.integer("index_n_heads", high=2**14)
        dim, hidden, pool = spec.dim, config.hidden_size, f"{path}.index_kpool_compress"
        assert rank is not None
        norm = [weights.take(f"{path}.k_norm.{part}", (dim,)) for part in ("weight", "bias")]
        return GatedIndexer(
            q_proj=weights.linear(f"{path}.wq_b", heads * dim, rank),
            k_proj=weights.linear(f"{path}.wk", dim, hidden),
            k_norm=LayerNorm(norm[0], _INDEX_EPS, norm[1]),
            gate_proj=Linear(weights.take(f"{pool}_gate", (dim, hidden))),
            places=weights.raw(f"{pool}_ape", (spec.ratio, dim)).astype(mx.float32),
            weights_proj=weights.linear(f"{path}.weights_proj", heads, hidden),
            spec=spec,
        )


def _index_spec(fields: Fields) -> PooledSpec:
    """The spec of a layer's index: a token brings a key and as many gates."""
    dim, ratio = (fields.integer(key, high=2**14) for key in ("index_head_dim", "index_kpool"))
    count = fields.integer("index_topk", high=2**31)
    if dim % ratio or count % ratio:
        raise UnsupportedModelError(
            f"index_kpool is {ratio}, and index_head_dim {dim} and index_topk {count} must be "
            "multiples of it."
        )
    return PooledSpec(dim, 2 * dim, ratio, count // ratio)


def _shared(config: ModelConfig) -> frozenset[int]:
    """The layers that see what the layer before them sees: one with an index of its own."""
    kinds, attends = indexer_kinds(config.fields), [state is None for state in config.states]
    shared = [i for i, kind in enumerate(kinds) if kind == "shared" and attends[i]]
    if not all(i and attends[i - 1] and kinds[i - 1] == "full" for i in shared):
        raise CheckpointError(
            f"indexer_types in {config.fields.where} has 'shared' where the layer before has no "
            "index."
        )
    return frozenset(shared)
