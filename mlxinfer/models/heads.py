"""Heads that continue from a model's hidden states: MTP modules and EAGLE-3 drafts.

`load_prediction_head` reads the multi-token prediction that a checkpoint brings beside its layers.
One network is published under several names. DeepSeek V3, GLM 4.5 to 5.2, Ling 3.0 and Hy3 have
one more layer behind the last one; Qwen3-Next, Qwen 3.5, Mellum 2, EXAONE and MiMo have a module
`mtp`, and ERNIE 4.5 one of other names; Nemotron 3's has a layer for attention and one for experts.
The head reads the model's hidden states behind its last norm, and a chain goes on from the head's
own normed output. Sources: transformers 5.24, `MtpModel`; vLLM, `qwen3_next_mtp.py`,
`hy_v3_mtp.py`, `bailing_moe_v3_mtp.py`, `mimo_v2_mtp.py`, `nemotron_h_mtp.py`; FastDeploy,
`ernie4_5_mtp.py`.

`load_eagle` reads a draft from a folder of its own.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from ..core import CacheSpec
from ..errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from ..layers.attention import Mixer
from ..layers.linear import Projection
from ..layers.mlp import FeedForward
from ..layers.norm import Norm
from ..layers.step import FINAL, Layer, Rows, Step
from ..metal_kernels.variants import KernelUse, ModelForm, kernels_of
from .config import SLIDING, ModelConfig, normalise
from .decoder import Model
from .families.llama import Llama
from .family import PACKED, Family
from .jsonfields import Fields, read_json
from .language import arrays
from .quantization import Quantization
from .registry import family, language_name, layer_ahead, name_ahead
from .weights.source import Checkpoint
from .weights.tensors import FLOATS, load_tensors
from .weights.weights import Weights


class HeadBlock(Protocol):
    """The network of a head: reads a token's embedding and the hidden states before the token."""

    @property
    def mixers(self) -> Sequence[Mixer]:
        """The parts of the block that keep something, in the head's cache."""
        ...

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """The kernels that can do the work of its parts."""
        ...

    def __call__(self, embedded: mx.array, hidden: mx.array, step: Step) -> mx.array:
        """(T, hidden) each -> (T, hidden)."""
        ...


class JoinedBlock:
    """One projection of both, normed and side by side, then decoder layers, mostly one: MTP.

    DeepSeek-V3 technical report (arXiv 2412.19437, 2.2); vLLM, `deepseek_mtp.py` and
    `qwen3_next_mtp.py`.
    """

    __slots__ = ("embedding_norm", "hidden_norm", "layers", "mixers", "proj")

    def __init__(
        self, embedding_norm: Norm, hidden_norm: Norm, proj: Projection, layers: Sequence[Layer]
    ) -> None:
        self.embedding_norm = embedding_norm
        self.hidden_norm = hidden_norm
        self.proj = proj
        self.layers = layers
        self.mixers = [mixer for layer in layers for mixer in layer.mixers]

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return kernels_of(model, *self.layers)

    def __call__(self, embedded: mx.array, hidden: mx.array, step: Step) -> mx.array:
        """(T, hidden) each -> (T, hidden)."""
        both = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        x, normed = self.proj(mx.concatenate(both, axis=-1)), None
        for layer in self.layers:
            x, normed = layer(x, normed, step)
        return x


class StreamBlock:
    """A projection of each residual stream, plus one of the embedding, then a layer: Qwen4-Exp.

    SGLang, `qwen4_exp_mtp.py`; vLLM, `qwen4_exp/nvidia/mtp.py`. n = streams.

    Args:
        embedding_norm, hidden_norm: over (T, hidden), and over all streams (T, n * hidden) at once.
        embedding_proj, hidden_proj: (n, hidden) to the same shape.
        layer: of streams.
    """

    __slots__ = (
        "embedding_norm", "embedding_proj", "hidden_norm", "hidden_proj", "layer", "mixers",
    )  # fmt: skip

    def __init__(
        self,
        embedding_norm: Norm,
        hidden_norm: Norm,
        embedding_proj: Projection,
        hidden_proj: Projection,
        layer: Layer,
    ) -> None:
        self.embedding_norm = embedding_norm
        self.hidden_norm = hidden_norm
        self.embedding_proj = embedding_proj
        self.hidden_proj = hidden_proj
        self.layer = layer
        self.mixers = layer.mixers

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return self.layer.kernels(model)

    def __call__(self, embedded: mx.array, hidden: mx.array, step: Step) -> mx.array:
        """(T, hidden) and streams (T, n * hidden) -> streams."""
        streams = self.hidden_proj(self.hidden_norm(hidden).reshape(-1, embedded.shape[-1]))
        added = self.embedding_proj(self.embedding_norm(embedded))
        x = streams.reshape(len(embedded), -1, embedded.shape[-1]) + added[:, None]
        return self.layer(x.flatten(1), None, step)[0]


class ConcatenatedBlock:
    """A decoder layer with attention that reads both, normed and side by side: EAGLE-3.

    Li et al., "EAGLE-3" (arXiv 2503.01840); vLLM, `llama_eagle3.py`.

    Args:
        normed_residual: whether the hidden states are added to attention's outputs normed.
    """

    __slots__ = (
        "embedding_norm",
        "hidden_norm",
        "mixer",
        "mixers",
        "mlp",
        "mlp_norm",
        "normed_residual",
    )

    def __init__(
        self,
        embedding_norm: Norm,
        hidden_norm: Norm,
        mixer: Mixer,
        mlp_norm: Norm,
        mlp: FeedForward,
        *,
        normed_residual: bool,
    ) -> None:
        self.embedding_norm = embedding_norm
        self.hidden_norm = hidden_norm
        self.mixer = mixer
        self.mixers = (mixer,)
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.normed_residual = normed_residual

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return kernels_of(model, self.mixer, self.mlp)

    def __call__(self, embedded: mx.array, hidden: mx.array, step: Step) -> mx.array:
        """(T, hidden) each -> (T, hidden)."""
        normed = self.hidden_norm(hidden)
        both = mx.concatenate([self.embedding_norm(embedded), normed], axis=-1)
        x = self.mixer(both, step, normed if self.normed_residual else hidden)
        return self.mlp(self.mlp_norm(x), x)


class DraftHead:
    """A head with its own cache. A loop runs it like a model (`LanguageModel`).

    Position i of the head reads the model's hidden states at i and the token at i + 1; its logits
    are those of the token at i + 2. Further tokens follow from its own output in place of the
    model's hidden states, which is how a chain of proposals is drawn.

    Args:
        model: shares its embeddings, and its output projection where the head brings none.
        config: sizes of the head; `vocab_size` is the model's.
        taps: layers of the model that it reads, see `Taps`.
        block: the network.
        norm: before the logits.
        enter: outputs of the model's layers (n, taps * hidden) -> (n, hidden); None: as they are.
        chains_normed: whether the chain goes on from what `norm` gives, else from what it reads.
        embed_tokens: ids (T,) -> (T, hidden).
        lm_head: (R, hidden) -> (R, vocab) logits of the head's own vocabulary; None: the model's.
        token_ids: (vocab,) the model's tokens of that vocabulary; None: it is the model's.
    """

    lacks: Mapping[str, str] = {}
    expert_store: None = None
    tower: None = None
    rope_axes = 1

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        *,
        taps: Sequence[int],
        block: HeadBlock,
        norm: Norm,
        enter: Norm | None = None,
        chains_normed: bool = True,
        embed_tokens: Callable[[mx.array], mx.array] | None = None,
        lm_head: Projection | None = None,
        token_ids: mx.array | None = None,
    ) -> None:
        self.config = config
        self.taps = tuple(taps)
        self.block = block
        self.norm = norm
        self.activation_dtype = model.activation_dtype
        self.mixers = list(block.mixers)
        self.cache_specs: list[CacheSpec] = [mixer.spec for mixer in self.mixers]
        self.output: mx.array | None = None  # (T, hidden) of the step launched last
        self._enter = enter
        self._chains_normed = chains_normed
        self._embed = model.embed if embed_tokens is None else embed_tokens
        self._own_embed = embed_tokens
        self._model_logits = model.logits
        self._lm_head = lm_head
        self._token_ids = token_ids
        self._hidden: mx.array | None = None
        shared = [] if lm_head is not None else arrays(model.lm_head)
        self._shared_bytes = sum(array.nbytes for array in shared)

    def kernels(self) -> list[KernelUse]:
        """The kernels that can do the work of the block."""
        config = self.config
        form = ModelForm(self.activation_dtype, config.num_experts, config.quantization is not None)
        return self.block.kernels(form)

    def enter(self, tapped: mx.array) -> mx.array:
        """Outputs of the model's layers (n, taps * hidden) -> (n, hidden)."""
        return tapped if self._enter is None else self._enter(tapped)

    def feed(self, hidden: mx.array) -> None:
        """The hidden states (T, hidden) that the next step reads."""
        self._hidden = hidden

    def __call__(self, ids: mx.array, step: Step) -> mx.array:
        """One step over T positions of any sequences, after `feed`: (T, hidden)."""
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "feed was not called"
        x = self.block(self._embed(ids), hidden, step)
        self.output = self.norm(x) if self._chains_normed else x
        return self.output

    def logits(self, hidden: mx.array, adapters: Rows | None = None) -> mx.array:
        """hidden (R, hidden) as `__call__` returns it -> (R, vocab_size of the model)."""
        normed = hidden if self._chains_normed else self.norm(hidden)
        if self._lm_head is None:
            return self._model_logits(normed)
        logits = self._lm_head(normed)
        if self._token_ids is None:
            return logits
        full = mx.full((logits.shape[0], self.config.vocab_size), -mx.inf, logits.dtype)
        full[:, self._token_ids] = logits
        return full

    def rope_variant(self, max_tokens: int) -> int:
        """Always 0: proposals need not be exact."""
        return 0

    def arrays(self) -> list[mx.array]:
        """Every array that is the head's own."""
        parts = [self.block, self.norm, self._enter, self._own_embed, self._lm_head]
        return list(arrays(parts))

    @property
    def num_bytes(self) -> int:
        """Memory that the head's own weights take."""
        return sum(array.nbytes for array in self.arrays())

    @property
    def bytes_read(self) -> int:
        """Bytes of weights that a proposal reads: the head's, and the shared output projection."""
        return self.num_bytes + self._shared_bytes


def weights_beside(
    model: Model,
    folder: Path,
    rename: Callable[[str], str | None],
    quantization: Quantization | None,
) -> Weights:
    """The weights in a folder, for a head or a draft that computes in the model's dtype."""
    source = Checkpoint(load_tensors(folder), rename)
    return Weights(source, quantization=quantization, dtype=FLOATS[model.activation_dtype])


def checked_taps(what: str, layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers whose outputs a head or a draft reads.

    Raises:
        CheckpointError: the model has no such layers.
    """
    if not layers or max(layers) >= num_layers or min(layers) < 0:
        raise CheckpointError(
            f"The {what} reads layers {list(layers)} of a model of {num_layers} layers: it is made "
            "for another model."
        )
    return tuple(layers)


_LAYER = re.compile(r"^(?:mtp\.layers|mtp_block|model\.layers)\.\d+\.")
_PARTS = (  # of a head, as other families call them, and as DeepSeek does
    ("mtp.fc.", "eh_proj."),
    ("mtp.pre_fc_norm_embedding.", "enorm."),
    ("mtp.pre_fc_norm_hidden.", "hnorm."),
    ("mtp.norm.", "shared_head.norm."),
    ("mtp_linear_proj.0.", "eh_proj."),
    ("mtp_emb_norm.0.", "enorm."),
    ("mtp_hidden_norm.0.", "hnorm."),
    ("final_layernorm.", "shared_head.norm."),
    ("transformer.shared_head.output.", "shared_head.head."),
    ("transformer.shared_head.", "shared_head."),
    ("pre_mlp_layernorm.", "post_attention_layernorm."),
    ("mtp.", ""),
)


def load_prediction_head(folder: Path, model: Model) -> DraftHead:
    """The head of the checkpoint that a model was loaded from, evaluated and ready.

    Of several it is the first, from which a chain of proposals goes on.

    Raises:
        InvalidRequestError: the checkpoint has none, or one that is not read.
        CheckpointError: a tensor is missing, misshapen or left over.
    """
    index, kind = model.config.num_layers, family(model.config.model_type)
    names = _Names(index, max(len(kind.head_blocks(model.config)), 1), kind.rename)
    weights = weights_beside(model, folder, names, model.config.quantization)
    if not names.found:
        raise InvalidRequestError(
            f"speculate is 'mtp', and {folder.name} has no weights that predict several tokens; "
            "conversions by other tools leave them out. Use 'auto', or convert the original "
            "checkpoint with `mlxinfer convert`.",
            param="speculate",
        )
    if not kind.has_head:
        raise InvalidRequestError(
            f"speculate is 'mtp', and the head of {model.config.model_type} is not read here; use "
            "'auto'.",
            param="speculate",
        )
    sparse = f"model.layers.{index}.mlp.gate.weight" in weights
    config = _longer(model.config, kind.head_blocks(model.config), sparse=sparse)
    head = _head(kind(config, weights), model)
    weights.finish()
    weights.evaluate(head.arrays())
    return head


class _Names:
    """Renames a head's tensors to those of more layers; None: the tensor is not the head's.

    Args:
        first, count: of these layers.
        rename: of the family, for what lies in a layer.
    """

    def __init__(self, first: int, count: int, rename: Callable[[str], str | None]) -> None:
        self._first, self._count, self._rename = first, count, rename
        self.found = False

    def __call__(self, name: str) -> str | None:
        place = layer_ahead(name, self._first)
        if place is None or place >= self._count:
            return None
        inner = _LAYER.sub("", name_ahead(name) or language_name(name) or "")
        for theirs, part in _PARTS:
            if inner.startswith(theirs):
                inner = part + inner.removeprefix(theirs)
        self.found = True
        if inner.startswith("shared_head."):  # in the last of the head's layers, or in none
            place = 0
        renamed = self._rename(f"model.layers.{self._first + place}.{inner}")
        return f"{renamed}.weight" if renamed and renamed.endswith(PACKED) else renamed


def _longer(config: ModelConfig, blocks: Sequence[str], *, sparse: bool) -> ModelConfig:
    """The config with the layers of a head, which are like the last one that has attention.

    They are like the last one of its kind where `mtp_layer_types` states that.

    Args:
        config: of the model.
        blocks: what each of these layers is; none: there is one.
        sparse: whether they have experts.
    """
    count = max(len(blocks), 1)
    states = config.states or (None,) * config.num_layers
    attending = [i for i, state in enumerate(states) if state is None]
    (kind, *_) = config.fields.items("mtp_layer_types") or (None,)
    alike = [i for i in attending if (config.windows[i] is not None) == (kind == SLIDING)]
    last = max(alike if kind and alike else attending)
    more: dict[str, Any] = {
        name: (*values, *[values[last]] * count)
        for name in ("windows", "ropes", "query_heads", "heads", "states")
        if (values := getattr(config, name))
    }
    whole = config.sparse_layers or (False,) * config.num_layers
    more["sparse_layers"] = (*whole, *[sparse] * count)
    blocks = (*config.blocks, *blocks)
    return replace(config, num_layers=config.num_layers + count, blocks=blocks, **more)


def _head(builder: Family, model: Model) -> DraftHead:
    """The head as more layers; the tables are the model's own."""
    config, weights, first = builder.config, builder.weights, model.config.num_layers
    path = f"model.layers.{first}"
    for table in ("embed_tokens", "shared_head.head"):
        weights.drop_below([f"{path}.{table}."])
    weights.drop(f"{path}.shared_head.weight")
    if builder.head_norm_offset is not None:
        builder.norm_offset = builder.head_norm_offset
    norm = builder.head_norm(path)
    before = builder.head_before_norm
    return DraftHead(
        model,
        config,
        taps=(first - 1 if before else FINAL,),
        block=_block(builder, first),
        norm=model.norm if norm is None else norm,
        chains_normed=not before,
    )


def _block(builder: Family, first: int) -> HeadBlock:
    """The network of the head, whose layers are those from `first` on."""
    hidden, linear = builder.config.hidden_size, builder.weights.linear
    path, streams = f"model.layers.{first}", builder.num_streams
    layers = [builder.layer(index) for index in range(first, builder.config.num_layers)]
    embedding_norm = builder.norm(f"{path}.enorm")
    hidden_norm = builder.norm(f"{path}.hnorm", streams * hidden)
    if streams == 1:
        proj = linear(f"{path}.eh_proj", hidden, 2 * hidden)
        return JoinedBlock(embedding_norm, hidden_norm, proj, layers)
    of_embedding = linear(f"{path}.fc_embedding", hidden, hidden)
    of_streams = linear(f"{path}.fc_hidden", hidden, hidden)
    (layer,) = layers
    return StreamBlock(embedding_norm, hidden_norm, of_embedding, of_streams, layer)


_FRONTS = ("midlayer.", "layers.0.")  # of the layer's names


class NormedProjection:
    """A norm, then a projection."""

    __slots__ = ("norm", "proj")

    def __init__(self, norm: Norm, proj: Projection) -> None:
        self.norm = norm
        self.proj = proj

    def __call__(self, x: mx.array) -> mx.array:
        """x (n, in_dims) -> (n, out_dims)."""
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


def load_eagle(folder: Path, model: Model) -> DraftHead:
    """The head in a checkpoint folder, evaluated and ready.

    Raises:
        UnsupportedModelError: it has several layers.
        CheckpointError: a file is broken, or the head is not for this model.
    """
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
    head = DraftHead(
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
    """The layers that give the head its inputs.

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
    """The projection of the layers' outputs, with a norm where the head has one."""
    weights = builder.weights
    normed = "input_norm.weight" in weights
    norm = builder.norm("input_norm", width) if normed else None
    proj = weights.linear("fc", builder.config.hidden_size, width)
    return proj if norm is None else NormedProjection(norm, proj)


def _token_ids(weights: Weights, drafted: int, vocab_size: int) -> mx.array | None:
    """(drafted,) the model's tokens of the head's vocabulary; None: they are the same."""
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
