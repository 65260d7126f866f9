"""A whole checkpoint folder of a few kilobytes: random weights, a tokenizer of single bytes."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

WIDTH, HEADS, HEAD_DIM, HIDDEN, LAYERS = 32, 4, 8, 64, 2
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 100_000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def write_tiny_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {**CONFIG, "vocab_size": len(letters)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    save_file(_weights(len(letters)), folder / "model.safetensors")
    return folder


def _weights(vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, 0.3, (rows, columns)).astype(np.float32)

    ones = np.ones(WIDTH, np.float32)
    weights = {"model.embed_tokens.weight": matrix(vocab_size, WIDTH), "model.norm.weight": ones}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name in ("q", "k", "v", "o"):
            weights[f"{at}self_attn.{name}_proj.weight"] = matrix(WIDTH, HEADS * HEAD_DIM)
        weights[f"{at}mlp.gate_proj.weight"] = matrix(HIDDEN, WIDTH)
        weights[f"{at}mlp.up_proj.weight"] = matrix(HIDDEN, WIDTH)
        weights[f"{at}mlp.down_proj.weight"] = matrix(WIDTH, HIDDEN)
        weights[f"{at}input_layernorm.weight"] = ones
        weights[f"{at}post_attention_layernorm.weight"] = ones
    return weights
