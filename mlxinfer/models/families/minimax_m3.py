"""MiniMax M3: attention to the best blocks of tokens, clamped activations, a shared expert."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import mlx.core as mx

from ...cache_specs import BlockSpec
from ...errors import UnsupportedModelError
from ...layers.attention import AttentionArgs, Mixer
from ...layers.linear import Projection
from ...layers.mlp import MLP, FeedForward, Gated, clamped_swiglu
from ...layers.norm import Norm, RMSNorm
from ...layers.step import Rope, Step
from ...metal_kernels.variants import KernelUse, ModelForm
from ..config import FULL, ModelConfig
from ..family import Family, HeadNorms
from ..jsonfields import Fields
from .deepseek import PLAIN_ROUTING, biased_routing, sparse_layers
from .mixtral import MiniMaxM2


@dataclass(slots=True, eq=False, kw_only=True)
class BlockIndexer(Mixer):
    """An index that lets a layer see only the blocks with the best tokens.

    It has queries of a few heads, and one key for each token. Both are normalised and then
    position-encoded. T = tokens of the step, d = numbers of a key (transformers' MiniMax M3).
    """

    qk_proj: Projection  # (T, hidden) -> (T, (Hi + 1) * d), queries and then one key
    qk_norm: Norm  # over (T, Hi + 1, d)
    num_heads: int  # Hi
    served: int  # query heads of attention that see what one of them chooses
    spec: BlockSpec  # what the cache keeps
    rope: Rope  # over the first numbers of queries and keys

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return []

    def __call__(self, x: mx.array, step: Step, residual: Any = None) -> Any:
        """The blocks that tokens of x (T, hidden) see: the result of `BlockLayer.choose`."""
        qk = mx.unflatten(self.qk_proj(x), -1, (self.num_heads + 1, -1))  # (T, Hi + 1, d)
        qk = self.rope(self.qk_norm(qk), step.prepared[self.rope])
        queries, keys = mx.split(qk, [self.num_heads], axis=1)
        return step.caches[self].choose(queries, keys[:, 0], self.served)


_SPARSE = "minimax_m3_sparse"
_INDEX = {  # in `sparse_attention_config`, and since transformers 5
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
_KNOWN = {  # the values of settings that change what is computed
    "sparse_score_type": ("max",),
    "sparse_init_block": (0,),
    "attention_output_gate": (False,),
    "use_gemma_norm": (True,),
    "use_qk_norm": (True,),
}
_NAMES = {  # of the hub, and ours
    ".block_sparse_moe.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
    ".block_sparse_moe.": ".mlp.",
    ".self_attn.index_": ".self_attn.indexer.",
}


class MiniMaxM3(MiniMaxM2):
    """The text of MiniMax M3."""

    defaults: ClassVar = {
        **PLAIN_ROUTING,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rotary_dim": 64,
        "rope_theta": 5_000_000.0,
        "max_position_embeddings": 524_288,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12_288,
        "shared_intermediate_size": 3072,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.0,
        "first_k_dense_replace": 0,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_block_size": 128,
        "index_topk_blocks": 16,
        "index_local_blocks": 1,
    }
    ignored = ("attention_bias", "sliding_window")
    head_norms = HeadNorms()
    with_norms = Family.with_norms
    norm_offset = 1.0
    names = _NAMES

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """The config in the spelling of transformers 5."""
        index = config.fields("sparse_attention_config") or Fields({}, config.where)
        index.require(_KNOWN)
        config.require(_KNOWN)
        values = {**config.values, **index.stated(_INDEX)}
        frequency = index.items("sparse_attention_freq")
        if frequency is not None and values.get("layer_types") is None:
            values["layer_types"] = [_SPARSE if one else FULL for one in frequency]
        if values.get("moe_layer_freq") is not None:
            values.setdefault("is_moe_layer", values["moe_layer_freq"])
        return Fields(values, config.where)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """Set the layers that have experts; each head of keys and values has one of the index."""
        fields = config.fields
        heads = fields.integer("index_n_heads", high=2**10)
        if heads != config.num_kv_heads:
            raise UnsupportedModelError(
                f"index_n_heads in {fields.where} is {heads}; supported is one for each of the "
                f"{config.num_kv_heads} heads of keys and values."
            )
        spec = BlockSpec(
            dim=fields.integer("index_head_dim", high=2**14),
            block=fields.integer("index_block_size", high=2**16),
            num_ranked=fields.integer("index_topk_blocks", high=2**20),
            num_near=fields.integer("index_local_blocks", low=0, high=2**20),
        )
        count = config.num_layers
        chosen = [config.listed("layer_types", index) == _SPARSE for index in range(count)]
        return replace(
            config,
            sparse_layers=sparse_layers(fields, count),
            extra_specs=tuple(spec if one else None for one in chosen),
        )

    def attention_args(self, index: int) -> AttentionArgs:
        return replace(super().attention_args(index), indexer=self._indexer(index))

    def _indexer(self, index: int) -> BlockIndexer | None:
        """The index of a layer that sees the best blocks; None: it sees all tokens."""
        config, spec = self.config, self.config.extra_specs[index]
        if not isinstance(spec, BlockSpec):
            return None
        heads = config.num_kv_heads
        path, rope = f"model.layers.{index}.self_attn.indexer", config.ropes[index]
        assert rope is not None, "positions are always encoded"
        norms = [(f"{path}.q_norm.weight", heads), (f"{path}.k_norm.weight", 1)]
        weights = [
            mx.broadcast_to(self.weights.take(name, (spec.dim,), offset=1.0), (count, spec.dim))
            for name, count in norms
        ]
        return BlockIndexer(
            qk_proj=self.weights.fused(
                [f"{path}.q_proj", f"{path}.k_proj"],
                [heads * spec.dim, spec.dim],
                config.hidden_size,
            ),
            qk_norm=RMSNorm(mx.concatenate(weights), config.rms_norm_eps),
            num_heads=heads,
            served=config.num_heads // heads,
            spec=spec,
            rope=self.rope(rope, spec.dim),
        )

    @cached_property
    def activation(self) -> Gated:
        fields = self.config.fields
        return clamped_swiglu(
            self.weights.dtype,
            alpha=fields.number("swiglu_alpha"),
            limit=fields.number("swiglu_limit", above=0.0),
        )

    def mlp(self, index: int) -> FeedForward:
        fields, path = self.config.fields, f"model.layers.{index}.mlp"
        if not self.config.sparse_layers[index]:
            return self._mlp(path, fields.integer("dense_intermediate_size", high=2**22))
        inner = fields.integer("shared_intermediate_size", high=2**22)
        shared = self._mlp(f"{path}.shared_experts", inner)
        return self.experts(path, biased_routing(self, path), shared=shared)

    def _mlp(self, path: str, inner: int) -> MLP:
        """Gate and up are one matrix where transformers 5 has saved the text alone."""
        packed = f"{path}.gate_up_proj.weight" in self.weights
        return self.packed_mlp(path, inner) if packed else self.dense_mlp(path, inner)
