"""Trains small heads for the bundled demo, to see proposals that really hold.

python -m tests.bench.train_heads eagle /tmp/eagle 120     # kind, folder, seconds
mlxinfer bench speculate -m demo --draft /tmp/eagle

The networks are written as published, with MLX's layers and the names of checkpoints; the
engine loads what they save. Data are those that the demo was trained on. Nothing is bundled: such a
head takes more room than the demo's draft.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
from examples.demo_model import fastblas

fastblas.preload()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from examples.demo_model.batches import DRILL_FROM, batch  # noqa: E402
from mlxinfer import hub  # noqa: E402
from mlxinfer.layers.step import Step, Taps  # noqa: E402
from mlxinfer.models import load  # noqa: E402
from mlxinfer.models.decoder import Model  # noqa: E402
from tests.models.dense_kv import DenseCache  # noqa: E402

HEADS, KV_HEADS, DIM, INNER = 4, 2, 64, 256
ROWS = 4  # of 128 tokens, a step
CHAIN = 2  # steps of a chain that EAGLE is trained on
BLOCK, MASK = 8, 1


class Attention(nn.Module):
    """Grouped-query attention with a rope, its inputs `width` numbers wide."""

    def __init__(self, hidden: int, width: int, *, normed: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, HEADS * DIM, bias=False)
        self.k_proj = nn.Linear(width, KV_HEADS * DIM, bias=False)
        self.v_proj = nn.Linear(width, KV_HEADS * DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * DIM, hidden, bias=False)
        if normed:
            self.q_norm, self.k_norm = nn.RMSNorm(DIM, 1e-6), nn.RMSNorm(DIM, 1e-6)

    def project(self, x: mx.array, name: str, positions: mx.array) -> mx.array:
        """x (B, L, width) -> (B, heads, L, DIM), turned by positions (L,)."""
        projected = self[f"{name}_proj"](x).reshape(*x.shape[:2], -1, DIM).transpose(0, 2, 1, 3)
        if name == "v":
            return projected
        if f"{name}_norm" in self:
            projected = self[f"{name}_norm"](projected)
        rates = 10000.0 ** (-mx.arange(DIM // 2) / (DIM // 2))
        angles = positions[:, None] * rates
        cos, sin = mx.cos(angles), mx.sin(angles)
        a, b = projected[..., : DIM // 2], projected[..., DIM // 2 :]
        return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attend(self, q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:
        """(B, heads, L, DIM) -> (B, L, hidden)."""
        k, v = (mx.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
        scores = (q @ k.swapaxes(-1, -2)) * DIM**-0.5
        weights = mx.softmax(mx.where(mask, scores, -1e9), axis=-1)
        return self.o_proj((weights @ v).transpose(0, 2, 1, 3).flatten(2))


class MLP(nn.Module):
    """Gate, up and down."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, INNER, bias=False)
        self.up_proj = nn.Linear(hidden, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, hidden, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The parts of a decoder layer."""

    def __init__(self, hidden: int, width: int, *, eagle: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden, 1e-6)
        self.post_attention_layernorm = nn.RMSNorm(hidden, 1e-6)
        self.self_attn = Attention(hidden, width, normed=not eagle)
        self.mlp = MLP(hidden)
        if eagle:
            self.hidden_norm = nn.RMSNorm(hidden, 1e-6)


class Eagle(nn.Module):
    """An EAGLE-3 head, as in vLLM's llama_eagle3.py."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        hidden = model.config.hidden_size
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = Layer(hidden, 2 * hidden, eagle=True)
        self.norm = nn.RMSNorm(hidden, 1e-6)
        self.lm_head = nn.Linear(hidden, model.config.vocab_size, bias=False)
        self.lm_head.weight = model.embed(mx.arange(model.config.vocab_size)) * 1.0

    def step(self, embedded: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """What the chain goes on from, and logits; (B, L, hidden) each."""
        layer, length = self.midlayer, hidden.shape[1]
        both = mx.concatenate([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], -1)
        positions = mx.arange(length)
        q, k, v = (layer.self_attn.project(both, name, positions) for name in "qkv")
        mask = positions[:, None] >= positions[None]
        x = hidden + layer.self_attn.attend(q, k, v, mask)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x, self.lm_head(self.norm(x))

    def loss(self, model: Model, ids: mx.array, tapped: mx.array) -> mx.array:
        """Of the first steps of a chain; ids (B, L), tapped (B, L, 3 * hidden)."""
        hidden, total = self.fc(tapped), mx.array(0.0)
        for ahead in range(CHAIN):
            stop = ids.shape[1] - 2 - ahead
            tokens, wanted = ids[:, 1 + ahead :][:, :stop], ids[:, 2 + ahead :][:, :stop]
            hidden, logits = self.step(model.embed(tokens), hidden[:, :stop])
            total = total + nn.losses.cross_entropy(logits, wanted, reduction="mean")
        return total / CHAIN

    @staticmethod
    def config(model: Model) -> dict[str, Any]:
        """Of the checkpoint."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": model.config.vocab_size,
        }

    @staticmethod
    def taps(model: Model) -> list[int]:
        """As nothing is stated."""
        count = model.config.num_layers
        return [max(i, 1) - 1 for i in (2, count // 2, count - 3)]


class DFlash(nn.Module):
    """A block draft of two layers, as in z-lab/dflash."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        hidden = model.config.hidden_size
        self.fc = nn.Linear(len(self.taps(model)) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, 1e-6)
        self.layers = [Layer(hidden, hidden, eagle=False) for _ in range(2)]
        self.norm = nn.RMSNorm(hidden, 1e-6)

    def loss(self, model: Model, ids: mx.array, tapped: mx.array) -> mx.array:
        """Blocks side by side, each with the hidden states before it."""
        length = ids.shape[1]
        starts = np.arange(8, length - BLOCK, BLOCK)
        places = (starts[:, None] + np.arange(BLOCK)).ravel()
        rows = mx.array(places)
        context = self.hidden_norm(self.fc(tapped))
        first = mx.array(np.tile(np.arange(BLOCK) == 0, len(starts)))
        x = model.embed(mx.where(first, ids[:, rows], MASK))
        block, own = mx.array(np.repeat(np.arange(len(starts)), BLOCK)), mx.arange(length)
        sees_past = own[None] < mx.array(np.repeat(starts, BLOCK))[:, None]
        mask = mx.concatenate([sees_past, block[:, None] == block[None]], axis=1)
        for layer in self.layers:
            normed, attention = layer.input_layernorm(x), layer.self_attn
            k, v = (
                mx.concatenate(
                    [attention.project(context, n, own), attention.project(normed, n, rows)], 2
                )
                for n in "kv"
            )
            x = x + attention.attend(attention.project(normed, "q", rows), k, v, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        kept = mx.array(np.flatnonzero(np.tile(np.arange(BLOCK) > 0, len(starts))))
        logits = model.logits(self.norm(x)[:, kept])
        return nn.losses.cross_entropy(logits, ids[:, rows[kept]], reduction="mean")

    @staticmethod
    def config(model: Model) -> dict[str, Any]:
        """Of the checkpoint."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "block_size": BLOCK,
            "num_target_layers": model.config.num_layers,
            "dflash_config": {"target_layer_ids": DFlash.taps(model), "mask_token_id": MASK},
        }

    @staticmethod
    def taps(model: Model) -> list[int]:
        """The layers in the middle and the last one."""
        return [model.config.num_layers // 2, model.config.num_layers - 1]


def tapped(model: Model, ids: np.ndarray, layers: list[int]) -> mx.array:
    """(B, L, taps * hidden) outputs of layers over rows ids (B, L)."""
    count, length = ids.shape
    cache, taps = DenseCache(model), Taps(layers)
    positions = mx.array(np.tile(np.arange(length, dtype=np.int32), count))
    caches = cache.step([(str(row), length) for row in range(count)])
    model(mx.array(ids.ravel()), Step(positions, caches, taps=taps))
    return mx.stop_gradient(taps.joined().reshape(count, length, -1))


def train(kind: str, folder: Path, seconds: float) -> None:
    """Train for so long and write the checkpoint."""
    demo = hub.resolve("demo")
    model, tokenizer = load(demo), Tokenizer.from_file(str(demo / "tokenizer.json"))
    head = KINDS[kind](model)
    mx.eval(head.parameters())
    optimizer = optim.AdamW(optim.cosine_decay(2e-3, 1200), weight_decay=0.0)
    step_of = nn.value_and_grad(head, lambda ids, states: head.loss(model, ids, states))
    began_s, step, shown = time.monotonic(), 0, 0.0
    while time.monotonic() - began_s < seconds:
        step += 1
        ids = batch(tokenizer, 1, DRILL_FROM + step)[0][:ROWS, :128]
        states = tapped(model, ids, head.taps(model))
        loss, gradients = step_of(mx.array(ids), states)
        optimizer.update(head, gradients)
        mx.eval(head.parameters(), optimizer.state, loss)
        shown = 0.95 * shown + 0.05 * float(loss) if shown else float(loss)
        if step % 20 == 0:
            print(f"step {step}: loss {shown:.3f}", flush=True)
    config = model.config
    stated = {
        "hidden_size": config.hidden_size,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": config.max_context,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**stated, **head.config(model)}))
    weights = dict(tree_flatten(head.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


KINDS: dict[str, Any] = {"eagle": Eagle, "dflash": DFlash}

if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
