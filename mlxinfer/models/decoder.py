"""The one decoder: a stack of layers, each a mixer and a feed-forward block in a norm layout.

Every token brings its own position. The caches that the caller passes, one for each layer, know
which sequence a token belongs to and what it may attend to.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

from ..cache_specs import CacheSpec
from ..layers.adapters import ActiveAdapters, Adapted, AdapterTarget
from ..layers.attention import LayerMixer, Mixer
from ..layers.linear import Embedding, Projection
from ..layers.mlp import FeedForward
from ..layers.norm import Join, Norm
from ..layers.step import FINAL, Layer, Passed, Rows, Step
from ..metal_kernels.variants import KernelUse, ModelForm, kernels_of
from .config import ModelConfig
from .language import arrays

if TYPE_CHECKING:
    from ..layers.ranks import Link
    from .towers import Tower
    from .weights.expert_store import ExpertStore


Entry = Callable[[mx.array, mx.array, Step], mx.array]
"""Token ids (T,) and embeddings (T, hidden) -> what the first layer reads."""


class ResidualLayer(Layer):
    """Two blocks that add to the residual stream, with norms before and after them.

    x + mixer(norm(x)), then x + mlp(norm(x)) in Llama and most others; x + norm(mixer(x)) and so
    on in OLMo 2 and its kin; norms on both sides in Gemma 2 and 3.

    Args:
        mixer, mlp: the blocks.
        before: norms before each of them; None: a block reads the stream as it is.
        after: norms over the output of each, before it is added; None: there is none.

    Attributes:
        joins: of the mixer's output, and of the other block's.
    """

    __slots__ = ("first_norm", "joins", "mixer", "mlp")

    def __init__(
        self,
        mixer: LayerMixer,
        mlp: FeedForward,
        *,
        before: Sequence[Norm | None] = (None, None),
        after: Sequence[Norm | None] = (None, None),
    ) -> None:
        self.mixer = mixer
        self.mlp = mlp
        self.first_norm = before[0]
        self.joins = Join(after[0], before[1]), Join(after[1], None)

    def pass_on(self, norm: Norm) -> None:
        self.joins[1].before = norm

    def __call__(self, x: mx.array, normed: mx.array | None, step: Step) -> Passed:
        """x (T, hidden) -> (T, hidden)."""
        to_mlp, onward = self.joins
        if normed is None:
            normed = x if self.first_norm is None else self.first_norm(x)
        x = step.narrow(x) if step.narrows else x
        x, normed = to_mlp(x, partial(self.mixer, normed, step))
        x, normed = onward(x, partial(self.mlp, normed))
        return x, None if onward.before is None else normed


@dataclass(slots=True, eq=False)
class ParallelLayer(Layer):
    """x + mixer(norm(x)) + mlp(norm(x)), with one norm: Cohere."""

    norm: Norm
    mixer: LayerMixer
    mlp: FeedForward

    def __call__(self, x: mx.array, normed: mx.array | None, step: Step) -> Passed:
        """x (T, hidden) -> (T, hidden)."""
        normed = self.norm(x)
        x = self.mixer(normed, step, step.narrow(x) if step.narrows else x)
        return self.mlp(step.read(normed), x), None


class Model:
    """A decoder-only language model over a flat list of tokens.

    Args:
        embed_tokens, layers, norm, lm_head: the parts, in the order of a forward pass. Without an
            `lm_head` the model has no logits.
        activation_dtype: of hidden states, keys and values.
        embed_scale: multiplies the embeddings; None: 1.
        entry: what comes between embeddings and layers; None: nothing does.
        adapter_targets: projections that adapters may change.

    Attributes:
        adapted: projections that have adapters, by index of their targets.
        mixers: those that keep something, in the order of the layers; most layers have one.
        cache_specs: what the cache of each of them must keep.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        embed_tokens: Embedding,
        layers: Sequence[Layer],
        norm: Norm,
        lm_head: Projection | None,
        activation_dtype: mx.Dtype,
        embed_scale: float | None = None,
        entry: Entry | None = None,
        adapter_targets: Sequence[AdapterTarget] = (),
    ) -> None:
        self.config = config
        self.adapter_targets = list(adapter_targets)
        self.active_adapters = ActiveAdapters()
        self.adapted: dict[int, Adapted] = {}
        self.entry = entry
        self.embed_tokens = embed_tokens
        self.layers = list(layers)
        self.norm = norm
        self.lm_head = lm_head
        link_norms(self.layers, norm)
        self.activation_dtype = activation_dtype
        self.lacks: Mapping[str, str] = {}
        self.tower: Tower | None = None
        self.rope_axes = max([spec.num_axes for spec in config.ropes if spec], default=1)
        self.expert_store: ExpertStore | None = None  # where experts stay in their files
        self.link: Link | None = None  # to ranks that have the other parts of each layer
        self.mixers: list[Mixer] = [mixer for layer in self.layers for mixer in layer.mixers]
        self.cache_specs: list[CacheSpec] = [mixer.spec for mixer in self.mixers]
        stores = [index for index, layer in enumerate(self.layers) if layer.mixers]
        self.last_to_store = stores[-1] if stores else -1  # index of a layer
        self._long_ropes = {rope for rope in config.ropes if rope and rope.long}
        self._embed_scale = None if embed_scale is None else mx.array(embed_scale, activation_dtype)

    def __call__(self, ids: mx.array, step: Step) -> mx.array:
        """One step over T tokens of any sequences.

        Args:
            ids: (T,) int32, each in [0, vocab_size): MLX does not check.
            step: where the tokens stand, and the cache of each of `mixers`.

        Returns:
            (T, hidden_size) after the final norm; (R, hidden_size) where the step was narrowed.
        """
        self.begin_adapters(step.adapters, step.read_rows)
        taps = step.taps
        x, normed = self.enter(ids, step), None
        for index, layer in enumerate(self.layers):
            if index == self.last_to_store and step.read_rows is not None:
                step.begin_last_to_store(index)
            x, normed = layer(x, normed, step)
            if taps is not None or step.features is not None:
                x, normed = self.after_layer(index, x, normed, step)
        x = self.norm(x) if normed is None else normed
        if taps is not None:
            taps.put(FINAL, x)
        return x

    def after_layer(self, index: int, x: mx.array, normed: mx.array | None, step: Step) -> Passed:
        """The output of layer `index`, plus features of pictures; the output goes to the taps."""
        features = step.features
        if features is not None and index < len(features.deep):
            added = features.deep[index].astype(x.dtype)
            x, normed = x.at[features.rows].add(added), None
        if step.taps is not None:
            step.taps.put(index, x)
        return x, normed

    def enter(self, ids: mx.array, step: Step) -> mx.array:
        """Token ids (T,) -> what the first layer reads, (T, hidden_size)."""
        x = self.embed(ids)
        if step.features is not None:
            x[step.features.rows] = step.features.vectors.astype(x.dtype)
        return x if self.entry is None else self.entry(ids, x, step)

    def embed(self, ids: mx.array) -> mx.array:
        """Token ids (T,) -> (T, hidden_size)."""
        x = self.embed_tokens(ids)
        return x if self._embed_scale is None else x * self._embed_scale

    def logits(self, hidden: mx.array, adapters: Rows | None = None) -> mx.array:
        """hidden (R, hidden_size) as `__call__` returns it -> (R, vocab_size).

        `adapters`: (R,) of each row's sequence; None: none for all.
        """
        assert self.lm_head is not None, "a model without logits"
        self.begin_adapters(adapters)
        return scaled_logits(self.lm_head(hidden), self.config)

    def begin_adapters(self, adapters: Rows | None, read_rows: Rows | None = None) -> None:
        """Set the adapter of each row (T,), for layers that get all of them or `read_rows` (R,)."""
        if self.active_adapters.last_number:  # else the model never had one
            self.active_adapters.begin(adapters, read_rows)

    def rope_variant(self, max_tokens: int) -> int:
        """Which frequencies a sequence uses that may grow to `max_tokens`; 0 for most models.

        All keys of a sequence must have one variant, so it is chosen once, when the sequence
        begins. Keys of two variants are never shared.
        """
        return max([spec.variant(max_tokens) for spec in self._long_ropes], default=0)

    def kernels(self) -> list[KernelUse]:
        """The kernels for the layers; those of attention belong to the cache."""
        config = self.config
        form = ModelForm(self.activation_dtype, config.num_experts, config.quantization is not None)
        return kernels_of(form, *self.layers)

    def arrays(self) -> list[mx.array]:
        """Every array that the model holds; a tied table once."""
        head = None if self.config.tie_word_embeddings else self.lm_head
        tower = [] if self.tower is None else self.tower.arrays()
        parts = [self.embed_tokens, self.entry, self.layers, self.norm, head, tower]
        return list(arrays(parts))

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


def link_norms(layers: Sequence[Layer], last: Norm) -> None:
    """Tell each layer the norm that reads its output: the next one's first, or the last of all."""
    norms = [*[layer.first_norm for layer in layers], last][1:]  # none for no layers
    for layer, norm in zip(layers, norms, strict=True):
        if norm is not None:
            layer.pass_on(norm)


def scaled_logits(logits: mx.array, config: ModelConfig) -> mx.array:
    if config.logit_scale is not None:
        logits = logits * config.logit_scale
    cap = config.final_softcap
    return logits if cap is None else mx.tanh(logits / cap) * cap
