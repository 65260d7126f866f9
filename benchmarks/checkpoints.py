"""Random checkpoints, made where they are needed; speed does not depend on the values.

`python -m benchmarks.checkpoints FOLDER KIND BYTES TOKENIZER` makes a large one, of bfloat16
weights in shards, in a process of its own.
"""

import json
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np
from models.shapes import shapes

from mlxinfer import hub

SHARD_BYTES = 500_000_000
NOISE = 1 << 23  # different numbers; speed does not depend on them, so they come again and again


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """Sizes of a dense decoder with QK-norm (Qwen3), float32, untied."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context: int = 32_768

    @property
    def num_weights(self) -> int:
        """All parameters."""
        return sum(prod(shape) for shape in self.shapes().values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor by its name on the hub."""
        return dict(shapes(self.config()))

    def config(self) -> dict[str, object]:
        """config.json, as the hub spells it."""
        return {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_context,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "torch_dtype": "float32",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama(Dense):
    """A Llama: no norm of queries and keys."""

    def config(self) -> dict[str, object]:
        """Under Llama's names."""
        named = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        return {**Dense.config(self), **named}


@dataclass(frozen=True, slots=True, kw_only=True)
class Windowed(Dense):
    """A Mistral with layers that alternate: all positions, then a sliding window."""

    window: int

    def config(self) -> dict[str, object]:
        """With a type for every layer, as both engines read it."""
        kinds = ["full_attention", "sliding_attention"]
        return {
            **Dense.config(self),
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": self.window,
            "layer_types": [kinds[i % 2] for i in range(self.layers)],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Dense):
    """A Qwen3 with blocks that are mixtures of experts, `inner` wide each."""

    experts: int
    chosen: int  # of each token

    def config(self) -> dict[str, object]:
        """Every layer is a mixture."""
        return {
            **Dense.config(self),
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "moe_intermediate_size": self.inner,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


TWO_LAYERS = Dense(hidden=64, inner=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=1024)
LAPTOP = Dense(hidden=512, inner=1536, layers=16, heads=8, kv_heads=4, head_dim=64, vocab=4096)
SMALL = Dense(hidden=128, inner=384, layers=4, heads=4, kv_heads=2, head_dim=32, vocab=512)
MIDDLE = Dense(hidden=384, inner=1152, layers=8, heads=6, kv_heads=3, head_dim=64, vocab=2048)
FLEET = Dense(hidden=128, inner=384, layers=4, heads=2, kv_heads=1, head_dim=64, vocab=512)
WINDOWED = Windowed(
    hidden=128, inner=384, layers=4, heads=4, kv_heads=2, head_dim=32, vocab=512, window=64
)
TINY_WINDOWED = Windowed(
    hidden=32, inner=64, layers=2, heads=2, kv_heads=1, head_dim=16, vocab=512, window=64
)
# Of large checkpoints, which have as many layers as their bytes take.
DENSE = Dense(hidden=2048, inner=6144, layers=1, heads=16, kv_heads=8, head_dim=128, vocab=32_000)
MOE = Experts(**{**asdict(DENSE), "inner": 768}, experts=32, chosen=4)


def write_checkpoint(
    folder: Path, sizes: Dense, *, seed: int = 0, quantize: dict[str, int] | None = None
) -> Path:
    """Write config.json and model.safetensors; the same seed, the same weights.

    `quantize` ({"group_size", "bits"}): of the layers' matrices, as mlx-lm does; None: none is.
    """
    rng = np.random.default_rng(seed)
    arrays: dict[str, mx.array] = {}
    for name, shape in sizes.shapes().items():
        if len(shape) == 1:
            values = np.ones(shape, dtype=np.float32)
        else:
            values = rng.standard_normal(shape, dtype=np.float32) / np.sqrt(shape[-1])
        weights = [mx.array(values)]
        if quantize is not None and len(shape) == 2 and ".layers." in name:
            weights = [*mx.quantize(weights[0], quantize["group_size"], quantize["bits"])]
        named = [name, *(name.replace(".weight", end) for end in (".scales", ".biases"))]
        arrays |= dict(zip(named, weights, strict=False))
    folder.mkdir(parents=True, exist_ok=True)
    form = {} if quantize is None else {"quantization": quantize}
    (folder / "config.json").write_text(json.dumps({**sizes.config(), **form}))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
    return folder


def with_tokenizer(folder: Path, source: str = "demo") -> Path:
    """Copy a model's tokenizer to a checkpoint; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(hub.resolve(source) / name, folder / name)
    return folder


def write_served(folder: Path, sizes: Dense) -> Path:
    """A random checkpoint that speaks the demo model's tokens."""
    vocab = json.loads((hub.resolve("demo") / "config.json").read_text())["vocab_size"]
    return with_tokenizer(write_checkpoint(folder, replace(sizes, vocab=vocab)))


def random_prompt(length: int, vocab: int, seed: int) -> list[int]:
    """Token ids; no two seeds share a prefix worth caching."""
    ids: list[int] = np.random.default_rng((seed, length)).integers(3, vocab, length).tolist()
    return ids


def with_bytes(sizes: Dense, num_bytes: int) -> Dense:
    """The same sizes with as many layers as about `num_bytes` of bfloat16 weights take."""
    one, two = sizes.num_weights, replace(sizes, layers=2).num_weights
    layers = max(1, round((num_bytes / 2 - (2 * one - two)) / (two - one)))
    return replace(sizes, layers=layers)


def write_large(folder: Path, sizes: Dense) -> None:
    """Write bfloat16 weights in shards: the same numbers come again and again."""
    config = {**sizes.config(), "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    noise = np.random.default_rng(0).standard_normal(NOISE, dtype=np.float32) * 0.02
    _write_shards(folder, sizes.shapes(), mx.array(noise).astype(mx.bfloat16))


def _write_shards(folder: Path, shapes: dict[str, tuple[int, ...]], noise: mx.array) -> None:
    weight_map: dict[str, str] = {}
    pending: dict[str, mx.array] = {}
    for number, (name, shape) in enumerate(shapes.items(), start=1):
        size = prod(shape)
        repeated = mx.concatenate([noise] * -(-size // NOISE))
        pending[name] = repeated[:size].reshape(shape)
        if sum(a.nbytes for a in pending.values()) < SHARD_BYTES and number < len(shapes):
            continue
        file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        mx.save_safetensors(str(folder / file), pending, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(pending, file)
        pending = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


if __name__ == "__main__":
    target, kind, size, beside = sys.argv[1:]
    sizes = DENSE if kind == "dense" else MOE
    write_large(with_tokenizer(Path(target), beside), with_bytes(sizes, int(size)))
