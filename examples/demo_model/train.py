"""Trains a demo model: `python -m examples.demo_model.train --model demo --minutes 60`.

The learning rate stays up and comes down in the last quarter. When three quarters of the minutes
are over, the number of steps is fixed and printed; `--steps N` makes exactly that run again.
Needs mlx, numpy and tokenizers; on Linux `scipy-openblas32` and a C compiler make it some twenty
times faster. A checkpoint is written every three minutes, and a run that was stopped goes on from
there. Then `python -m examples.demo_model.bundle` writes the files that ship.

What ships was made with `--model demo --steps 2400`, carried on with `--model demo --steps 2900`,
and with `--model demo-draft --steps 702`.
"""

import argparse
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
from . import fastblas

fastblas.preload()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
from mlx.utils import tree_flatten, tree_map, tree_unflatten  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from .batches import TOKENS_PER_STEP, batch, held_out_batch  # noqa: E402
from .model import SHAPES, Model  # noqa: E402
from .quantise import rounded  # noqa: E402
from .tokenizer import train_tokenizer  # noqa: E402

SEED = 0
WARMUP_STEPS = 100
DECAY_SHARE = 0.25  # of the steps, at the end, with a falling learning rate
ROUNDED_SHARE = 0.15  # of the steps, at the end, see the weights as 4 bits hold them
CHECKPOINT_S = 180.0


def make_step(model: Model, optimizer: optim.Optimizer, to_weights: Any) -> Any:
    """Return a compiled step: (params, ids, loss weights) -> (loss, new params)."""
    other_half = mx.new_stream(mx.cpu)  # each half of the batch has its own thread

    def loss(params: Any, ids: mx.array, weights: mx.array, total: mx.array) -> mx.array:
        model.update(to_weights(params))
        losses = nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:])  # (B, L)
        return (losses * weights).sum() / total

    gradients = mx.value_and_grad(loss)

    @partial(mx.compile, inputs=optimizer.state, outputs=optimizer.state)
    def step(params: Any, ids: mx.array, weights: mx.array) -> tuple[mx.array, Any]:
        total, half = weights.sum(), ids.shape[0] // 2
        first, grads = gradients(params, ids[:half], weights[:half], total)
        with mx.stream(other_half):
            second, more = gradients(params, ids[half:], weights[half:], total)
        grads, _ = optim.clip_grad_norm(tree_map(mx.add, grads, more), 1.0)
        return first + second, optimizer.apply_gradients(grads, params)

    return step


def held_out_loss(model: Model, tokenizer: Tokenizer) -> float:
    """Return the mean loss in nats over the answers of held-out conversations."""
    ids, weights = held_out_batch(tokenizer)
    total = 0.0
    for row in range(0, len(ids), 16):  # rows that fit into little memory
        part, part_weights = mx.array(ids[row : row + 16]), mx.array(weights[row : row + 16] == 1.0)
        losses = nn.losses.cross_entropy(model(part[:, :-1]), part[:, 1:])
        total += float((losses * part_weights).sum())
    return total / float((weights == 1.0).sum())


class Run:
    """One training run: its state, its schedule, its checkpoint file."""

    def __init__(self, name: str, folder: Path, *, peak_lr: float = 2e-3) -> None:
        mx.random.seed(SEED)
        self.folder, self.name, self.peak_lr = folder, name, peak_lr
        self.tokenizer = self._tokenizer()
        self.model = Model(SHAPES[name])
        self.params = self.model.trainable_parameters()
        self.optimizer = optim.AdamW(peak_lr, betas=[0.9, 0.98], weight_decay=0.05)
        self.optimizer.init(self.params)
        self.step = self.num_steps = 0
        self._resume()
        self.plain_step = make_step(self.model, self.optimizer, lambda params: params)
        self.rounded_step = make_step(self.model, self.optimizer, rounded)

    def advance(self) -> mx.array:
        """Do one step; return its loss."""
        rounding = self.num_steps and self.step >= self.num_steps * (1 - ROUNDED_SHARE)
        self.optimizer.learning_rate = mx.array(self._learning_rate())
        ids, weights = map(mx.array, batch(self.tokenizer, SEED, self.step))
        step = self.rounded_step if rounding else self.plain_step
        loss, self.params = step(self.params, ids, weights)
        mx.eval(loss, self.params, self.optimizer.state)
        self.step += 1
        return loss

    def evaluate(self) -> float:
        """Return the held-out loss of the weights as 4 bits hold them."""
        self.model.update(rounded(self.params))
        return held_out_loss(self.model, self.tokenizer)

    def save(self) -> None:
        """Write weights, optimizer state and place in the schedule; whole, or not at all."""
        state = tree_flatten({"params": self.params, "optimizer": self.optimizer.state})
        place = {"step": str(self.step), "num_steps": str(self.num_steps)}
        scratch = self.folder / f"{self.name}.partial.safetensors"
        mx.save_safetensors(str(scratch), dict(state), metadata=place)
        scratch.replace(self.checkpoint)

    @property
    def checkpoint(self) -> Path:
        """The file with the state of the run."""
        return self.folder / f"{self.name}.safetensors"

    def _resume(self) -> None:
        if not self.checkpoint.exists():
            return
        saved: Any = mx.load(str(self.checkpoint), return_metadata=True)
        arrays, place = saved
        state: Any = tree_unflatten(list(arrays.items()))
        self.params, self.optimizer.state = state["params"], state["optimizer"]
        self.step, self.num_steps = int(place["step"]), int(place["num_steps"])

    def _learning_rate(self) -> float:
        left = 1 - self.step / self.num_steps if self.num_steps else 1.0
        return self.peak_lr * min(1.0, (self.step + 1) / WARMUP_STEPS, left / DECAY_SHARE)

    def _tokenizer(self) -> Tokenizer:
        path = self.folder / "tokenizer.json"
        if not path.exists():
            train_tokenizer(SEED).save(str(path))
        return Tokenizer.from_file(str(path))


def train(run: Run, minutes: float, num_steps: int | None) -> None:
    """Train until the steps are done, reporting and saving on the way."""
    run.num_steps = num_steps or run.num_steps
    start_s = saved_s = time.monotonic()
    first = run.step
    while not run.num_steps or run.step < run.num_steps:
        loss = run.advance()
        now_s = time.monotonic()
        if not run.num_steps and now_s - start_s > minutes * 60 * (1 - DECAY_SHARE):
            run.num_steps = int(run.step / (1 - DECAY_SHARE))
            print(f"{run.num_steps} steps will fit; repeat with --steps {run.num_steps}")
        if run.step % 50 == 0:
            speed = (run.step - first) * TOKENS_PER_STEP / (now_s - start_s)
            print(f"step {run.step}/{run.num_steps} loss {float(loss):.3f} {speed:.0f} tokens/s")
        if now_s - saved_s > CHECKPOINT_S or run.step == run.num_steps:
            run.save()
            saved_s = now_s
            print(json.dumps({"step": run.step, "held_out_4bit": round(run.evaluate(), 4)}))


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="demo")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--work", type=Path, default=Path("build/demo_model"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    mx.set_default_device(mx.cpu)
    train(Run(args.model, args.work), args.minutes, args.steps)


if __name__ == "__main__":
    main()
