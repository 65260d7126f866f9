"""Large checkpoints of random bf16 weights in shards: dense, and a mixture of experts.

`python -m tests.bench.large_checkpoints FOLDER KIND BYTES TOKENIZER` makes one, in a process of
its own.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np

SHARD_BYTES = 500_000_000
NOISE = 1 << 23  # different numbers; speed does not depend on them, so they come again and again
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
VOCAB = 32_000
_COMMON = {
    "vocab_size": VOCAB,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_size": 2048,
}
DENSE = {
    **_COMMON,
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "intermediate_size": 6144,
}
MOE = {
    **_COMMON,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def write_large(folder: Path, config: dict[str, object], num_bytes: int, tokenizer: Path) -> int:
    """About `num_bytes` of weights; returns how many there are."""
    folder.mkdir(parents=True)
    layer = sum(_size(shape) for _, shape in _layer(config, 0)) * 2
    ends = sum(_size(shape) for _, shape in _ends(config)) * 2
    layers = max(1, round((num_bytes - ends) / layer))
    config = {**config, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER:
        shutil.copyfile(tokenizer / name, folder / name)
    noise = np.random.default_rng(0).standard_normal(NOISE, dtype=np.float32) * 0.02
    source = mx.array(noise).astype(mx.bfloat16)
    shapes = [*_ends(config), *(s for i in range(layers) for s in _layer(config, i))]
    return _write_shards(folder, shapes, source)


def _write_shards(folder: Path, shapes: list[tuple[str, tuple[int, ...]]], noise: mx.array) -> int:
    weight_map: dict[str, str] = {}
    pending: dict[str, mx.array] = {}
    total = 0

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        mx.save_safetensors(str(folder / name), pending, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(pending, name))
        pending.clear()

    for name, shape in shapes:
        size = _size(shape)
        repeated = mx.concatenate([noise] * -(-size // NOISE))[:size] if size > NOISE else None
        pending[name] = (noise[:size] if repeated is None else repeated).reshape(shape)
        total += size * 2
        if sum(array.nbytes for array in pending.values()) >= SHARD_BYTES:
            flush()
    if pending:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _ends(config: dict[str, object]) -> list[tuple[str, tuple[int, ...]]]:
    hidden, vocab = int(str(config["hidden_size"])), int(str(config["vocab_size"]))
    return [
        ("model.embed_tokens.weight", (vocab, hidden)),
        ("lm_head.weight", (vocab, hidden)),
        ("model.norm.weight", (hidden,)),
    ]


def _layer(config: dict[str, object], index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    sizes = {key: int(value) for key, value in config.items() if isinstance(value, int)}
    hidden, dim = sizes["hidden_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * dim, sizes["num_key_value_heads"] * dim
    at = f"model.layers.{index}"
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}.{name}.weight", (hidden,)
    for name in ("q_norm", "k_norm"):
        yield f"{at}.self_attn.{name}.weight", (dim,)
    for name, shape in (
        ("q_proj", (queries, hidden)),
        ("k_proj", (keys, hidden)),
        ("v_proj", (keys, hidden)),
        ("o_proj", (hidden, queries)),
    ):
        yield f"{at}.self_attn.{name}.weight", shape
    if "num_experts" not in sizes:
        yield from _mlp(f"{at}.mlp", hidden, sizes["intermediate_size"])
        return
    yield f"{at}.mlp.gate.weight", (sizes["num_experts"], hidden)
    for expert in range(sizes["num_experts"]):
        yield from _mlp(f"{at}.mlp.experts.{expert}", hidden, sizes["moe_intermediate_size"])


def _mlp(path: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{path}.gate_proj.weight", (inner, hidden)
    yield f"{path}.up_proj.weight", (inner, hidden)
    yield f"{path}.down_proj.weight", (hidden, inner)


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))


if __name__ == "__main__":
    target, kind, size, beside = sys.argv[1:]
    write_large(Path(target), DENSE if kind == "dense" else MOE, int(size), Path(beside))
