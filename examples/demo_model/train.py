"""Trains a demo model: `python -m examples.demo_model.train --model demo`.

Runs on MLX's default device. The learning rate stays up and comes down in the last third; the end
sees the weights as 4 bits hold them. A checkpoint is written every three minutes, and a run that
was stopped goes on from there. `--start FOLDER` goes on from the weights of a bundled model instead
of random ones, with smaller steps that all see 4 bits: so a model learns what was added to the
data. Needs mlx, numpy and tokenizers; on a CPU with Linux `scipy-openblas32` and a C compiler make
it some twenty times faster. Then `python -m examples.demo_model.bundle` writes what ships.
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
from . import fastblas

fastblas.preload()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten, tree_unflatten  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from .batches import Batch, batches, held_out_batch  # noqa: E402
from .corpus import Message  # noqa: E402
from .model import SHAPES, Model  # noqa: E402
from .quantise import rounded  # noqa: E402
from .shipped import shipped_model  # noqa: E402
from .sums import Sum, draw, solved  # noqa: E402
from .tokenizer import render_chat, train_tokenizer  # noqa: E402

SEED = 0
DECAY_SHARE = 0.35  # of the steps, at the end, with a falling learning rate
CHECKPOINT_S = 180.0
EVALUATE_STEPS = 250
ROWS_AT_ONCE = 64  # in measurements: what fits into little memory


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long to train, and how.

    Attributes:
        rounded_share: of the steps, at the end, see the weights as 4 bits hold them.
    """

    num_steps: int
    peak_lr: float = 2e-3
    warmup_steps: int = 200
    tokens_per_step: int = 4096
    rounded_share: float = 0.2


FROM_NOTHING = {"demo": Schedule(9000), "demo-draft": Schedule(6000)}
FURTHER = {name: Schedule(3420, 1e-3, warmup_steps=50, rounded_share=1.0) for name in FROM_NOTHING}


def make_step(model: Model, optimizer: optim.Optimizer, to_weights: Any) -> Any:
    """Return a compiled step: (params, ids, loss weights) -> (loss, new params)."""

    def loss(params: Any, ids: mx.array, weights: mx.array) -> mx.array:
        model.update(to_weights(params))
        losses = nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:])  # (B, L)
        return (losses * weights).sum() / weights.sum()

    gradients = mx.value_and_grad(loss)

    @partial(mx.compile, inputs=optimizer.state, outputs=optimizer.state)
    def step(params: Any, ids: mx.array, weights: mx.array) -> tuple[mx.array, Any]:
        value, grads = gradients(params, ids, weights)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        return value, optimizer.apply_gradients(grads, params)

    return step


def held_out_loss(model: Model, tokenizer: Tokenizer) -> float:
    """Return the mean loss in nats over the answers of held-out conversations."""
    ids, weights = held_out_batch(tokenizer)
    total = 0.0
    for row in range(0, len(ids), ROWS_AT_ONCE):
        part = mx.array(ids[row : row + ROWS_AT_ONCE])
        losses = nn.losses.cross_entropy(model(part[:, :-1]), part[:, 1:])
        total += float((losses * mx.array(weights[row : row + ROWS_AT_ONCE] == 1.0)).sum())
    return total / float((weights == 1.0).sum())


def wrong_sums(model: Model, tokenizer: Tokenizer, sums: Sequence[Sum]) -> list[str]:
    """Return those sums of which any token of the right answer is not the most probable one."""
    wrong = []
    for first in range(0, len(sums), ROWS_AT_ONCE):
        some = sums[first : first + ROWS_AT_ONCE]
        rows = [render_chat(tokenizer, _asked(*asked)) for asked in some]
        longest = max(len(ids) for ids, _ in rows)
        ids = np.array([ids + [0] * (longest - len(ids)) for ids, _ in rows])
        counts = np.array([w + [0.0] * (longest - len(w)) for _, w in rows]) == 1.0
        best = np.array(model(mx.array(ids[:, :-1])).argmax(-1))
        missed = ((best != ids[:, 1:]) & counts[:, 1:]).any(axis=1)
        wrong += [solved(*asked) for asked, miss in zip(some, missed, strict=True) if miss]
    return wrong


def _asked(a: int, sign: str, b: int) -> list[Message]:
    return [Message("user", f"What is {a} {sign} {b}?"), Message("assistant", solved(a, sign, b))]


class Run:
    """One training run: its state, its schedule, its checkpoint file."""

    def __init__(
        self, name: str, folder: Path, schedule: Schedule, start: Path | None = None
    ) -> None:
        mx.random.seed(SEED)
        self.folder, self.name, self.schedule = folder, name, schedule
        self.num_steps, self.step = schedule.num_steps, 0
        if start is not None:
            shutil.copyfile(start / "tokenizer.json", self.tokenizer_file)
        self.tokenizer = self._tokenizer()
        self.model = Model(SHAPES[name]) if start is None else shipped_model(start)
        self.params = self.model.trainable_parameters()
        self.optimizer = optim.AdamW(schedule.peak_lr, betas=[0.9, 0.98], weight_decay=0.05)
        self.optimizer.init(self.params)
        self._resume()
        self.plain_step = make_step(self.model, self.optimizer, lambda params: params)
        self.rounded_step = make_step(self.model, self.optimizer, rounded)

    def advance(self, made: Batch) -> mx.array:
        """Do one step; return its loss."""
        rounding = self.step >= self.num_steps * (1 - self.schedule.rounded_share)
        self.optimizer.learning_rate = mx.array(self._learning_rate())
        ids, weights = map(mx.array, made)
        step = self.rounded_step if rounding else self.plain_step
        loss, self.params = step(self.params, ids, weights)
        mx.eval(loss, self.params, self.optimizer.state)
        self.step += 1
        return loss

    def evaluate(self) -> dict[str, float]:
        """Measure the weights as 4 bits hold them: held-out loss, wrong ones of 256 new sums."""
        self.model.update(rounded(self.params))
        rng = Random("sums")
        wrong = wrong_sums(self.model, self.tokenizer, [draw(rng) for _ in range(256)])
        loss = held_out_loss(self.model, self.tokenizer)
        return {"step": self.step, "held_out_4bit": round(loss, 4), "wrong_of_256": len(wrong)}

    def save(self) -> None:
        """Write weights, optimizer state and step; whole, or not at all."""
        state = tree_flatten({"params": self.params, "optimizer": self.optimizer.state})
        scratch = self.folder / f"{self.name}.partial.safetensors"
        mx.save_safetensors(str(scratch), dict(state), metadata={"step": str(self.step)})
        scratch.replace(self.checkpoint)

    @property
    def checkpoint(self) -> Path:
        """The file with the state of the run."""
        return self.folder / f"{self.name}.safetensors"

    @property
    def tokenizer_file(self) -> Path:
        """The file with the tokenizer, which all models of a folder share."""
        return self.folder / "tokenizer.json"

    def _resume(self) -> None:
        if not self.checkpoint.exists():
            return
        saved: Any = mx.load(str(self.checkpoint), return_metadata=True)
        arrays, place = saved
        state: Any = tree_unflatten(list(arrays.items()))
        self.params, self.optimizer.state = state["params"], state["optimizer"]
        self.step = int(place["step"])

    def _learning_rate(self) -> float:
        left = 1 - self.step / self.num_steps
        warm = (self.step + 1) / self.schedule.warmup_steps
        return self.schedule.peak_lr * min(1.0, warm, left / DECAY_SHARE)

    def _tokenizer(self) -> Tokenizer:
        if not self.tokenizer_file.exists():
            train_tokenizer(SEED).save(str(self.tokenizer_file))
        return Tokenizer.from_file(str(self.tokenizer_file))


def train(run: Run) -> None:
    """Train until the steps are done, reporting and saving on the way."""
    start_s = saved_s = time.monotonic()
    first = run.step
    num_tokens = run.schedule.tokens_per_step
    for made in batches(run.tokenizer_file, SEED, first, run.num_steps, num_tokens):
        loss = run.advance(made)
        now_s = time.monotonic()
        if run.step % 100 == 0:
            speed = (run.step - first) * num_tokens / (now_s - start_s)
            print(f"step {run.step}/{run.num_steps} loss {float(loss):.3f} {speed:.0f} tokens/s")
        if now_s - saved_s > CHECKPOINT_S or run.step == run.num_steps:
            run.save()
            saved_s = time.monotonic()
        if run.step % EVALUATE_STEPS == 0 or run.step == run.num_steps:
            print(json.dumps(run.evaluate()), flush=True)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="demo")
    parser.add_argument(
        "--steps", type=int, help="in all  [default: 9000; 6000 for the draft; 3420 with --start]"
    )
    parser.add_argument("--start", type=Path, help="go on from the weights of this folder")
    parser.add_argument("--work", type=Path, default=Path("build/demo_model"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    schedule = (FURTHER if args.start else FROM_NOTHING)[args.model]
    if args.steps:
        schedule = replace(schedule, num_steps=args.steps)
    train(Run(args.model, args.work, schedule, args.start))


if __name__ == "__main__":
    main()
