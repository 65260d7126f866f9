"""Models larger than the demo model, grown from its weights and trained on, for `bench quality`.

`python -m tests.bench.trained FOLDER` makes all of SHAPES: what the demo model has is where it was,
what it has not is random, and `--steps` on its corpus, with its tokenizer, make them one model. The
held-out texts of the benchmarks are not in the corpus. The weights are not kept in the repository.
"""

import argparse
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

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
PEAK_LR = 1.5e-3
WARMUP_STEPS = 10
FALLING = 0.4  # share of the steps, at the end
SMALL = 0.3
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
    "moe": Shape(intermediate_size=192, num_experts=8),
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


def grow(model: Model, shape: Shape) -> None:
    """Put the demo model's weights into every second layer, or into all and their experts."""
    path = str(TOKENIZER / "model.safetensors")
    stored = cast(dict[str, mx.array], mx.load(path))
    known = {name: value.astype(mx.float32) for name, value in stored.items()}
    stride = shape.num_layers // dense.Shape().num_layers
    grown = {"lm_head.weight": known["model.embed_tokens.weight"]}
    for name, value in known.items():
        head, is_layer, tail = name.partition("model.layers.")
        index, _, rest = tail.partition(".")
        target = f"model.layers.{int(index) * stride}.{rest}" if is_layer else head
        if shape.num_experts and ".mlp." in target:
            target, value = target.removesuffix(".weight"), _chunks(rest, value, shape)
        grown[target] = value
    model.load_weights(list(grown.items()), strict=False)
    for layer in model.model.layers[1::stride] if stride > 1 else ():  # at first they change little
        layer.self_attn.o_proj.weight *= SMALL
        layer.mlp.down_proj.weight *= SMALL


def _chunks(name: str, matrix: mx.array, shape: Shape) -> mx.array:
    """Experts from parts of the inner dimension, none like another."""
    down = "down_proj" in name
    pieces = matrix.shape[down] // shape.intermediate_size
    parts = list(mx.split(matrix, pieces, axis=int(down)))
    count = shape.num_experts // len(parts)
    noise = mx.random.normal((shape.num_experts, *parts[0].shape)) * matrix.std() * SMALL
    experts = mx.concatenate([mx.stack(parts)] * count) + noise
    return experts * (len(parts) if down else 1)  # weights of one token's experts add up to 1


def train(shape: Shape, steps: int, minutes: float | None) -> tuple[Model, float]:
    """A model after `steps` or `minutes`, its learning rate falling to 0; its last losses' mean."""
    mx.random.seed(SEED)
    model = Model(shape)
    if not shape.key_bias:
        grow(model, shape)
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    optimizer = optim.AdamW(PEAK_LR, betas=[0.9, 0.98], weight_decay=0.05)

    def loss(ids: mx.array, weights: mx.array) -> mx.array:
        losses = nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:])
        return (losses * weights).sum() / weights.sum()

    gradients = nn.value_and_grad(model, loss)
    started, step, recent, spent = time.monotonic(), 0, 0.0, 0.0
    while spent < 1:
        rate = PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS, (1 - spent) / FALLING)
        optimizer.learning_rate = mx.array(rate)
        rows = batch(tokenizer, SEED, step)
        ids, weights = (mx.array(part[: len(part) // 2]) for part in rows)
        value, grads = gradients(ids, mx.maximum(weights, 0.5))
        optimizer.update(model, optim.clip_grad_norm(grads, 1.0)[0])
        mx.eval(model.parameters(), optimizer.state, value)
        recent = 0.95 * recent + 0.05 * value.item() if step else value.item()
        step += 1
        spent = (time.monotonic() - started) / (minutes * 60) if minutes else step / steps
        if step % 10 == 0:
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
    parser.add_argument("--steps", type=int, default=150, help="of each model")
    parser.add_argument("--minutes", type=float, help="of each model, instead of --steps")
    parser.add_argument("--only", choices=SHAPES)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    for name, shape in SHAPES.items():
        if args.only in (None, name):
            model, loss = train(shape, args.steps, args.minutes)
            write(args.folder / name, shape, model)
            print(f"{name}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
