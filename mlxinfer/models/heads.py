"""Heads that go on from a model's hidden states: MTP modules and EAGLE-3 drafts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import mlx.core as mx

from ..core import CacheSpec
from ..layers.attention import Mixer
from ..layers.linear import Projection
from ..layers.mlp import FeedForward
from ..layers.norm import Norm
from ..layers.step import Rows, Step
from .config import ModelConfig
from .decoder import Layer, Model, keeping
from .language import Replaceable, arrays


class Block(Protocol):
    """What a head computes of a token's embedding and of the hidden states before it."""

    @property
    def mixer(self) -> Mixer:
        """The attention of the block, which has the head's cache."""
        ...

    def __call__(self, embedded: mx.array, hidden: mx.array, step: Step) -> mx.array:
        """(T, hidden) each -> (T, hidden)."""
        ...


class JoinedBlock:
    """One projection of both, normed and side by side, then a decoder layer: MTP.

    DeepSeek-V3 technical report (arXiv 2412.19437, 2.2); vLLM, `deepseek_mtp.py` and
    `qwen3_next_mtp.py`.
    """

    __slots__ = ("embedding_norm", "hidden_norm", "layer", "mixer", "proj")

    def __init__(
        self, embedding_norm: Norm, hidden_norm: Norm, proj: Projection, layer: Layer
    ) -> None:
        self.embedding_norm = embedding_norm
        self.hidden_norm = hidden_norm
        self.proj = proj
        self.layer = layer
        (self.mixer,) = keeping(layer.mixer)

    def __call__(self, embedded: mx.array, hidden: mx.array, step: Step) -> mx.array:
        """(T, hidden) each -> (T, hidden)."""
        both = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        return self.layer(self.proj(mx.concatenate(both, axis=-1)), step)


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
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.normed_residual = normed_residual

    def __call__(self, embedded: mx.array, hidden: mx.array, step: Step) -> mx.array:
        """(T, hidden) each -> (T, hidden)."""
        normed = self.hidden_norm(hidden)
        both = mx.concatenate([self.embedding_norm(embedded), normed], axis=-1)
        x = self.mixer(both, step, normed if self.normed_residual else hidden)
        return self.mlp(self.mlp_norm(x), x)


class DraftHead:
    """A head with a cache of its own, run by a loop as a model is (`LanguageModel`).

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

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        *,
        taps: Sequence[int],
        block: Block,
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
        self.replaceable = Replaceable.of(block)
        self.activation_dtype = model.activation_dtype
        self.mixers = [block.mixer]
        self.cache_specs: list[CacheSpec] = [block.mixer.spec]
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
        """One for all: what the head proposes need not be exact."""
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
        """Of weights for one proposal: its own, and the output projection that it shares."""
        return self.num_bytes + self._shared_bytes
