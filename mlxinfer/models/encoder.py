"""Encoders: every token of a text sees all of it, and the result is hidden states.

They are families like decoders, over the same mixers. They have layer norms with biases, norms
behind each block, and tables of positions and of token types beside that of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import mlx.core as mx

from ..layers.linear import Embedding
from ..layers.mlp import MLP, plain
from ..layers.norm import LayerNorm, Norm
from ..layers.rope import RopeSpec
from ..layers.step import Layer, Passed, Step
from .config import ModelConfig
from .family import Family
from .jsonfields import Fields


@dataclass(slots=True, eq=False)
class NormedSumLayer(Layer):
    """norm(x + mixer(x)), then norm(x + mlp(x)): the first Transformer, BERT and its kin."""

    mixer_norm: Norm
    mlp_norm: Norm
    mixer: Any
    mlp: Any

    def __call__(self, x: mx.array, normed: mx.array | None, step: Step) -> Passed:
        """x (T, hidden) -> (T, hidden)."""
        x = self.mixer_norm(self.mixer(x, step, x))
        return self.mlp_norm(self.mlp(x, x)), None


class SummedEmbeddings:
    """norm(token + position + token type), of those that have tables.

    Args:
        positions: (max_positions, hidden), or None.
        first: row of a text's first token.
        token_types: (types, hidden), or None.
        num_types: rows of that table.

    Attributes:
        num_read_types: types that tokens may be of. 0: the table has one row at most (RoBERTa), and
            every token is of type 0, whatever the tokenizer says of pairs.
    """

    __slots__ = ("first", "norm", "num_read_types", "positions", "token_types")

    def __init__(
        self,
        norm: Norm,
        *,
        positions: Embedding | None = None,
        first: int = 0,
        token_types: Embedding | None = None,
        num_types: int = 0,
    ) -> None:
        self.norm = norm
        self.positions = positions
        self.first = first
        self.token_types = token_types
        self.num_read_types = num_types if num_types > 1 else 0

    def __call__(self, ids: mx.array, x: mx.array, step: Step) -> mx.array:
        """Token ids (T,) and their rows (T, hidden) -> (T, hidden)."""
        if self.positions is not None:
            x = x + self.positions(step.positions + self.first)
        if self.token_types is not None:
            types = step.token_types if self.num_read_types else None
            x = x + self.token_types(mx.zeros((1,), mx.int32) if types is None else types)
        return self.norm(x)


def identity(x: mx.array) -> mx.array:
    """The norm of models that have none there."""
    return x


class Encoder(Family):
    """The parts that all encoders share.

    Attributes:
        prefixes: of the hub's names, which say nothing.
        left_out: beginnings of names that carry nothing here: heads of other tasks.
        rotary: positions rotate heads; else they have a table.
    """

    prefixes: ClassVar[Sequence[str]] = ()
    left_out: ClassVar[Sequence[str]] = ("pooler.", "cls.", "lm_head.", "classifier.", "head.")
    rotary: ClassVar[bool] = False
    computed = ("use_bidirectional_attention",)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        eps = config.fields.number("layer_norm_eps", low=0.0, high=1.0, default=1e-12)
        return replace(
            config,
            rms_norm_eps=eps,
            bidirectional=True,
            without_lm_head=True,
            tie_word_embeddings=False,
        )

    @classmethod
    def whole_because(cls, config: ModelConfig) -> str:
        return "it gives vectors, and layers run one by one to compare logits"

    @classmethod
    def rope_spec(cls, fields: Fields, layer_type: str, head_dim: int) -> RopeSpec | None:
        return super().rope_spec(fields, layer_type, head_dim) if cls.rotary else None

    @classmethod
    def tensor_name(cls, name: str) -> str | None:
        """The decoder's name of a tensor of the hub; a name that is that already stays."""
        for prefix in cls.prefixes:
            name = name.removeprefix(prefix)
        if name.startswith(tuple(cls.left_out)) or name.endswith(".position_ids"):
            return None
        for theirs, ours in cls.names.items():
            name = name.replace(theirs, ours)
        return name if name.startswith("model.") else f"model.{name}"

    # -- parts ----------------------------------------------------------------------------------

    def norm(self, path: str, dims: int | None = None, eps: float | None = None) -> Norm:
        width = (self.config.hidden_size if dims is None else dims,)
        has_bias = f"{path}.bias" in self.weights
        bias = self.weights.take(f"{path}.bias", width) if has_bias else None
        weight = self.weights.take(f"{path}.weight", width)
        return LayerNorm(weight, self.config.rms_norm_eps if eps is None else eps, bias)

    def entry(self) -> SummedEmbeddings:
        """Tables beside that of tokens, as large as the config says: no token reads behind one."""
        num_types = self.config.fields.integer("type_vocab_size", low=0, high=2**16, default=0)
        positions = 0 if self.rotary else self.first_position + self.config.max_context
        return SummedEmbeddings(
            self.norm("model.embeddings_norm"),
            positions=self._table("model.position_embeddings", positions),
            first=self.first_position,
            num_types=num_types,
            token_types=self._table("model.token_type_embeddings", num_types),
        )

    @property
    def first_position(self) -> int:
        """Row of the table of positions that a text's first token takes."""
        return 0

    def _table(self, path: str, rows: int) -> Embedding | None:
        """The table at `path`, (rows, hidden); None for one without rows."""
        if not rows:
            return None
        return self.weights.embedding(path, (rows, self.config.hidden_size))

    def layer(self, index: int) -> Layer:
        path = f"model.layers.{index}"
        return NormedSumLayer(
            self.norm(f"{path}.post_attention_layernorm"),
            self.norm(f"{path}.post_mlp_layernorm"),
            self.mixer(index),
            self.mlp(index),
        )

    def last_norm(self) -> Norm:
        return identity

    def ungated_mlp(self, path: str) -> MLP:
        """The up and down projections at `path`, with biases."""
        inner, hidden = self.config.intermediate_size, self.config.hidden_size
        return MLP(
            self.weights.linear(f"{path}.up_proj", inner, hidden, bias=True),
            self.weights.linear(f"{path}.down_proj", hidden, inner, bias=True),
            plain(self.config.activation),
        )
