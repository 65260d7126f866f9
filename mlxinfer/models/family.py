"""A model family: reads a config, renames a checkpoint's tensors, and builds a decoder from both.

`Family` is Llama. A subclass in families/ states what its architecture does differently: by data (a
class attribute), by a part in place of a method (the functions at the end of this file, or another
family's method), or by a method of its own. Nothing outside its file, and its row in registry.py,
knows the architecture.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import mlx.core as mx

from ..cache_specs import KVSpec
from ..errors import CheckpointError
from ..layers.attention import Attention, AttentionArgs, LayerMixer, heads_maker
from ..layers.linear import Projection
from ..layers.mlp import MLP, FeedForward, Gated, gated
from ..layers.moe import Choose, ExpertProjection
from ..layers.norm import Norm, RMSNorm, WideQKNorm
from ..layers.rope import RopeSpec, rope_of, rotary_order, scale_factor
from ..layers.step import Layer, Rope
from ..metal_kernels.attention_heads import HeadsForm
from ..metal_kernels.paged_attention import Softmax
from .config import FULL, ModelConfig, read_layer_types, read_rope
from .decoder import Entry, Model, ResidualLayer
from .experts import PACKED, PackedExperts, read_experts
from .jsonfields import Fields
from .language import arrays
from .registry import language_name, name_ahead
from .stage import BetweenStages
from .weights.weights import Weights


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each head of Q and K."""

    names: tuple[str, str] = ("q_norm", "k_norm")  # of both in a checkpoint
    values: bool = False  # V has one too, without weights
    behind_rope: bool = False  # else before it


@dataclass(frozen=True, slots=True)
class MTPForm:
    """How the predictor (MTP) of an architecture is read."""

    # what is added to its stored norm weights; None: as in the model
    norm_offset: float | None = None
    before_norm: bool = False  # it reads hidden states before the last norm, not behind it


class Family:
    """Reads the config of one architecture and builds its decoder.

    Attributes:
        defaults: values of config.json where it is silent, as transformers has them.
        fits_float16: whether hidden states stay below 65,504.
        ignored: fields of the config that the architecture's own definition does not read.
        computed: fields of the config that other families refuse, as they compute without them.
        biases: fields of the config that say whether the projections to Q, K and V have biases, and
            whether the output's has one; None: it has none.
        head_norms: Q and K have an RMS norm over each head; None: they have none.
        norm_offset: what is added to stored norm weights.
        mtp: how a predictor (MTP) is read, where a checkpoint has one; None: it is not.
        output_proj, final_norm: the checkpoint's names of attention's output projection, and of
            the norm behind the last layer.
        keys: fields of the config under other names than here, and ours.
        names: parts of checkpoints' names of tensors, and what stands for each here, in this order.
        block_norms: names of the norms before and behind the mixer, and before and behind the other
            block; None: there is none.
        packed_experts: the layout of experts where gate and up are one matrix.
        stacks: ends of the names of experts' stacks that the hub has without ".weight".
        folded: ends of the paths of matrices that are no projections of the decoder.
        dense_matrices: ends of the paths of matrices that mlx-lm cannot load quantised.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    fits_float16: ClassVar[bool] = True
    ignored: ClassVar[tuple[str, ...]] = ()
    computed: ClassVar[tuple[str, ...]] = ()
    biases: ClassVar[tuple[str | None, str | None]] = ("attention_bias", "attention_bias")
    head_norms: ClassVar[HeadNorms | None] = None
    norm_offset: float = 0.0
    mtp: ClassVar[MTPForm | None] = None
    packed_experts: ClassVar[PackedExperts] = PackedExperts()
    folded: ClassVar[tuple[str, ...]] = ()
    dense_matrices: ClassVar[tuple[str, ...]] = ()
    output_proj: ClassVar[str] = "o_proj"
    final_norm: ClassVar[str] = "model.norm"
    block_norms: ClassVar[tuple[str | None, ...]] = (
        "input_layernorm", None, "post_attention_layernorm", None
    )  # fmt: skip
    keys: ClassVar[Mapping[str, str]] = {}
    names: ClassVar[Mapping[str, str]] = {}
    stacks: ClassVar[tuple[str, ...]] = PACKED

    # -- the config -----------------------------------------------------------------------------

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """The object that describes the language model, with its `model_type`."""
        return config.renamed(cls.keys)

    @classmethod
    def layer_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """FULL or SLIDING for each layer; see `read_layer_types`."""
        stated = fields.items("layer_types") is not None
        return (read_layer_types if stated else cls.unstated_types)(fields, num_layers)

    @classmethod
    def unstated_types(cls, fields: Fields, num_layers: int) -> list[str]:
        return read_layer_types(fields, num_layers)

    @classmethod
    def rope_specs(
        cls, fields: Fields, layer_types: Sequence[str], head_dim: int
    ) -> tuple[RopeSpec | None, ...]:
        """The rope of each layer; None: the layer has no positions."""
        pairs = [*zip(layer_types, cls.layers_with_rope(fields, layer_types), strict=True)]
        with_rope = {kind for kind, has_rope in pairs if has_rope}
        by_type = {kind: cls.rope_spec(fields, kind, head_dim) for kind in with_rope}
        return tuple(by_type[kind] if has_rope else None for kind, has_rope in pairs)

    @classmethod
    def layers_with_rope(cls, fields: Fields, layer_types: Sequence[str]) -> Sequence[bool]:
        """Whether the tokens of each layer have positions."""
        return [True] * len(layer_types)

    @classmethod
    def rope_spec(cls, fields: Fields, layer_type: str, head_dim: int) -> RopeSpec | None:
        """The rope of the layers of a type; None: they have no positions."""
        return read_rope(fields, layer_type, head_dim=head_dim)

    @classmethod
    def head_dim(cls, fields: Fields, num_heads: int) -> int:
        if stated := fields.integer("head_dim", high=2**14, default=None):
            return stated
        hidden_size = fields.integer("hidden_size", high=2**20)
        if hidden_size < num_heads:
            raise CheckpointError(
                f"hidden_size is {hidden_size} for num_attention_heads of {num_heads}, which "
                "leaves nothing for a head; expected more, or a head_dim."
            )
        return hidden_size // num_heads

    @classmethod
    def whole_because(cls, config: ModelConfig) -> str | None:
        """Why no layer runs by itself; None: it needs hidden states and ids of tokens only."""
        return None

    @classmethod
    def unread(cls, config: ModelConfig, layers: range) -> Sequence[str]:
        """Beginnings of the names of tensors in `layers` that a text model does not use."""
        return ()

    @classmethod
    def between_stages(cls, config: ModelConfig) -> BetweenStages:
        return BetweenStages((config.hidden_size,))

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        return config

    @classmethod
    def mtp_blocks(cls, config: ModelConfig) -> tuple[str, ...]:
        """The kinds of a predictor's layers, see `ModelConfig.blocks`; empty: it has one layer."""
        return ()

    # -- the checkpoint -------------------------------------------------------------------------

    @classmethod
    def tensor_name(cls, name: str) -> str | None:
        """`rename` of a text model's tensor, alone or inside of a larger model; None: it is not.

        Modules that predict tokens further ahead are no part of the model. Stacks of experts are
        called as other matrices are.
        """
        inner = language_name(name)
        if inner is None or name_ahead(inner):
            return None
        return cls.renamed(f"{inner}.weight" if inner.endswith(cls.stacks) else inner)

    @classmethod
    def renamed(cls, name: str) -> str | None:
        """`rename`, after the `names` of the family and of those it is made of."""
        for kind in cls.__mro__:
            for theirs, ours in vars(kind).get("names", {}).items():
                name = name.replace(theirs, ours)
        return cls.rename(name)

    @classmethod
    def rename(cls, name: str) -> str | None:
        """A checkpoint's tensor name as the decoder has it; None: the tensor carries nothing.

        Old checkpoints hold the rope's frequencies, which follow from the config.
        """
        return None if name.endswith(".rotary_emb.inv_freq") else name

    # -- the decoder ----------------------------------------------------------------------------

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.attentions: dict[int, LayerMixer] = {}  # those with keys that later layers may read
        self._ropes: dict[tuple[RopeSpec, int], Rope] = {}

    @classmethod
    def build(cls, config: ModelConfig, weights: Weights) -> Model:
        """The model, its weights evaluated layer by layer so that nothing is held twice."""
        tied = config.tie_word_embeddings and not config.without_lm_head
        tied = tied and weights.same_matrix("lm_head", "model.embed_tokens")
        return cls(replace(config, tie_word_embeddings=tied), weights)._model()

    def _model(self: Self) -> Model:
        config, weights = self.config, self.weights
        tied = config.tie_word_embeddings
        table = weights.embedding("model.embed_tokens", (self.num_rows, config.hidden_size))
        entry = self.entry()
        weights.evaluate(list(arrays([table, entry])))
        layers = [weights.layer(index, self.layer) for index in range(config.num_layers)]
        norm = self.last_norm()
        self._drop_prediction_layers()
        lm_head = table.as_linear() if tied else None
        if tied or config.without_lm_head:
            weights.drop(*[f"lm_head.{part}" for part in ("weight", "scales", "biases", "signs")])
        else:
            lm_head = self.output_head()
        weights.finish()
        model = Model(
            config,
            embed_tokens=table,
            layers=layers,
            norm=norm,
            lm_head=lm_head,
            activation_dtype=weights.dtype,
            embed_scale=self.embed_scale(),
            entry=entry,
            adapter_targets=weights.adapter_targets or (),
        )
        weights.evaluate([*model.arrays(), *arrays(lm_head)])
        return model

    def _drop_prediction_layers(self) -> None:
        """Leave out layers behind the last; they predict tokens further ahead."""
        first = self.config.num_layers
        more = self.config.fields.integer("num_nextn_predict_layers", low=0, default=0)
        self.weights.drop_below([f"model.layers.{i}." for i in range(first, first + min(more, 64))])

    @property
    def num_rows(self) -> int:
        return self.config.vocab_size

    def output_head(self) -> Projection:
        return self.weights.head("lm_head", (self.config.vocab_size, self.config.hidden_size))

    def embed_scale(self) -> float | None:
        """Multiplies the embeddings; None: 1."""
        return None

    def entry(self) -> Entry | None:
        """The part between embeddings and layers; None: there is none."""
        return None

    def last_norm(self) -> Norm:
        return self.norm(self.final_norm)

    @property
    def num_streams(self) -> int:
        """Residual streams of a token, side by side."""
        return 1

    @property
    def mtp_streams(self) -> int:
        return self.num_streams

    def mtp_norm(self, path: str) -> Norm | None:
        """Before the logits of the predictor at `path`; None: the model's last norm (ERNIE 4.5)."""
        norm = f"{path}.shared_head.norm"
        return self.norm(norm) if f"{norm}.weight" in self.weights else None

    def layer(self, index: int) -> Layer:
        """Layer `index`: its blocks in their norm layout."""
        path = f"model.layers.{index}."
        norms = [self.norm(path + name) if name else None for name in self.norm_names(index)]
        blocks = self.mixer(index), self.mlp(index)
        return ResidualLayer(*blocks, before=norms[::2], after=norms[1::2])

    def norm_names(self, index: int) -> Sequence[str | None]:
        """As `block_norms`, of layer `index`."""
        return self.block_norms

    def norm(self, path: str, dims: int | None = None, eps: float | None = None) -> Norm:
        """The RMS norm at `path`, over `dims` numbers; None: over the hidden size."""
        width = self.config.hidden_size if dims is None else dims
        weight = self.weights.norm(path, width, offset=self.norm_offset)
        return RMSNorm(weight, self.config.rms_norm_eps if eps is None else eps)

    def mlp(self, index: int) -> FeedForward:
        return self.dense_mlp(f"model.layers.{index}.mlp", self.config.intermediate_size)

    # -- attention ------------------------------------------------------------------------------

    def mixer(self, index: int) -> LayerMixer:
        args, rope = self.attention_args(index), self.config.ropes[index]
        if self.config.qkv_bias and args.qk_norm is None and not (rope and rope.long):
            args.key_bias = self._key_bias(args)
            args.spec = replace(args.spec, key_bias=True)
        return Attention(args)

    def _key_bias(self, args: AttentionArgs) -> mx.array:
        """(KV heads, D) the bias that the projection adds to each key."""
        biases = args.qkv_proj(mx.zeros((1, self.config.hidden_size), self.weights.dtype))
        heads, dim = args.num_heads + args.spec.num_kv_heads, args.spec.key_dim
        return biases[0, : heads * dim].reshape(-1, dim)[args.num_heads :]

    def attention_args(self, index: int) -> AttentionArgs:
        """The parts of a layer's attention; `mixer` adds the bias of keys."""
        config, heads, spec = self.config, self.config.num_heads_of(index), self.config.ropes[index]
        path, (_, dim) = f"model.layers.{index}.self_attn", config.heads_of(index)
        kv_spec = config.cache_spec(index)
        assert isinstance(kv_spec, KVSpec)
        qkv_proj, gate_proj = self.attention_inputs(index)
        args = AttentionArgs(
            qkv_proj=qkv_proj,
            gate_proj=gate_proj,
            o_proj=self.attention_output(f"{path}.{self.output_proj}", heads * kv_spec.value_dim),
            num_heads=heads,
            spec=replace(kv_spec, rope_axes=spec.num_axes if spec else 1),
            softmax=Softmax(
                config.attention_scale * (scale_factor(spec, dim) if spec else 1.0),
                self.sinks(index),
                config.score_softcap,
            ),
            rope=self.rope(spec, dim) if spec else None,
        )
        return self.with_norms(args, index)

    def sinks(self, index: int) -> mx.array | None:
        """(heads,) learned logits that take part in each softmax; None: the layer has none."""
        return None

    def with_norms(self, args: AttentionArgs, index: int) -> AttentionArgs:
        """`args` with the norms of Q, K and V, and the kernel that does them and the rope."""
        config, (kv_heads, dim) = self.config, self.config.heads_of(index)
        norms = self.head_norms or HeadNorms()
        if norms.values:
            args.v_norm = RMSNorm(mx.ones(dim, self.weights.dtype), config.rms_norm_eps)
        weight = self.head_norm_weight(index)
        if weight is not None:
            args.qk_norm, args.norm_last = RMSNorm(weight, config.rms_norm_eps), norms.behind_rope
        form = HeadsForm(
            args.num_heads, kv_heads, dim, norm=weight is not None, norms_values=norms.values
        )
        args.make_heads = heads_maker(form, config.ropes[index], weight, config.rms_norm_eps)
        return args

    def attention_inputs(self, index: int) -> tuple[Projection, Projection | None]:
        """The projection to Q, K and V, and the one to gates of the heads' outputs; None: none."""
        return self.qkv(index), None

    def gates(self, index: int, name: str, *, by_head: bool = False) -> Projection:
        """The projection `name` to gates: one for each number of the heads' outputs, or a head."""
        config, width = self.config, self.config.num_heads_of(index)
        if not by_head:
            width *= config.heads_of(index)[1]
        path = f"model.layers.{index}.self_attn.{name}"
        return self.weights.linear(path, width, config.hidden_size)

    def attention_output(self, path: str, inner: int) -> Projection:
        config = self.config
        return self.weights.linear(path, config.hidden_size, inner, bias=config.o_bias)

    def qkv(self, index: int) -> Projection:
        config, path = self.config, f"model.layers.{index}.self_attn"
        kv_heads, dim = config.heads_of(index)
        heads = [config.num_heads_of(index), kv_heads, kv_heads]
        dims = dim, dim, config.value_dim or dim
        return self.weights.fused(
            [f"{path}.{name}_proj" for name in "qkv"],
            [count * head_dim for count, head_dim in zip(heads, dims, strict=True)],
            config.hidden_size,
            bias=config.qkv_bias,
            orders=[*(self.head_order(count, index) for count in heads[:2]), None],
        )

    def head_order(self, num_heads: int, index: int) -> Sequence[int] | None:
        """The checkpoint's index of each number of the heads of Q or K; None: as it is here."""
        return None

    def rope(self, spec: RopeSpec, head_dim: int) -> Rope:
        """The rope of a spec over heads of a size; layers that agree in both share it."""
        key = spec, head_dim
        if key not in self._ropes:
            self._ropes[key] = rope_of(spec, head_dim, self.weights.dtype)
        return self._ropes[key]

    def head_norm_weight(self, index: int) -> mx.array | None:
        """(H + Hkv, D) for one norm over the heads of Q and K together; None: there is none."""
        if self.head_norms is None:
            return None
        path, (kv_heads, dim) = f"model.layers.{index}.self_attn", self.config.heads_of(index)
        counts = self.config.num_heads_of(index), kv_heads
        parts = [
            mx.broadcast_to(
                self.weights.take(f"{path}.{name}.weight", (dim,), offset=self.norm_offset),
                (count, dim),
            )
            for name, count in zip(self.head_norms.names, counts, strict=True)
        ]
        return mx.concatenate(parts)

    # -- feed-forward blocks ----------------------------------------------------------------------

    @cached_property
    def activation(self) -> Gated:
        return gated(self.config.activation, self.weights.dtype)

    def dense_mlp(
        self,
        path: str,
        inner: int,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        *,
        activation: Gated | None = None,
    ) -> MLP:
        """The gate, up and down projections at `path`, `inner` numbers wide.

        `activation`: None: that of the config.
        """
        hidden, bias = self.config.hidden_size, self.config.mlp_bias
        *ups, down_path = (f"{path}.{name}" for name in names)
        gate_up = self.weights.fused(ups, [inner, inner], hidden, bias=bias)
        down = self.weights.linear(down_path, hidden, inner, bias=bias)
        return MLP(gate_up, down, activation or self.activation)

    def packed_mlp(self, path: str, inner: int) -> MLP:
        """gate_up_proj, the gate first, and down_proj at `path`, without biases."""
        hidden = self.config.hidden_size
        return MLP(
            self.weights.linear(f"{path}.gate_up_proj", 2 * inner, hidden, parts=[inner, inner]),
            self.weights.linear(f"{path}.down_proj", hidden, inner),
            self.activation,
        )

    def experts(
        self,
        path: str,
        choose: Choose,
        *,
        router: str = "gate",
        shared: FeedForward | None = None,
        weighs_inputs: bool = False,
        activation: Gated | None = None,
    ) -> FeedForward:
        """The mixture of experts at `path`; `activation`: None: that of the config."""
        gate_up, down = self.expert_projections(path)
        mixture = self.weights.moe(
            router=self.router(f"{path}.{router}"),
            choose=choose,
            gate_up_proj=gate_up,
            down_proj=down,
            activation=activation or self.activation,
            shared=shared,
            weighs_inputs=weighs_inputs,
        )
        return self.weights.block(mixture)

    def expert_projections(self, path: str) -> tuple[ExpertProjection, ExpertProjection]:
        """Gate beside up, and down, of the experts at `path`; see `read_experts`."""
        config = self.config
        shape = config.num_experts, config.hidden_size, config.moe_intermediate_size
        return read_experts(self.weights, path, self.packed_experts, shape)

    def router(self, path: str) -> Projection:
        """The scores of experts (T, E), before they are weighed."""
        return self.weights.linear(path, self.config.num_experts, self.config.hidden_size)


# -- parts that families name -----------------------------------------------------------------


def no_positions(
    fields: Fields, layer_types: Sequence[str], head_dim: int
) -> tuple[RopeSpec | None, ...]:
    """As `Family.rope_specs`: no layer has positions."""
    return (None,) * len(layer_types)


def in_windows(fields: Fields, layer_types: Sequence[str]) -> Sequence[bool]:
    """As `Family.layers_with_rope`: tokens of layers with windows have positions, and no others."""
    return [kind != FULL for kind in layer_types]


def root_of_width(family: Family) -> float:
    """As `Family.embed_scale`: the root of the hidden size, as in the first Transformer."""
    return float(family.config.hidden_size**0.5)


def learned_sinks(family: Family, index: int) -> mx.array:
    """As `Family.sinks`: the tensor `sinks` of the layer's attention."""
    shape = (family.config.num_heads_of(index),)
    return family.weights.take(f"model.layers.{index}.self_attn.sinks", shape)


def pairs_apart(family: Family, num_heads: int, index: int) -> list[int] | None:
    """As `Family.head_order`, of checkpoints where rotary pairs stand side by side.

    Here they are half a part apart. Q and K alike are put so, which leaves every score as it is.
    """
    spec, (_, dim) = family.config.ropes[index], family.config.heads_of(index)
    return None if spec is None else rotary_order(num_heads, 0, spec.dims, dim)


def with_wide_norms(family: Family, args: AttentionArgs, index: int) -> AttentionArgs:
    """As `Family.with_norms`: Q has one norm over the whole of it, and so has K. No kernel does."""
    config, path = family.config, f"model.layers.{index}.self_attn"
    norm = WideQKNorm(
        family.norm(f"{path}.q_norm", config.num_heads * config.head_dim),
        family.norm(f"{path}.k_norm", config.num_kv_heads * config.head_dim),
        config.num_heads,
    )
    return replace(args, qk_norm=norm)
