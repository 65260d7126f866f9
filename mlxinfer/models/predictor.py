"""Predictors: networks that continue from a model's hidden states and guess its next tokens.

`mtp.py` and `eagle.py` read the two kinds from their checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Protocol

import mlx.core as mx

from ..cache_specs import CacheSpec
from ..errors import CheckpointError
from ..layers.attention import Mixer
from ..layers.linear import Projection
from ..layers.mlp import FeedForward
from ..layers.norm import Norm
from ..layers.step import Layer, Rows, Step
from ..metal_kernels.variants import KernelUse, ModelForm, kernels_of
from .config import ModelConfig
from .decoder import Model
from .language import arrays
from .quantization import Quantization
from .weights.source import Checkpoint
from .weights.tensors import FLOATS, load_tensors
from .weights.weights import Weights


class PredictorBlock(Protocol):
    """The network of a head: reads a token's embedding and the hidden states before the token."""

    @property
    def mixers(self) -> Sequence[Mixer]: ...

    def kernels(self, model: ModelForm) -> list[KernelUse]: ...

    def __call__(self, embedded: mx.array, hidden: mx.array, step: Step) -> mx.array:
        """(T, hidden) each -> (T, hidden)."""
        ...


@dataclass(slots=True, eq=False)
class JoinedBlock:
    """One projection of both, normed and side by side, then decoder layers, mostly one: MTP.

    DeepSeek-V3 technical report (arXiv 2412.19437, 2.2); vLLM, `deepseek_mtp.py` and
    `qwen3_next_mtp.py`.
    """

    embedding_norm: Norm
    hidden_norm: Norm
    proj: Projection
    layers: Sequence[Layer]

    @property
    def mixers(self) -> list[Mixer]:
        return [mixer for layer in self.layers for mixer in layer.mixers]

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return kernels_of(model, *self.layers)

    def __call__(self, embedded: mx.array, hidden: mx.array, step: Step) -> mx.array:
        """(T, hidden) each -> (T, hidden)."""
        halves = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        x, normed = self.proj(mx.concatenate(halves, axis=-1)), None
        for layer in self.layers:
            x, normed = layer(x, normed, step)
        return x


@dataclass(slots=True, eq=False)
class StreamBlock:
    """A projection of each residual stream, plus one of the embedding, then a layer: Qwen4-Exp.

    SGLang, `qwen4_exp_mtp.py`; vLLM, `qwen4_exp/nvidia/mtp.py`. n = streams.
    """

    embedding_norm: Norm  # over (T, hidden)
    hidden_norm: Norm  # over all streams (T, n * hidden) at once
    embedding_proj: Projection  # (n, hidden) to the same shape
    hidden_proj: Projection  # the same
    layer: Layer  # of streams

    @property
    def mixers(self) -> Sequence[Mixer]:
        return self.layer.mixers

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return self.layer.kernels(model)

    def __call__(self, embedded: mx.array, hidden: mx.array, step: Step) -> mx.array:
        """(T, hidden) and streams (T, n * hidden) -> streams."""
        streams = self.hidden_proj(self.hidden_norm(hidden).reshape(-1, embedded.shape[-1]))
        added = self.embedding_proj(self.embedding_norm(embedded))
        x = streams.reshape(len(embedded), -1, embedded.shape[-1]) + added[:, None]
        return self.layer(x.flatten(1), None, step)[0]


@dataclass(slots=True, eq=False)
class ConcatenatedBlock:
    """A decoder layer with attention that reads both, normed and side by side: EAGLE-3.

    Li et al., "EAGLE-3" (arXiv 2503.01840); vLLM, `llama_eagle3.py`.
    """

    embedding_norm: Norm
    hidden_norm: Norm
    mixer: Mixer
    mlp_norm: Norm
    mlp: FeedForward
    _: KW_ONLY
    normed_residual: bool  # whether the hidden states are added to attention's outputs normed

    @property
    def mixers(self) -> Sequence[Mixer]:
        return (self.mixer,)

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return kernels_of(model, self.mixer, self.mlp)

    def __call__(self, embedded: mx.array, hidden: mx.array, step: Step) -> mx.array:
        """(T, hidden) each -> (T, hidden)."""
        normed = self.hidden_norm(hidden)
        joined = mx.concatenate([self.embedding_norm(embedded), normed], axis=-1)
        x = self.mixer(joined, step, normed if self.normed_residual else hidden)
        return self.mlp(self.mlp_norm(x), x)


class Predictor:
    """A predictor with its own cache. A loop runs it like a model (`LanguageModel`).

    Position i of the predictor reads the model's hidden states at i and the token at i + 1; its
    logits are those of the token at i + 2. Further tokens follow from its own output in place of
    the model's hidden states, which is how a chain of proposals is drawn.

    Args:
        model: shares its embeddings, and its output projection where the predictor brings none.
        config: sizes of the predictor; `vocab_size` is the model's.
        taps: layers of the model that it reads, see `Taps`.
        enter: outputs of the model's layers (n, taps * hidden) -> (n, hidden); None: as they are.
        chains_normed: whether the chain goes on from what `norm` gives, else from what it reads.
        embed_tokens: ids (T,) -> (T, hidden).
        lm_head: (R, hidden) -> (R, vocab) logits of its own vocabulary; None: the model's.
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
        block: PredictorBlock,
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
        parts = [self.block, self.norm, self._enter, self._own_embed, self._lm_head]
        return list(arrays(parts))

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    @property
    def bytes_read(self) -> int:
        """Bytes of weights that a proposal reads: the predictor's, and the shared LM head."""
        return self.num_bytes + self._shared_bytes


def weights_beside(
    model: Model,
    folder: Path,
    rename: Callable[[str], str | None],
    quantization: Quantization | None,
) -> Weights:
    """The weights in a folder, for a predictor or a draft that computes in the model's dtype."""
    source = Checkpoint(load_tensors(folder), rename)
    return Weights(source, quantization=quantization, dtype=FLOATS[model.activation_dtype])


def checked_taps(what: str, layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers whose outputs a predictor or a draft reads."""
    if not layers or max(layers) >= num_layers or min(layers) < 0:
        raise CheckpointError(
            f"The {what} reads layers {list(layers)} of a model of {num_layers} layers: it is made "
            "for another model."
        )
    return tuple(layers)
