"""Inkling 2 Mini: a residual of blocks, attention with a bias by distance, a core that repeats.

The core's layers are visited once for each pass. A visit is a layer of the decoder, with a cache of
its own; all visits of a layer share its weights.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from ...cache_specs import KVSpec, StateSpec
from ...errors import CheckpointError
from ...layers.block_residual import BlockPlace, MessageGate, Messages, MixedBlocks, MixedLayer
from ...layers.linear import Projection
from ...layers.mlp import Gated
from ...layers.norm import Norm
from ...layers.relative_attention import ClippedHeads, LogScale, RelativeAttention
from ...layers.residual_conv import ResidualConv
from ...layers.step import Layer, Step
from ..config import FULL, SLIDING, ModelConfig
from ..decoder import Entry
from ..experts import AlternatingExperts, Shape
from ..family import Family, no_positions
from ..jsonfields import Fields
from ..quantization import MXFP8, NVFP4
from ..stage import BetweenStages
from ..weights.matrix import StoredMatrix
from ..weights.weights import Weights
from .deepseek import PLAIN_ROUTING, biased_routing

_FRONTS: Mapping[str, str] = {  # of the vendor's names, in this order, and ours
    "model.llm.": "model.",
    "model.embed.": "model.embed_tokens.",
    "model.unembed.": "lm_head.",
}
_ENDS: Mapping[str, str] = {
    ".weight_proj": ".weight_proj.weight",
    ".experts.w13_weight": ".experts.gate_up_proj.weight",
    ".experts.w2_weight": ".experts.down_proj.weight",
    **{
        f".experts.{theirs}_weight_{part}": f".experts.{ours}.{part}"
        for theirs, ours in (("w13", "gate_up_proj"), ("w2", "down_proj"))
        for part in ("scale", "amax", "outer_scale_denominator")
    },
    ".experts.gate_up_proj": ".experts.gate_then_up.weight",  # in memory, as few others have them
    ".experts.down_proj": ".experts.down_proj.weight",
    ".gate.bias": ".gate.e_score_correction_bias",
    **{f".down_{part}": f".down.{part}" for part in ("weight", "scales", "biases")},
}
# Of tensors that transformers writes by the names of its modules.
_GATES = {"q": "attn", "k": "k", "v": "v", "mlp": "mlp"}
_MODULES: Mapping[str, str] = {
    "embed_tokens.embed_norm": "embed_norm",
    "final_input.query": "attn_res.output_query",
    ".post_attention_layernorm": ".mlp_norm",
    "_input_layernorm": "_input_norm",
    ".input_layernorm": ".attn_norm",
    "post_attention_convolution.": "attn_sconv.",
    "post_mlp_convolution.": "mlp_sconv.",
    **{f"self_attn.{kind}_proj.sconv.": f"attn.{kind}_sconv." for kind in "kv"},
    ".conv1d.weight": ".weight",
    ".static_weight": ".static_w",
    "self_attn.q_proj.linear": "attn.wq_du",
    "self_attn.k_proj.linear": "attn.wk_dv",
    "self_attn.v_proj.linear": "attn.wv_dv",
    "self_attn.o_proj.linear": "attn.wo_ud",
    "self_attn.q_proj.norm": "attn.q_l2_clip",
    "self_attn.o_proj.gate_proj": "attn.gate_attn",
    "self_attn.sink_proj": "attn.attn_sink_proj",
    "self_attn.relative_position_bias.linear": "attn.wr_du",
    "self_attn.relative_position_bias.norm": "attn.rel_l2_clip",
    "self_attn.relative_position_bias.proj": "attn.rel_logits_proj.proj",
    "_message_gate.down_proj": "_message_gate.down",
    "_message_gate.message_gate_proj.weight": "_message_gate.gain_weight",
    "_message_gate.forget_gate_proj.weight": "_message_gate.forget_weight",
    **{f".{theirs}_message_gate": f".controllers.{ours}" for theirs, ours in _GATES.items()},
}
_LAYER_QUERY = re.compile(r"layers\.(\d+)\.(attention|mlp)_input\.query")
_KINDS = {"hybrid": FULL, "hybrid_sliding": SLIDING}
_LOOP = {  # in `loop_config`, and since transformers 5.24
    "core_start": "loop_layer_index_start",
    "core_end": "loop_layer_index_end",
    "num_passes": "loop_num_passes",
    "gate_rank": "loop_gate_rank",
}
_SAME = {  # other names of settings, and those that are read
    "sliding_window_size": "sliding_window",
    "moe_intermediate_size": "intermediate_size",
    "num_local_experts": "n_routed_experts",
    "sconv_kernel_size": "conv_kernel_size",
    "route_scale": "routed_scaling_factor",
}
_FULL_INPUTS = ("q", "k", "v")
_CONTROLLERS = ("attn", "k", "v", "mlp")


class Visit(NamedTuple):
    """A layer of the decoder: `layer` of the checkpoint, in a pass from 0."""

    layer: int
    number: int


class LayerLoop(NamedTuple):
    """The core, and how many layers are a block."""

    start: int
    stop: int
    passes: int
    block: int

    @classmethod
    def of(cls, fields: Fields) -> "LayerLoop":
        """Raises CheckpointError where blocks of layers are not whole."""
        keys = ("loop_layer_index_start", "loop_layer_index_end", "loop_num_passes")
        start, stop, passes = (fields.integer(key, high=2000) for key in keys)
        block = fields.integer("n_layers_per_attn_res_block", high=2000)
        count = fields.integer("num_hidden_layers", high=2000)
        if start % block or stop % block or not start < stop <= count or passes > 16:
            raise CheckpointError(
                f"{fields.where} has a core of layers {start} to {stop} of {count}, in {passes} "
                f"passes; expected whole blocks of {block} layers and 16 passes at most."
            )
        return cls(start, stop, passes, block)

    def visits(self, count: int) -> list[Visit]:
        """The layers of the decoder, of `count` layers of the checkpoint."""
        core = range(self.start, self.stop)
        again = [Visit(index, number) for number in range(1, self.passes) for index in core]
        first = [Visit(index, 0) for index in range(self.stop)]
        return [
            *first,
            *again,
            *(Visit(index, self.passes - 1) for index in range(self.stop, count)),
        ]

    def place(self, visit: Visit) -> BlockPlace:
        """The vectors that a visit reads, and in which order.

        After a pass over the core, these vectors stand side by side: the sources that the previous
        pass left, the blocks before the core, the state with which each pass begins, and the blocks
        of this pass.
        """
        layer, number = visit
        before, own = self.start // self.block, (self.stop - self.start) // self.block
        inside = self.start <= layer < self.stop
        sources = own if inside and number else 0
        order = None
        if inside and number and layer == self.start:
            came = own if number > 1 else 0
            last = came + before + 1 + own
            order = (*range(came + before + 1, last), *range(came, came + before + 1))
        elif layer == self.stop and self.passes > 1:
            order = tuple(range(own, own + before + own + 1))
        return BlockPlace(order, sources, layer % self.block == 0)


class ReleasedExperts(AlternatingExperts):
    """Rows of gate and up alternate where they are published; here they do not."""

    def matrix(
        self, weights: Weights, path: str, name: str, shape: Shape, parts: Sequence[int] | None
    ) -> StoredMatrix:
        both = name == "gate_up_proj"
        if both and f"{path}.gate_then_up.weight" in weights:
            return super().matrix(weights, path, "gate_then_up", shape, parts)
        stored = _released(weights, f"{path}.{name}", shape)
        if stored is None:
            stored = super().matrix(weights, path, name, shape, parts)
        rows = range(shape[1])
        return stored.reordered([*rows[::2], *rows[1::2]]) if both else stored


def _released(weights: Weights, path: str, shape: Shape) -> StoredMatrix | None:
    """Experts as they are released: codes, scales, and with 4 bits a factor of each expert.

    None: they are stored in another way.
    """
    count, rows, in_dims = shape
    if f"{path}.scale" not in weights:
        return None
    form = NVFP4 if f"{path}.amax" in weights else MXFP8
    if in_dims % form.group_size:
        raise CheckpointError(
            f"{path} has {in_dims} inputs, which groups of {form.group_size} do not divide."
        )
    octets = weights.raw(f"{path}.weight", (count, rows, in_dims * form.bits // 8))
    scales = weights.raw(f"{path}.scale", (count, rows, in_dims // form.group_size))
    if octets.dtype != mx.uint8 or scales.dtype != mx.uint8:
        raise CheckpointError(
            f"{path} has codes of {octets.dtype} and scales of {scales.dtype}; expected bytes."
        )
    factors = None
    if form is NVFP4:
        parts = [f"{path}.{part}" for part in ("amax", "outer_scale_denominator")]
        amax, whole = (weights.raw(n, weights.shape(n)).astype(mx.float32) for n in parts)
        factors = mx.broadcast_to((amax / whole).flatten(), (count,))
    stored = StoredMatrix(octets.view(mx.uint32), None, scales, None, form, factors=factors)
    return weights.named(stored, path, f"{path}.weight")


class Inkling2Loop(Family):
    """The text of Inkling 2 Mini. Source: transformers 5.24, Inkling2LoopForCausalLM."""

    defaults: ClassVar = {
        "vocab_size": 201_024,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "swa_num_attention_heads": 24,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 128,
        "sliding_window": 1024,
        "d_rel": 16,
        "rel_extent": 1024,
        "log_scaling_n_floor": 8192,
        "log_scaling_alpha": 0.1,
        "max_position_embeddings": 1_048_576,
        "conv_kernel_size": 4,
        "intermediate_size": 1152,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        **PLAIN_ROUTING,
        "routed_scaling_factor": 8.0,
        "qk_l2_clip_threshold": 22.627416997969522,
        "rel_l2_clip_threshold": 8.0,
        "n_layers_per_attn_res_block": 6,
        "mlp_gate_softcap": 4.0,
        "mlp_up_softcap": 25.0,
        "final_logit_softcapping": 30.0,
        "loop_layer_index_start": 6,
        "loop_layer_index_end": 18,
        "loop_num_passes": 3,
        "loop_gate_rank": 64,
        "tie_word_embeddings": False,
    }
    packed_experts = ReleasedExperts()
    keys = _SAME
    names: ClassVar = _MODULES
    stacks = ()
    rope_specs = staticmethod(no_positions)
    ignored = ("attention_bias",)

    # -- the config -----------------------------------------------------------------------------

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """The config in the spelling of transformers 5.24, kinds of layers as elsewhere."""
        loop = config.fields("loop_config") or Fields({}, config.where)
        values = {**super().language_model(config).values, **loop.stated(_LOOP)}
        count = config.integer("num_hidden_layers", high=2000)
        period = ["hybrid" if (i + 1) % 6 == 0 else "hybrid_sliding" for i in range(count)]
        kinds = config.items("layer_types") or period
        values["layer_types"] = [_KINDS.get(str(kind), kind) for kind in kinds]
        return Fields(values, config.where)

    @classmethod
    def whole_because(cls, config: ModelConfig) -> str:
        return (
            "its layers read the sums of earlier blocks, and its core runs several times: what "
            "flows into a layer is known when the last pass has run"
        )

    @classmethod
    def between_stages(cls, config: ModelConfig) -> BetweenStages:
        """Nothing can part them: how many vectors pass differs from layer to layer."""
        return BetweenStages((config.hidden_size,), bound=frozenset(range(1, config.num_layers)))

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """Layers are visits. Tokens behind the unpadded vocabulary have no logit."""
        fields = config.fields
        fields.require({"scoring_func": ["sigmoid"], "hidden_act": ["silu"]})
        visits = LayerLoop.of(fields).visits(config.num_layers)
        windows = [config.windows[visit.layer] for visit in visits]
        of_window = [
            fields.integer(f"swa_{key}", high=2**14)
            for key in ("num_key_value_heads", "head_dim", "num_attention_heads")
        ]
        full = [config.num_kv_heads, config.head_dim, config.num_heads]
        sizes = [full if window is None else of_window for window in windows]
        vocab = fields.integer("vocab_size", high=2**24)
        return replace(
            config,
            num_layers=len(visits),
            windows=tuple(windows),
            ropes=(None,) * len(visits),
            heads=tuple((kv_heads, dim) for kv_heads, dim, _ in sizes),
            query_heads=tuple(heads for _, _, heads in sizes),
            vocab_size=fields.integer("unpadded_vocab_size", high=vocab, default=vocab),
            num_experts=fields.integer("n_routed_experts", high=2**16),
            experts_per_token=fields.integer("num_experts_per_tok", high=2**16),
            moe_intermediate_size=config.intermediate_size,
            norm_topk_prob=True,
            sparse_layers=(True,) * len(visits),
        )

    @classmethod
    def rename(cls, name: str) -> str | None:
        for theirs, ours in _FRONTS.items():
            name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
        for theirs, ours in _ENDS.items():
            name = name.removesuffix(theirs) + ours if name.endswith(theirs) else name
        if match := _LAYER_QUERY.search(name):  # the first layer has no query of attention
            number, of_attention = int(match[1]), match[2] == "attention"
            kind = f"attn_queries.{number - 1}" if of_attention else f"mlp_queries.{number}"
            name = f"model.attn_res.{kind}"
        return super().rename(name)

    # -- the decoder ----------------------------------------------------------------------------

    @cached_property
    def _loop(self) -> LayerLoop:
        return LayerLoop.of(self.config.fields)

    @cached_property
    def _visits(self) -> list[Visit]:
        return self._loop.visits(self.config.fields.integer("num_hidden_layers"))

    @cached_property
    def _shared(self) -> dict[int, dict[str, Any]]:
        """The parts that all visits of a layer of the core share; the first visit makes them."""
        return {}

    @property
    def num_rows(self) -> int:
        return self.config.fields.integer("vocab_size")

    def output_head(self) -> Projection:
        """Padded rows are left out, where the checkpoint has them."""
        count, name = self.config.vocab_size, "lm_head.weight"
        whole = name not in self.weights or self.weights.shape(name)[0] != count
        rows = self.num_rows if whole else count
        stored = self.weights.matrix("lm_head", (rows, self.config.hidden_size))
        return (stored.reordered(range(count)) if whole else stored).projection()

    def entry(self) -> Entry:
        """The norm over embeddings, not over features; they begin the vector of the first block."""
        norm = self.norm("model.embed_norm")

        def enter(ids: mx.array, x: mx.array, step: Step) -> mx.array:
            x = norm(x)
            if step.features is not None:
                x[step.features.rows] = step.features.vectors.astype(x.dtype)
            return x

        return enter

    def last_norm(self) -> Norm:
        query = self._query("model.attn_res.output_query", 1)
        return MixedBlocks(query, super().last_norm())

    def _query(self, path: str, count: int) -> mx.array:
        """(count, hidden) float32 the query or queries of a mixture."""
        hidden = self.config.hidden_size
        shape = (hidden,) if count == 1 else (count, hidden)
        return self.weights.raw(path, shape).astype(mx.float32).reshape(count, hidden)

    def layer(self, index: int) -> Layer:
        visit = self._visits[index]
        parts = self._shared.get(visit.layer)
        if parts is None:
            parts = self._shared[visit.layer] = self._parts(index, visit.layer)
        passed = self._loop.start <= visit.layer < self._loop.stop and visit.number > 0
        convs = parts["convs"]
        return MixedLayer(
            RelativeAttention(
                **parts["attention"], k_conv=self._conv(convs[0]), v_conv=self._conv(convs[1])
            ),
            parts["mlp"],
            **parts["layer"],
            convs=(self._conv(convs[2]), self._conv(convs[3])),
            place=self._loop.place(visit),
            messages=parts["messages"] if passed else None,
            hidden_size=self.config.hidden_size,
        )

    def _conv(self, conv: tuple[mx.array, Projection | None]) -> ResidualConv:
        taps, weight_proj = conv
        before, channels = taps.shape[0] - 1, taps.shape[1]
        return ResidualConv(taps, StateSpec((((before, channels), "float32"),)), weight_proj)

    def _parts(self, index: int, stored: int) -> dict[str, Any]:
        """The parts of layer `stored` of the checkpoint, whose first visit is layer `index`."""
        path, full = f"model.layers.{stored}", self.config.windows[index] is None
        names = [f"{kind}_input_norm" for kind in _FULL_INPUTS] if full else ["attn_norm"]
        query = f"model.attn_res.attn_queries.{stored - 1}"
        return {
            "attention": self._attention(index, f"{path}.attn"),
            "mlp": self.experts(f"{path}.mlp", biased_routing(self, f"{path}.mlp")),
            "messages": self._messages(path, stored),
            "convs": [
                *(self._kv_conv(index, f"{path}.attn.{kind}_sconv") for kind in "kv"),
                *(
                    self._taps(f"{path}.{kind}_sconv", self.config.hidden_size)
                    for kind in ("attn", "mlp")
                ),
            ],
            "layer": {
                "queries": self._query(query, len(names)) if stored else None,
                "mlp_query": self._query(f"model.attn_res.mlp_queries.{stored}", 1),
                "norms": tuple(self.norm(f"{path}.{name}") for name in names),
                "mlp_norm": self.norm(f"{path}.mlp_norm"),
            },
        }

    def _attention(self, index: int, path: str) -> dict[str, Any]:
        config, fields, weights = self.config, self.config.fields, self.weights
        heads, (kv_heads, dim) = config.num_heads_of(index), config.heads_of(index)
        spec, hidden = config.cache_spec(index), config.hidden_size
        assert isinstance(spec, KVSpec)
        states = fields.integer("d_rel", high=2**10)
        extent = spec.window or fields.integer("rel_extent", high=2**24)
        limits = [fields.number(f"{kind}_l2_clip_threshold", above=0.0) for kind in ("qk", "rel")]
        linear = weights.linear
        return {
            "queries": self._clipped(index, f"{path}.wq_du", f"{path}.q_l2_clip", dim, limits[0]),
            "states": self._clipped(
                index, f"{path}.wr_du", f"{path}.rel_l2_clip", states, limits[1]
            ),
            "k_proj": linear(f"{path}.wk_dv", kv_heads * dim, hidden),
            "v_proj": linear(f"{path}.wv_dv", kv_heads * dim, hidden),
            "sink_proj": linear(f"{path}.attn_sink_proj", heads, hidden),
            "gate_proj": linear(f"{path}.gate_attn", heads * dim, hidden),
            "o_proj": linear(f"{path}.wo_ud", hidden, heads * dim),
            "profiles": weights.take(f"{path}.rel_logits_proj.proj", (states, extent)),
            "v_eps": config.rms_norm_eps,
            "spec": replace(spec, relative=True),
        }

    def _clipped(
        self, index: int, path: str, clip: str, numbers: int, threshold: float
    ) -> ClippedHeads:
        """Heads of `numbers` dims; in layers that see everything they grow with the position."""
        config, heads = self.config, self.config.num_heads_of(index)
        proj = self.weights.linear(path, heads * numbers, config.hidden_size)
        scale = self.weights.raw(f"{clip}.scale", (heads, numbers)).astype(mx.float32)
        whole = config.windows[index] is None
        return ClippedHeads(proj, scale, threshold, self._log_scale if whole else None)

    @cached_property
    def _log_scale(self) -> LogScale:
        fields = self.config.fields
        floor = fields.integer("log_scaling_n_floor", high=2**31)
        return LogScale(fields.number("log_scaling_alpha"), floor)

    def _taps(self, path: str, channels: int) -> tuple[mx.array, None]:
        """The taps of a convolution that are the same for all tokens, (K, channels)."""
        length = self.config.fields.integer("conv_kernel_size", low=2, high=64)
        weight = self.weights.raw(f"{path}.weight", (channels, 1, length))
        return weight[:, 0, ::-1].T.astype(mx.float32), None

    def _kv_conv(self, index: int, path: str) -> tuple[mx.array, Projection | None]:
        """The taps over keys or values; in layers that see everything each token adds some."""
        config, (heads, dim) = self.config, self.config.heads_of(index)
        if config.windows[index] is not None:
            return self._taps(path, heads * dim)
        length = config.fields.integer("conv_kernel_size", low=2, high=64)
        taps = self.weights.raw(f"{path}.static_w", (length, heads * dim)).astype(mx.float32)
        proj = self.weights.linear(f"{path}.weight_proj", heads * length, config.hidden_size)
        return taps, proj

    def _messages(self, path: str, stored: int) -> Messages | None:
        """The messages that a layer of the core leaves for later passes; None: it is in no core."""
        loop, rank = self._loop, self.config.fields.integer("loop_gate_rank", high=2**20)
        hidden, weights = self.config.hidden_size, self.weights
        if not loop.start <= stored < loop.stop:
            return None
        gates = []
        for name in _CONTROLLERS:
            front = f"{path}.controllers.{name}"
            gain, forget = (
                weights.raw(f"{front}.{kind}_weight", (hidden, rank)).astype(mx.float32)
                for kind in ("gain", "forget")
            )
            down = weights.linear(f"{front}.down", rank, 2 * hidden)
            gates.append(MessageGate(down, gain, forget, self.config.rms_norm_eps))
        return Messages(self._pass_queries[stored - loop.start], gates)

    @cached_property
    def _pass_queries(self) -> mx.array:
        """(layers of the core, 4, hidden) float32 for queries, keys, values and MLP.

        Published are two tables: in turn those for queries and MLP, and those for keys and values.
        """
        count, whole = self._loop.stop - self._loop.start, "model.message_input.query"
        shape = (count, 4, self.config.hidden_size)
        if whole in self.weights:
            return self.weights.raw(whole, shape).astype(mx.float32)
        names = [f"model.middle_cycle_cross_pass_{kind}" for kind in ("queries", "kv_queries")]
        outer, inner = (self._query(name, 2 * count).reshape(count, 2, -1) for name in names)
        return mx.concatenate([outer[:, :1], inner, outer[:, 1:]], axis=1)

    # -- experts --------------------------------------------------------------------------------

    @cached_property
    def activation(self) -> Gated:
        """cap(gate) * sigmoid(gate) * cap(up)."""
        limits = [self.config.fields.number(f"mlp_{k}_softcap", above=0.0) for k in ("gate", "up")]

        def product(gate: mx.array, up: mx.array) -> mx.array:
            dtype, gate, up = gate.dtype, gate.astype(mx.float32), up.astype(mx.float32)
            capped = limits[0] * mx.tanh(gate / limits[0]) * mx.sigmoid(gate)
            return (capped * limits[1] * mx.tanh(up / limits[1])).astype(dtype)

        return Gated(product)
