"""What the engine and `mlxinfer show` need to know of a model of mlx-lm's."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...core import CacheSpec, KVSpec
from ..config import eos_token_ids
from ..jsonfields import Fields
from ..quantization import Quantization, read_quantization

# Spellings of one thing; the first that is stated counts.
CONTEXT = (
    *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"),
    *("model_max_length", "seq_length", "block_size", "context_length", "max_context_length"),
)
WIDTH = ("hidden_size", "d_model", "n_embd", "hidden_dim", "model_dim", "dim")
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers")
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk")
# Projections that give keys, alone or with others.
KEY_BIAS = re.compile(
    r"(^|[._])(k|kv|qkv|wqkv|c_attn|query_key_value|key|wk)(_proj|_lin)?(\.linear)?\.bias$", re.I
)
NO_ADAPTERS = "it is mlx-lm's definition: its projections take no adapters here"
UNSTATED_CONTEXT = 1 << 20  # tokens; recurrent models state none, and have none


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooConfig:
    """As `ModelConfig`, of a model that mlx-lm defines.

    Attributes:
        alone_because: why it runs one sequence after another; None: it runs batched.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_experts: int
    experts_per_token: int
    tie_word_embeddings: bool
    max_context: int  # tokens
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None
    qkv_bias: bool
    cache_specs: tuple[CacheSpec, ...]
    alone_because: str | None

    @property
    def definition(self) -> str:
        """Not a family of this library."""
        return "mlx-lm"

    def cache_spec(self, index: int) -> CacheSpec:
        """What is kept, by place among those that keep something."""
        return self.cache_specs[index]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that each of them sees; None: all."""
        return tuple(s.window if isinstance(s, KVSpec) else None for s in self.cache_specs)


def read_config(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any],
    *,
    parameters: Iterable[str],
    vocab_size: int,
    cache_specs: Iterable[CacheSpec],
    alone_because: str | None,
) -> ZooConfig:
    """Read what is not learnt from the definition.

    Args:
        raw: the contents of config.json.
        generation: the contents of generation_config.json.
        parameters: names of the definition's.
        vocab_size, cache_specs, alone_because: as learnt.

    Raises:
        CheckpointError: a value of the wrong type or out of its range.
    """
    top = Fields(raw, "config.json")
    inner = top.fields("text_config", "llm_config", "language_config") or top

    def stated(keys: tuple[str, ...], default: int) -> int:
        return inner.integer(*keys, low=0, default=None) or top.integer(
            *keys, low=0, default=default
        )

    return ZooConfig(
        model_type=top.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=stated(WIDTH, 0),
        num_layers=stated(LAYERS, 0),
        num_experts=stated(EXPERTS, 0),
        experts_per_token=stated(CHOSEN, 0),
        tie_word_embeddings=not any("lm_head" in name for name in parameters),
        max_context=min(stated(CONTEXT, UNSTATED_CONTEXT), 2**31 - 1),
        eos_token_ids=eos_token_ids(raw, inner, generation, vocab_size),
        quantization=read_quantization(top),
        qkv_bias=any(KEY_BIAS.search(name) for name in parameters),
        cache_specs=tuple(cache_specs),
        alone_because=alone_because,
    )
