"""Qwen4-Exp (Qwen 3.8 Flash Next): Qwen 3.5's blocks between several residual streams.

An index chooses the blocks of tokens that attention sees, and n-grams of tokens add rows of a table
that stays in its files.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import mlx.core as mx
import numpy as np

from ...cache_specs import PooledSpec, StateSpec
from ...errors import CheckpointError, UnsupportedModelError
from ...layers.attention import AttentionArgs
from ...layers.hyper_connections import GatedConnection, StreamLayer, StreamMixture, Streams
from ...layers.ngrams import CausalFilter, NgramHash, NgramLayer, TokenWindow
from ...layers.norm import Norm, RMSNorm
from ...layers.pooled_index import MeanIndexer
from ...layers.recurrent import CausalConv
from ...layers.step import Layer
from ..config import ModelConfig
from ..decoder import Entry
from ..family import MTPForm
from ..jsonfields import Fields
from ..stage import BetweenStages
from ..weights.weights import Weights
from .qwen_hybrid import Qwen3_5MoE
from .recurrent import causal_conv

_INDEXED = {"indexed_attention": "full_attention"}
_TABLE = "ple.ple_embedding.ngram_embedding"


class Qwen4Exp(Qwen3_5MoE):
    """Hyper-connections in place of norms, an index over blocks, and layers with n-grams."""

    defaults: ClassVar = Qwen3_5MoE.defaults | {
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "hc_count": 4,
        "hc_lowrank": 320,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
    }

    final_norm = "model.hyper_connection_mixer"
    mtp = MTPForm(norm_offset=1.0, before_norm=True)  # it reads all streams

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        fields = super().language_model(config)
        kinds = [_INDEXED.get(kind, kind) for kind in fields.items("layer_types") or ()]
        return Fields({**fields.values, **({"layer_types": kinds} if kinds else {})}, fields.where)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        config, fields = super().configure(config), config.fields
        spec = _index_spec(config)
        indexes = tuple(spec if state is None else None for state in config.states)
        fields.require({"output_gate_type": ["sigmoid", "silu"]})
        for index in _ngram_layers(fields):
            if not 0 <= index < config.num_layers:
                raise CheckpointError(
                    f"ple_layer_ids in {fields.where} must be layers from 1 to {config.num_layers}."
                )
        return replace(config, extra_specs=indexes)

    @classmethod
    def between_stages(cls, config: ModelConfig) -> BetweenStages:
        """All streams. Layers with n-grams need token ids, which only the first stage has."""
        last = max(_ngram_layers(config.fields), default=0)
        width = config.fields.integer("hc_count") * config.hidden_size
        return BetweenStages((width,), bound=frozenset(range(1, last + 1)))

    @classmethod
    def rename(cls, name: str) -> str | None:
        return super().rename(name.replace("ngram_embedding.shards.", "ngram_embedding.shard_"))

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.sigmoid_gates = config.fields.get("output_gate_type") == "sigmoid"

    def _of_mlx(self) -> bool:
        """Never: MLX checkpoints of this family store norm weights less one, too."""
        return False

    # -- the decoder ----------------------------------------------------------------------------

    @property
    def num_streams(self) -> int:
        return self.config.fields.integer("hc_count", low=2, high=64)

    def entry(self) -> Entry:
        return Streams(self.num_streams)

    def last_norm(self) -> Norm:
        return self._mixture(self.final_norm)

    def mtp_norm(self, path: str) -> Norm:
        self.weights.drop(f"{path}.hyper_connection_mixer.block_inject_weight.weight")
        return self._mixture(f"{path}.hyper_connection_mixer")

    def layer(self, index: int) -> Layer:
        """Connections around both blocks; the norms are theirs."""
        path = f"model.layers.{index}"
        to_mixer, to_mlp = (
            GatedConnection(
                self._mixture(f"{path}.{name}_hyper_connection"),
                self.weights.linear(
                    f"{path}.{name}_hyper_connection.block_inject_weight",
                    self.num_streams,
                    self.num_streams * self.config.hidden_size,
                ),
            )
            for name in ("attn", "mlp")
        )
        of_ngrams = self.config.first_layer + index in _ngram_layers(self.config.fields)
        ngrams = self._ngrams(index) if of_ngrams else None
        return StreamLayer((to_mixer, to_mlp), self.mixer(index), self.mlp(index), ngrams)

    def attention_args(self, index: int) -> AttentionArgs:
        return replace(super().attention_args(index), indexer=self._indexer(index))

    def _indexer(self, index: int) -> MeanIndexer | None:
        spec = self.config.extra_specs[index]
        if not isinstance(spec, PooledSpec):
            return None
        path, rope = f"model.layers.{index}.self_attn.indexer", self.config.ropes[index]
        heads = self.config.fields.integer("indexer_n_heads", high=2**10)
        assert rope is not None, "positions are always encoded"
        sizes, hidden = [heads * spec.dim, spec.dim], self.config.hidden_size
        parts = [f"{path}.index_{part}_proj" for part in "qk"]  # apart, as llama.cpp has them
        apart = f"{parts[0]}.weight" in self.weights
        return MeanIndexer(
            qk_proj=self.weights.fused(parts, sizes, hidden)
            if apart
            else self.weights.linear(f"{path}.index_qk_proj", sum(sizes), hidden),
            q_norm=self.norm(f"{path}.q_layernorm", spec.dim),
            k_norm=self.norm(f"{path}.k_layernorm", spec.dim),
            num_heads=heads,
            spec=spec,
            rope=self.rope(rope, spec.dim),
        )

    def _by_stream(self, path: str) -> Norm:
        shape = self.num_streams, self.config.hidden_size
        weight = self.weights.take(f"{path}.weight", (shape[0] * shape[1],), offset=1.0)
        return RMSNorm(weight.reshape(shape), self.config.rms_norm_eps)

    def _mixture(self, path: str) -> StreamMixture:
        rank = self.config.fields.integer("hc_lowrank", high=2**20)
        width = self.num_streams * self.config.hidden_size
        return StreamMixture(
            self._by_stream(f"{path}.hc_norm"),
            self.weights.linear(f"{path}.input_mix_weight_down", rank, width),
            self.weights.linear(f"{path}.input_mix_weight_up", width, rank),
            self.num_streams,
        )

    # -- n-grams --------------------------------------------------------------------------------

    def _ngrams(self, index: int) -> NgramLayer:
        config, fields, weights = self.config, self.config.fields, self.weights
        path, hidden = f"model.layers.{index}.ple", config.hidden_size
        longest, per_length = fields.integer("ngram_size", low=2, high=16), self._rows_of_ngram()
        width = fields.integer("ple_embed_dim", high=2**20, default=hidden)
        parts = self._table_parts(index)
        table = weights.rows_in_files(parts, width // (per_length * (longest - 1)))
        channels = self.num_streams * hidden
        taps = fields.integer("ple_conv_kernel_size", low=2, high=64)
        conv = causal_conv(
            self, f"{path}.conv1d", StateSpec((((taps - 1, channels), "float32"),))
        ).weight
        spread = mx.zeros((channels, taps - 1, longest, 1), conv.dtype)  # zeros between the taps
        spread[:, :, 0] = conv[:, :-1]
        dilated = mx.concatenate([spread.flatten(1, 2), conv[:, -1:]], axis=1)
        return NgramLayer(
            window=TokenWindow(StateSpec((((longest - 1,), "int32"),))),
            hashing=self._hashing(f"{path}.ple_embedding", longest, per_length, table.num_rows),
            table=table,
            key_proj=weights.linear(f"{path}.key_proj", channels, width),
            value_proj=weights.linear(f"{path}.value_proj", hidden, width),
            norms=[self._by_stream(f"{path}.norm_{name}") for name in ("key", "query", "conv")],
            conv=CausalFilter(
                CausalConv(dilated), StateSpec(((((taps - 1) * longest, channels), "float32"),))
            ),
        )

    def _rows_of_ngram(self) -> int:
        return self.config.fields.integer("heads_per_ngram", high=2**10)

    def _table_parts(self, index: int) -> Sequence[str]:
        path, count = f"model.layers.{index}.{_TABLE}", 0
        while f"{path}.shard_{count}.weight" in self.weights:
            count += 1
        return [f"{path}.shard_{i}" for i in range(count)] or [path]

    def _hashing(self, path: str, longest: int, per_length: int, num_rows: int) -> NgramHash:
        """How ids become rows: the checkpoint says, since a config may leave out what it needs."""
        count = per_length * (longest - 1)
        names = {"layer_multipliers": longest}
        names |= {"ngram_heads_vocab_sizes": count, "ngram_heads_offsets": count}
        multipliers, sizes, offsets = (
            np.array(self.weights.raw(f"{path}.{name}", (length,)).astype(mx.int64))
            for name, length in names.items()
        )
        if int((offsets + sizes).max()) > num_rows:
            raise CheckpointError(
                f"{path} has a table of {num_rows} rows; its offsets and sizes need "
                f"{int((offsets + sizes).max())}."
            )
        shape = longest - 1, per_length
        stated = self.config.fields.get("eos_token_id")
        end = Fields({"eos_token_id": stated[0] if isinstance(stated, list) else stated}, path)
        return NgramHash(
            multipliers,
            sizes.reshape(shape),
            offsets.reshape(shape),
            end.integer("eos_token_id", low=0),
        )


def _ngram_layers(fields: Fields) -> list[int]:
    """Layers with n-grams; the config counts them from 1."""
    return [int(number) - 1 for number in fields.items("ple_layer_ids") or ()]


def _index_spec(config: ModelConfig) -> PooledSpec | None:
    """The spec of a layer's index; None: attention sees all tokens."""
    fields = config.fields
    if fields.get("indexer_head_dim") is None:
        return None
    dim = fields.integer("indexer_head_dim", high=2**14)
    ratio = fields.integer("indexer_compress_ratio", high=2**10)
    budget = fields.integer("indexer_budget", low=ratio, high=2**30)
    rope = next(spec for spec in config.ropes if spec is not None)
    if fields.integer("indexer_kv_heads") != 1 or budget % ratio or dim < rope.dims:
        raise CheckpointError(
            f"{fields.where} has indexer_kv_heads {fields.get('indexer_kv_heads')}, indexer_budget "
            f"{budget}, indexer_compress_ratio {ratio} and indexer_head_dim {dim}; expected one "
            f"head, a budget of whole blocks and at least {rope.dims} numbers."
        )
    if dim % ratio:
        raise UnsupportedModelError(
            f"indexer_head_dim is {dim}; pages need a multiple of indexer_compress_ratio, {ratio}."
        )
    return PooledSpec(dim, dim, ratio, budget // ratio, rope.num_axes)
