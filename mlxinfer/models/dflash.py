"""DFlash block drafts: a small network that proposes a block of tokens in one pass.

The rows of a block are the newest token and masks behind it. They see each other and all earlier
tokens. Each layer of the draft makes keys and values of the earlier tokens from the outputs of some
of the model's layers. Row i of the block gives the token at its own place. Embeddings and output
projection are the model's. Sources: z-lab/dflash, `dflash/model_mlx.py` (arXiv 2602.06036); SGLang,
`models/dflash.py`; transformers 5.24, `muse_glimmer_assistant`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..cache_specs import CacheSpec, KVSpec
from ..errors import CheckpointError, UnsupportedModelError
from ..layers.linear import Projection
from ..layers.mlp import FeedForward
from ..layers.norm import Norm
from ..layers.step import Rope
from .config import ModelConfig, normalise
from .decoder import Model
from .families.qwen import Qwen3
from .jsonfields import Fields, read_json
from .language import arrays
from .predictor import checked_taps, weights_beside

KeysValues = tuple[mx.array, mx.array]  # (kv_heads, S, head_dim) each
_OF_ASSISTANT: dict[str, Any] = {  # of Muse Glimmer: what its config may leave out
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "max_window_layers": 0,
    "is_causal": False,
    "mask_token_id": 201_818,
    "target_layer_ids": [1, 13, 25, 37, 49],
}
_ENCODER = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


@dataclass(slots=True, eq=False, kw_only=True)
class DraftLayer:
    """One pre-norm layer with attention that reads a context beside the block."""

    input_norm: Norm
    q_proj: Projection
    kv_proj: Projection
    o_proj: Projection
    q_norm: Norm
    k_norm: Norm
    rope: Rope
    mlp_norm: Norm
    mlp: FeedForward
    sizes: tuple[int, int, int]  # query heads, heads of keys and of values, numbers of a head
    window: int | None  # tokens that a row sees, itself included; None: all
    causal: bool  # whether a row sees no later one of its block

    def keys_values(self, x: mx.array, positions: mx.array) -> KeysValues:
        """Keys and values of rows x (n, hidden) at positions (n,)."""
        _, kv_heads, dim = self.sizes
        kv = self.kv_proj(x).reshape(-1, 2 * kv_heads, dim)  # (n, 2 Hkv, D)
        keys = self.k_norm(kv[:, :kv_heads])
        keys = self.rope(keys, self.rope.prepare(positions))
        return keys.transpose(1, 0, 2), kv[:, kv_heads:].transpose(1, 0, 2)

    def __call__(
        self, x: mx.array, positions: mx.array, contexts: Sequence[KeysValues]
    ) -> mx.array:
        """Blocks x (B * L, hidden), one after the other, each with its context -> the same."""
        heads, _, dim = self.sizes
        count, normed = len(contexts), self.input_norm(x)
        queries = self.q_norm(self.q_proj(normed).reshape(-1, heads, dim))
        queries = self.rope(queries, self.rope.prepare(positions)).transpose(1, 0, 2)  # (H, T, D)
        keys, values = self.keys_values(normed, positions)
        blocks = zip(
            contexts,
            *(mx.split(array, count, axis=1) for array in (queries, keys, values)),
            strict=True,
        )
        outputs = []
        for (past_keys, past_values), q, k, v in blocks:
            k, v = mx.concatenate([past_keys, k], 1), mx.concatenate([past_values, v], 1)
            attended = mx.fast.scaled_dot_product_attention(
                q[None],
                k[None],
                v[None],
                scale=dim**-0.5,
                mask=self._mask(past_keys.shape[1], q.shape[1]),
            )
            outputs.append(attended[0].transpose(1, 0, 2).flatten(1))
        x = x + self.o_proj(mx.concatenate(outputs))
        return self.mlp(self.mlp_norm(x), x)

    def _mask(self, past: int, length: int) -> mx.array | None:
        """Mask (L, S + L) of the rows that each row sees; None: each sees all."""
        if self.window is None and not self.causal:
            return None
        query = past + mx.arange(length)[:, None]
        key = mx.arange(past + length)[None]
        seen = key <= query if self.causal else key >= 0
        return seen if self.window is None else seen & ((query - key < self.window) | (key >= past))


class BlockDraft:
    """The draft network.

    Args:
        fc, hidden_norm: project the outputs of these layers (n, taps * hidden) to (n, hidden).
        block_size: rows of a block, the newest token included.
        mask_token_id: stands where a token is to be proposed.
    """

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        *,
        taps: Sequence[int],
        fc: Projection,
        hidden_norm: Norm,
        layers: Sequence[DraftLayer],
        norm: Norm,
        block_size: int,
        mask_token_id: int,
    ) -> None:
        self.config = config
        self.taps = tuple(taps)
        self.layers = list(layers)
        self.norm = norm
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.activation_dtype = model.activation_dtype
        self.cache_specs: list[CacheSpec] = [
            KVSpec(layer.sizes[1], layer.sizes[2], layer.sizes[2], layer.window)
            for layer in self.layers
        ]
        self._fc = fc
        self._hidden_norm = hidden_norm
        self._embed = model.embed
        self._logits = model.logits
        self._shared_bytes = sum(array.nbytes for array in arrays(model.lm_head))

    def context(self, tapped: mx.array, start: int) -> list[KeysValues]:
        """Keys and values of each layer for positions from `start` on.

        Args:
            tapped: (n, taps * hidden) outputs of the model's layers there.
        """
        hidden = self._hidden_norm(self._fc(tapped))
        positions = mx.arange(start, start + tapped.shape[0])
        return [layer.keys_values(hidden, positions) for layer in self.layers]

    def propose(
        self,
        newest: Sequence[int],
        places: Sequence[int],
        contexts: Sequence[list[KeysValues]],
        count: int,
    ) -> mx.array:
        """(B, count) the likeliest tokens after the newest one of each sequence.

        Args:
            newest: (B,) its newest token.
            places: (B,) the position of that token.
            contexts: (B,) of all positions before it that are known, by layer.
            count: less than `block_size`.
        """
        length = 1 + count
        masks = [self.mask_token_id] * (length - 1)
        ids = mx.array([[token_id, *masks] for token_id in newest]).flatten()
        positions = (mx.array(list(places))[:, None] + mx.arange(length)[None]).flatten()
        x = self._embed(ids)
        for index, layer in enumerate(self.layers):
            x = layer(x, positions, [context[index] for context in contexts])
        x = x.reshape(len(newest), length, -1)[:, 1:].flatten(0, 1)
        logits = self._logits(self.norm(x))
        return mx.argmax(logits, axis=-1).reshape(len(newest), count)

    def arrays(self) -> list[mx.array]:
        return list(arrays([self.layers, self.norm, self._fc, self._hidden_norm]))

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    @property
    def bytes_read(self) -> int:
        """Bytes of weights that a block reads: the draft's, and the shared output projection."""
        return self.num_bytes + self._shared_bytes


def load_dflash(folder: Path, model: Model) -> BlockDraft:
    """The draft in a checkpoint folder, evaluated and ready."""
    raw = _spelled_out(read_json(folder / "config.json", infinite=True), model)
    fields = Fields(raw, "config.json")
    stated = fields.fields("dflash_config") or fields
    for name in ("conv_kernel_size", "selector_rank"):
        if stated.integer(name, low=0, default=0):
            raise UnsupportedModelError(
                f"{name} in {stated.where}: drafts of DFlash 2 are not supported; DFlash 1 is."
            )
    config = normalise({**raw, "model_type": "qwen3"})
    layers = [int(index) for index in stated.items("target_layer_ids") or ()]
    taps = checked_taps("draft", layers, model.config.num_layers)
    if config.hidden_size != model.config.hidden_size:
        raise CheckpointError(
            f"The draft's hidden size is {config.hidden_size}; the model's, of "
            f"which it uses the embeddings, is {model.config.hidden_size}."
        )
    weights = weights_beside(model, folder, _rename, config.quantization)
    stated_causal = "is_causal" in raw and raw["is_causal"] is not None
    causal = fields.boolean("is_causal") if stated_causal else None
    builder = _Builder(config, weights)
    draft = BlockDraft(
        model,
        config,
        taps=taps,
        fc=weights.linear("fc", config.hidden_size, len(taps) * config.hidden_size),
        hidden_norm=builder.norm("hidden_norm"),
        layers=[builder.block_layer(index, causal) for index in range(config.num_layers)],
        norm=builder.norm("norm"),
        block_size=_block_size(stated, fields),
        mask_token_id=stated.integer("mask_token_id", low=0, high=model.config.vocab_size - 1),
    )
    weights.finish()
    weights.evaluate(draft.arrays())
    return draft


def _spelled_out(raw: dict[str, Any], model: Model) -> dict[str, Any]:
    """A config with what Muse Glimmer's assistant takes for granted; others are complete."""
    if raw.get("model_type") != "muse_glimmer_assistant":
        return raw
    stated = {key: value for key, value in raw.items() if value is not None}
    return _OF_ASSISTANT | {"vocab_size": model.config.vocab_size} | stated


def _rename(name: str) -> str:
    for theirs, ours in _ENCODER.items():
        name = name.replace(theirs, ours)
    return f"model.{name}" if name.startswith("layers.") else name


def _block_size(stated: Fields, fields: Fields) -> int:
    inner = stated.integer("block_size", low=2, high=64, default=None)
    return inner or fields.integer("block_size", low=2, high=64, default=16)


class _Builder(Qwen3):
    """Makes the layers: Qwen 3's, with Q apart from K and V."""

    def block_layer(self, index: int, causal: bool | None) -> DraftLayer:
        """Layer `index`. Windows go with causality unless the config says otherwise."""
        config, weights = self.config, self.weights
        path, hidden, dim = f"model.layers.{index}", config.hidden_size, config.head_dim
        window, rope = config.windows[index], config.ropes[index]
        assert rope is not None
        attention = f"{path}.self_attn"
        return DraftLayer(
            input_norm=self.norm(f"{path}.input_layernorm"),
            q_proj=weights.linear(
                f"{attention}.q_proj", config.num_heads * dim, hidden, bias=config.qkv_bias
            ),
            kv_proj=weights.fused(
                [f"{attention}.k_proj", f"{attention}.v_proj"],
                [config.num_kv_heads * dim] * 2,
                hidden,
                bias=config.qkv_bias,
            ),
            o_proj=self.attention_output(f"{attention}.o_proj", config.num_heads * dim),
            q_norm=self.norm(f"{attention}.q_norm", dim),
            k_norm=self.norm(f"{attention}.k_norm", dim),
            rope=self.rope(rope, dim),
            mlp_norm=self.norm(f"{path}.post_attention_layernorm"),
            mlp=self.mlp(index),
            sizes=(config.num_heads, config.num_kv_heads, dim),
            window=window,
            causal=window is not None if causal is None else causal,
        )
