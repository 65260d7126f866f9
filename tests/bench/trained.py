"""Models of random weights that some minutes of training gave a structure, for `bench quality`.

`python -m tests.bench.trained FOLDER` trains all of SHAPES, each for `--minutes`, on the corpus of
the demo model and with its tokenizer. Their weights are not kept in the repository: how activations
are spread over channels, and how much layers differ, comes back with any seed. The held-out texts
of the benchmarks are not in the corpus.
"""

import argparse
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
from examples.demo_model import fastblas

fastblas.preload()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
from mlx.utils import tree_flatten, tree_map  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from examples.demo_model import model as dense  # noqa: E402
from examples.demo_model.batches import batch  # noqa: E402

SEED = 7
PEAK_LR = 2e-3
WARMUP_STEPS = 40
TOKENIZER = Path(__file__).parents[1] / "data" / "demo-bf16"
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class Shape(dense.Shape):
    """Sizes of a Qwen3 decoder, with experts if `num_experts`; of a Qwen2 one if `key_bias`."""

    num_experts: int = 0
    experts_per_token: int = 2
    key_bias: float = 0.0  # of the slow pairs of a key, at first


SHAPES = {
    "dense": Shape(num_layers=8),
    "moe": Shape(
        hidden_size=192, num_heads=3, num_kv_heads=1, intermediate_size=192, num_experts=8
    ),
    # As large as those published for Qwen 2.5: norms of 600 to 900 (llama.cpp issue 21385).
    "key-bias": Shape(key_bias=100.0),
}
SLOW_PAIRS = 8  # of a head; they turn by a radian in a thousand tokens and more


class Experts(nn.Module):
    """A mixture of experts; all are computed for all tokens, and the weights pick."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.k, count = shape.experts_per_token, shape.num_experts
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.gate = nn.Linear(hidden, count, bias=False)
        self.gate_proj, self.up_proj = (_stack(count, inner, hidden) for _ in range(2))
        self.down_proj = _stack(count, hidden, inner)

    def __call__(self, x: mx.array) -> mx.array:
        """Map (B, L, D) to (B, L, D)."""
        flat = x.reshape(-1, x.shape[-1])
        logits = self.gate(flat)  # (T, E)
        least = mx.sort(logits, axis=-1)[:, -self.k][:, None]
        weights = mx.softmax(mx.where(logits >= least, logits, -1e9), axis=-1)
        gates = flat[None] @ self.gate_proj.swapaxes(1, 2)  # (E, T, inner)
        inner = nn.silu(gates) * (flat[None] @ self.up_proj.swapaxes(1, 2))
        found = (inner @ self.down_proj.swapaxes(1, 2)) * weights.T[..., None]
        return found.sum(axis=0).reshape(x.shape)


def _stack(count: int, out_dims: int, in_dims: int) -> mx.array:
    return mx.random.uniform(-1, 1, (count, out_dims, in_dims)) * in_dims**-0.5


class Model(dense.Model):
    """The demo model's decoder with an output matrix of its own, and perhaps experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        for layer in self.model.layers:
            if shape.num_experts:
                layer.mlp = Experts(shape)
            if shape.key_bias:
                add_biases(layer.self_attn, shape)

    def __call__(self, ids: mx.array) -> mx.array:
        """Map token ids (B, L) to logits (B, L, vocab)."""
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


def add_biases(attention: Any, shape: Shape) -> None:
    """Biases on Q, K and V in place of the norms of Q and K, large ones on K."""
    attention.q_norm = attention.k_norm = nn.Identity()
    for name in "qkv":
        old = attention[f"{name}_proj"].weight
        attention[f"{name}_proj"] = nn.Linear(old.shape[1], old.shape[0])
    heads, half = shape.num_kv_heads, shape.head_dim // 2
    slow = (mx.arange(shape.head_dim) % half >= half - SLOW_PAIRS) * shape.key_bias
    signs = mx.where(mx.random.bernoulli(0.5, (heads, shape.head_dim)), 1.0, -1.0)
    attention.k_proj.bias = (signs * slow).flatten()


def train(shape: Shape, minutes: float) -> tuple[Model, float]:
    """A model after `minutes`, its learning rate falling to 0; and its last losses' mean."""
    mx.random.seed(SEED)
    model, tokenizer = Model(shape), Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    optimizer = optim.AdamW(PEAK_LR, betas=[0.9, 0.98], weight_decay=0.05)

    def loss(ids: mx.array, weights: mx.array) -> mx.array:
        losses = nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:])
        return (losses * weights).sum() / weights.sum()

    gradients = nn.value_and_grad(model, loss)
    started, step, recent = time.monotonic(), 0, 0.0
    while (spent := (time.monotonic() - started) / (minutes * 60)) < 1:
        rate = PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS, (1 - spent) / 0.4)
        optimizer.learning_rate = mx.array(rate)
        ids, weights = map(mx.array, batch(tokenizer, SEED, step))
        value, grads = gradients(ids, mx.maximum(weights, 0.5))
        optimizer.update(model, optim.clip_grad_norm(grads, 1.0)[0])
        mx.eval(model.parameters(), optimizer.state, value)
        recent = 0.95 * recent + 0.05 * value.item() if step else value.item()
        step += 1
        if step % 20 == 0:
            print(f"{spent:.0%}, step {step}, loss {recent:.3f}", flush=True)
    return model, recent


def write(folder: Path, shape: Shape, model: Model) -> None:
    """A checkpoint as it would be on the hub, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, mx.array] = {}
    for name, value in tree_flatten(tree_map(lambda p: p.astype(mx.bfloat16), model.parameters())):
        if value.ndim < 3:
            tensors[name] = value
            continue
        path, _, kind = name.rpartition(".")
        tensors |= {f"{path}.experts.{i}.{kind}.weight": each for i, each in enumerate(value)}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(shape), indent=2))
    for name in FILES:
        shutil.copyfile(TOKENIZER / name, folder / name)


def config(shape: Shape) -> dict[str, Any]:
    """config.json."""
    kind = "qwen3_moe" if shape.num_experts else "qwen2" if shape.key_bias else "qwen3"
    name = {"qwen3_moe": "Qwen3Moe", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    own: dict[str, Any] = json.loads((TOKENIZER / "config.json").read_text()) | {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": kind,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "tie_word_embeddings": False,
    }
    if shape.num_experts:
        own |= {
            "moe_intermediate_size": shape.intermediate_size,
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.experts_per_token,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return own


def main() -> None:
    """Parse the command line, train and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=12.0, help="of each model")
    parser.add_argument("--only", choices=SHAPES)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    for name, shape in SHAPES.items():
        if args.only in (None, name):
            model, loss = train(shape, args.minutes)
            write(args.folder / name, shape, model)
            print(f"{name}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
