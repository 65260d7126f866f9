"""DeepSeek V4: a window of tokens and compressed vectors of blocks, between mixed streams.

A layer sees the tokens of its window alone, or vectors of few tokens that an index chooses (CSA),
or all vectors of many tokens (HCA). In the first layers a token's id chooses its experts.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import mlx.core as mx

from ...cache_specs import CompressedSpec, KVSpec
from ...errors import CheckpointError, UnsupportedModelError
from ...layers.attention import LayerMixer
from ...layers.compressed_attention import CompressedAttention, CompressedIndex, Compressor, Series
from ...layers.hyper_connections import StreamLayer, Streams, WeightedStreams
from ...layers.mlp import FeedForward, Gated, clipped_swiglu
from ...layers.moe import ExpertChoice, HashChoice, TokenIds
from ...layers.norm import Norm
from ...layers.rope import FusedRope, RopeSpec
from ...layers.step import Layer
from ...metal_kernels.paged_attention import Softmax
from ...metal_kernels.routing import SUM_EPS, Routing
from ..config import SLIDING, ModelConfig, read_rope
from ..decoder import Entry
from ..family import Family
from ..jsonfields import Fields
from ..stage import BetweenStages
from ..weights.weights import Weights
from .deepseek import shared_expert
from .mixed_streams import MixedStreams

_WINDOW, _CSA, _HCA = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_KINDS = {0: _WINDOW, 4: _CSA, 128: _HCA}  # by tokens of a block, as the old spelling has them
_RATES = {_CSA: "compress_rate_csa", _HCA: "compress_rate_hca"}
_NAMES = [  # as transformers or the hub has them, and here
    (re.compile(theirs), ours)
    for theirs, ours in (
        (r"^(embed|layers|norm|hc_head)(?=[._])", r"model.\1"),
        (r"^head\.", "lm_head."),
        (r"^model\.embed\.", "model.embed_tokens."),
        (r"^model\.hc_head\.hc_", "model.hc_head_"),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.attn_sink$", ".sinks"),
        (r"\.ape$", ".position_bias"),
        (r"\.compressor\.indexer\.(scorer\.)?(?=weights_proj|q_b_proj)", ".indexer."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.(wq_a|wq_b|wo_a|wo_b)\.", lambda match: f".{match[1][1:]}_proj."),
        (r"\.wkv\.", ".kv_proj."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.q_norm\.", ".q_a_norm."),
        (r"(self_attn|compressor)\.norm\.", r"\1.kv_norm."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
        (r"(experts\..*)w1\.", r"\1gate_proj."),
        (r"(experts\..*)w2\.", r"\1down_proj."),
        (r"(experts\..*)w3\.", r"\1up_proj."),
        (r"\.experts\.switch_mlp\.", ".switch_mlp."),
    )
]


class DeepseekV4(MixedStreams):
    """DeepSeek V4 Flash and Pro."""

    defaults: ClassVar = {
        **MixedStreams.stream_defaults,
        "num_key_value_heads": 1,
        "num_attention_heads": 64,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "sliding_window": 128,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "swiglu_limit": 10.0,
        "max_position_embeddings": 1_048_576,
    }
    ignored = ("attention_bias",)
    folded = (".self_attn.o_a_proj",)
    dense_matrices = (".mlp.gate",)

    # -- the config -----------------------------------------------------------------------------

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """The config in the new spelling: kinds of layers by name, and a rope of each kind."""
        num_layers = config.integer("num_hidden_layers", high=2000)
        ropes, inner = _ropes(config), config.get("moe_intermediate_size")
        renamed = {
            "layer_types": _layer_types(config, num_layers),
            "mlp_layer_types": _mlp_types(config, num_layers),
            "rope_parameters": ropes,
            "rope_scaling": None,
            "intermediate_size": inner or cls.defaults["moe_intermediate_size"],
        }
        return Fields({**config.values, **renamed}, config.where)

    @classmethod
    def layer_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """Every layer has the window, whatever it sees beside that."""
        return [SLIDING] * num_layers

    @classmethod
    def rope_specs(
        cls, fields: Fields, layer_types: Sequence[str], head_dim: int
    ) -> tuple[RopeSpec | None, ...]:
        """Layers with compressed vectors have a rope of their own, their window included."""
        plain, compressed = (
            replace(read_rope(fields, name, head_dim=head_dim), last=True)
            for name in ("main", "compress")
        )
        kinds = fields.items("layer_types") or ()
        return tuple(plain if kind == _WINDOW else compressed for kind in kinds)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        fields = config.fields
        fields.require({"scoring_func": ["sqrtsoftplus"], "hidden_act": ["silu"]})
        kinds = fields.items("layer_types") or []
        by_kind = {kind: _compressed_spec(config, kind) for kind in {*kinds} - {_WINDOW}}
        num_experts = fields.integer("n_routed_experts", high=2**16)
        return replace(
            config,
            num_experts=num_experts,
            experts_per_token=fields.integer("num_experts_per_tok", high=num_experts),
            moe_intermediate_size=fields.integer("moe_intermediate_size", high=2**22),
            sparse_layers=(True,) * config.num_layers,
            extra_specs=tuple(by_kind.get(kind) for kind in kinds),
        )

    @classmethod
    def whole_because(cls, config: ModelConfig) -> str:
        return "its layers attend to compressed vectors that only the cache makes of earlier tokens"

    @classmethod
    def between_stages(cls, config: ModelConfig) -> BetweenStages:
        """All streams. Layers that choose by id need the ids, which only the first stage has."""
        hashed = [i for i in range(config.num_layers) if _is_hashed(config, i)]
        bound = frozenset(range(1, max(hashed, default=0) + 1))
        return replace(super().between_stages(config), bound=bound)

    @classmethod
    def rename(cls, name: str) -> str | None:
        """Names of the hub, and of transformers' own checkpoints."""
        for theirs, ours in _NAMES:
            name = theirs.sub(ours, name)
        return super().rename(name)

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self._tokens = TokenIds()

    # -- the decoder ----------------------------------------------------------------------------

    def entry(self) -> Entry:
        """All streams begin with the embedding; choices by id are told the ids."""
        return Streams(self.num_streams, self._tokens)

    def last_norm(self) -> Norm:
        logits = self.stream_logits("model.hc_head", [self.num_streams])
        return WeightedStreams(logits, Family.last_norm(self), self.config.fields.number("hc_eps"))

    def layer(self, index: int) -> Layer:
        path = f"model.layers.{index}"
        names = ("hc_attn", "input_layernorm"), ("hc_ffn", "post_attention_layernorm")
        to_mixer, to_mlp = (
            self.connection(f"{path}.{name}", self.norm(f"{path}.{norm}")) for name, norm in names
        )
        return StreamLayer((to_mixer, to_mlp), self.mixer(index), self.mlp(index))

    # -- attention ------------------------------------------------------------------------------

    def mixer(self, index: int) -> LayerMixer:
        config, fields, weights = self.config, self.config.fields, self.weights
        path, spec, kv_spec = (
            f"model.layers.{index}.self_attn",
            config.ropes[index],
            config.cache_spec(index),
        )
        assert isinstance(kv_spec, KVSpec)
        assert spec is not None, "positions are always encoded"
        heads, dim, rank = config.num_heads, config.head_dim, self._query_rank
        groups, group_rank = (
            fields.integer(key, high=2**14) for key in ("o_groups", "o_lora_rank")
        )
        inner = heads * dim // groups
        return CompressedAttention(
            inputs_proj=weights.fused(
                [f"{path}.q_a_proj", f"{path}.kv_proj"], [rank, dim], config.hidden_size
            ),
            q_norm=self.norm(f"{path}.q_a_norm", rank),
            q_proj=weights.linear(f"{path}.q_b_proj", heads * dim, rank),
            q_eps=config.rms_norm_eps,
            kv_norm=self.norm(f"{path}.kv_norm", dim),
            group_proj=self._groups(f"{path}.o_a_proj", groups, group_rank, inner),
            o_proj=weights.linear(f"{path}.o_b_proj", config.hidden_size, groups * group_rank),
            num_groups=groups,
            spec=kv_spec,
            softmax=Softmax(config.attention_scale, weights.take(f"{path}.sinks", (heads,))),
            rope=FusedRope(spec, dim, weights.dtype),
            compressor=self._compressor(index, path, spec),
        )

    @property
    def _query_rank(self) -> int:
        return self.config.fields.integer("q_lora_rank", high=2**20)

    def _groups(self, path: str, groups: int, rank: int, inner: int) -> Any:
        name = f"{path}.weight"
        if name in self.weights and len(self.weights.shape(name)) == 3:
            return self.weights.matrix(path, (groups, rank, inner)).head_linear()
        return self.weights.matrix(path, (groups * rank, inner)).by_head(groups).head_linear()

    def _compressor(self, index: int, path: str, spec: RopeSpec) -> Compressor | None:
        """The compressor of a layer; None: it sees its window alone."""
        config, weights = self.config, self.weights
        cache, index_path = config.extra_specs[index], f"{path}.indexer"
        if not isinstance(cache, CompressedSpec):
            return None
        halves = 2 if cache.carried else 1
        kinds = [(f"{path}.compressor", cache.dim)]
        if cache.index_dim:
            kinds.insert(0, (f"{index_path}.compressor", cache.index_dim))
        names = [f"{part}.{name}" for part, _ in kinds for name in ("kv_proj", "gate_proj")]
        rows = [halves * dim for _, dim in kinds for _ in range(2)]
        return Compressor(
            proj=weights.fused(names, rows, config.hidden_size),
            order=mx.array(_halves_apart(rows)) if halves > 1 else None,
            series=[self._series(*pair, spec, cache, halves) for pair in kinds],
            index=self._index(index_path, spec, cache) if cache.index_dim else None,
            spec=cache,
        )

    def _series(
        self, path: str, dim: int, spec: RopeSpec, cache: CompressedSpec, halves: int
    ) -> Series:
        places = self.weights.raw(f"{path}.position_bias", (cache.ratio, halves * dim))
        parts = mx.split(places.astype(mx.float32), halves, axis=1)
        rope = FusedRope(spec, dim, self.weights.dtype)
        return Series(mx.concatenate([*parts]), self.norm(f"{path}.kv_norm", dim), rope)

    def _index(self, path: str, spec: RopeSpec, cache: CompressedSpec) -> CompressedIndex:
        heads, dim = self.config.fields.integer("index_n_heads", high=2**14), cache.index_dim
        return CompressedIndex(
            self.weights.linear(f"{path}.q_b_proj", heads * dim, self._query_rank),
            self.weights.linear(f"{path}.weights_proj", heads, self.config.hidden_size),
            FusedRope(spec, dim, self.weights.dtype),
        )

    # -- experts --------------------------------------------------------------------------------

    @cached_property
    def activation(self) -> Gated:
        limit = self.config.fields.number("swiglu_limit", above=0.0)
        return clipped_swiglu(self.weights.dtype, limit=limit)

    def _routing(self, *, biased: bool) -> Routing:
        return Routing(
            self.config.experts_per_token,
            root_softplus=True,
            normalised=True,
            biased=biased,
            eps=SUM_EPS,
            factor=self.config.fields.number("routed_scaling_factor"),
        )

    def mlp(self, index: int) -> FeedForward:
        path = f"model.layers.{index}.mlp"
        chosen = self._hash_choice if _is_hashed(self.config, index) else self._choice
        return self.experts(path, chosen(f"{path}.gate"), shared=shared_expert(self, path))

    def _choice(self, path: str) -> ExpertChoice:
        name = f"{path}.e_score_correction_bias"
        bias = self.weights.raw(name, (self.config.num_experts,))
        return ExpertChoice(self._routing(biased=True), bias.astype(mx.float32))

    def _hash_choice(self, path: str) -> HashChoice:
        config, path = self.config, f"{path}.tid2eid"
        table = self.weights.raw(path, (config.vocab_size, config.experts_per_token))
        if int(table.min()) < 0 or int(table.max()) >= config.num_experts:
            raise CheckpointError(f"{path} names experts that there are not.")
        return HashChoice(self._routing(biased=False), table.astype(mx.int32), self._tokens)


def _layer_types(config: Fields, num_layers: int) -> list[str]:
    """The kind of each layer, as stated or by its ratio; else HCA twice, then HCA and CSA in turn.

    A list may go on with the layers that predict further ahead.
    """
    sizes = {"count": num_layers, "further": num_layers}
    kinds = config.by_layer("layer_types", known=[*_KINDS.values()], **sizes)
    ratios = config.by_layer("compress_ratios", known=[*_KINDS], **sizes)
    if kinds is None and ratios is not None:
        return [_KINDS[ratio] for ratio in ratios]
    return kinds or [_CSA if i > 2 and i % 2 else _HCA for i in range(num_layers)]


def _mlp_types(config: Fields, num_layers: int) -> list[str]:
    """'hash_moe' where ids choose the experts, as stated or in the first layers; else 'moe'."""
    known, count = ("hash_moe", "moe"), num_layers
    first = config.integer("num_hash_layers", low=0, default=3)
    return config.by_layer("mlp_layer_types", count=count, known=known, further=count) or [
        "hash_moe" if i < first else "moe" for i in range(count)
    ]


def _is_hashed(config: ModelConfig, index: int) -> bool:
    return (config.fields.items("mlp_layer_types") or [])[index] == "hash_moe"


def _ropes(config: Fields) -> dict[str, Any]:
    """The ropes of layers without compressed vectors (main) and with them (compress).

    Only the latter are scaled, and YaRN's factor on what it rotates is 1 unless it is stated.
    """
    stated = config.fields("rope_parameters")
    named = {} if stated is None else stated.values
    if isinstance(named.get("main"), dict) and isinstance(named.get("compress"), dict):
        return {name: named[name] for name in ("main", "compress")}
    head_dim = config.integer("head_dim", high=2**14, default=512)
    rope_dims = config.integer("qk_rope_head_dim", high=head_dim, default=head_dim // 8)
    partial = config.get("partial_rotary_factor") or rope_dims / head_dim
    scaling = config.fields("rope_parameters", "rope_scaling")
    scaled = {"attention_factor": 1.0, **({} if scaling is None else scaling.values)}
    thetas = config.get("rope_theta") or 10_000.0, config.get("compress_rope_theta") or 160_000.0
    main, compress = ({"rope_theta": t, "partial_rotary_factor": partial} for t in thetas)
    return {"main": {"rope_type": "default", **main}, "compress": {**scaled, **compress}}


def _compressed_spec(config: ModelConfig, kind: str) -> CompressedSpec:
    fields, dim = config.fields, config.head_dim
    rates, kinds = fields.fields("compress_rates"), fields.items("layer_types") or ()
    stated = {label: fields.get(key) for label, key in _RATES.items()}
    for label, rate in zip(_KINDS.values(), _KINDS, strict=True):
        if label in stated:
            listed = None if rates is None else rates.get(label)
            stated[label] = stated[label] or listed or rate
    whole = Fields(stated, fields.where)
    ratio = whole.integer(kind, high=2**12)
    unit = max(whole.integer(label, high=2**12) for label in _RATES if label in kinds)
    index_dim = fields.integer("index_head_dim", high=2**14) if kind == _CSA else 0
    carried = 2 * (dim + index_dim) if kind == _CSA else 0
    rope = next(spec for spec in config.ropes if spec is not None)
    if unit % ratio or dim % ratio or index_dim % ratio or carried * ratio % unit:
        raise UnsupportedModelError(
            f"{fields.where} has blocks of {stated[_CSA]} and {stated[_HCA]} tokens, vectors of "
            f"{dim} numbers and index keys of {index_dim}; pages need sizes that divide each other."
        )
    if index_dim and index_dim < rope.dims:
        raise CheckpointError(
            f"index_head_dim in {fields.where} is {index_dim}; expected at least {rope.dims}."
        )
    return CompressedSpec(
        dim,
        2 * carried or 2 * dim,
        ratio,
        unit,
        index_dim,
        fields.integer("index_topk", high=2**31) if index_dim else 0,
        carried,
    )


def _halves_apart(rows: Sequence[int]) -> list[int]:
    """The first halves of several outputs that stand side by side, then their second halves."""
    starts = [sum(rows[:i]) for i in range(len(rows))]
    pairs = list(zip(starts, rows, strict=True))
    first = [i for start, count in pairs for i in range(start, start + count // 2)]
    return first + [i for start, count in pairs for i in range(start + count // 2, start + count)]
