"""Trains the demo that sees: `python -m examples.demo_model.vision.train`.

At first the tower alone learns to say what is where, in crowded drawings; then all of it learns to
answer. Each part of a step is computed by a process of its own, on MLX's default device. A
checkpoint is written every minute, and a run that was stopped goes on from there. Needs what
`examples.demo_model.train` needs, and Pillow. Then `python -m examples.demo_model.vision.bundle`
writes the files that ship.
"""

import argparse
import json
import os
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
from .. import fastblas

fastblas.preload()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten, tree_map, tree_unflatten  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from .batches import LABELS, PATCH_LABELS, batch  # noqa: E402
from .model import WIDTH, Model  # noqa: E402
from .tokenizer import train_tokenizer  # noqa: E402

SEED = 0
STEPS, TOWER_STEPS = 4000, 1000  # in all, and at first for the tower alone
WARMUP_STEPS = 100
DECAY_SHARE = 0.4  # of the steps, at the end, with a falling learning rate
PEAK_LR = 2e-3
LABELS_SHARE = 0.5  # of the loss of labels, beside that of answers
PARTS = 5  # batches of a step, each computed by a process of its own
CHECKPOINT_S = 60.0
Part = tuple[list[float], Any]  # losses of labels and of answers, gradients


class Worker:
    """Makes batches and computes gradients, in a process of its own.

    Args:
        tokenizer: its file.
    """

    def __init__(self, tokenizer: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        self.model = Model(PATCH_LABELS, LABELS)
        self.tower = mx.compile(mx.value_and_grad(partial(self.loss, answers=False)))
        self.whole = mx.compile(mx.value_and_grad(partial(self.loss, answers=True)))

    def gradients(self, number: int, params: Any, *, answers: bool) -> Part:
        """Losses of labels and of answers of the batch of this number, and its gradients."""
        made = batch(self.tokenizer, SEED, number, crowded=not answers)
        inputs = {key: mx.array(x) for key, x in made.items()}
        wanted = tree_map(mx.array, params)
        (_, *losses), gradients = (self.whole if answers else self.tower)(wanted, inputs)
        mx.eval(losses, gradients)
        return [float(loss) for loss in losses], tree_map(np.array, gradients)

    def loss(
        self, params: Any, inputs: Any, *, answers: bool
    ) -> tuple[mx.array, mx.array, mx.array]:
        """What is to become small; then the losses of labels and of answers."""
        self.model.update(params)
        patches, features = self.model.see(inputs)
        covers = _binary(self.model.patch_labels(patches), inputs["patch_labels"])
        labels = _binary(self.model.labels(features), inputs["labels"]) + covers
        if not answers:
            return labels, labels, mx.array(0.0)
        losses = nn.losses.cross_entropy(self.model.logits(inputs, features), inputs["wanted"])
        answered = (losses * inputs["weights"]).sum() / inputs["weights"].sum()
        return answered + LABELS_SHARE * labels, labels, answered


@cache
def _worker(tokenizer: Path) -> Worker:
    return Worker(tokenizer)


def _part(tokenizer: Path, number: int, params: Any, *, answers: bool) -> Part:
    return _worker(tokenizer).gradients(number, params, answers=answers)


def make_update(optimizer: optim.Optimizer) -> Any:
    """Return a compiled function: (params, gradients of several parts) -> new params."""

    @partial(mx.compile, inputs=optimizer.state, outputs=optimizer.state)
    def update(params: Any, parts: Any) -> Any:
        mean = tree_map(lambda *gradients: sum(gradients) / len(gradients), *parts)
        grads, _ = optim.clip_grad_norm(mean, 1.0)
        return optimizer.apply_gradients(grads, params)

    return update


def _binary(logits: mx.array, wanted: mx.array) -> mx.array:
    """The loss of a patch or feature, of all its labels."""
    return nn.losses.binary_cross_entropy(logits, wanted) * wanted.shape[-1]


class Run:
    """One training run: its state, its schedule, its checkpoint file."""

    def __init__(
        self, folder: Path, num_steps: int, tower_steps: int, start: Path | None = None
    ) -> None:
        mx.random.seed(SEED)
        self.folder, self.num_steps, self.tower_steps = folder, num_steps, tower_steps
        self.step = 0
        if start is not None:
            shutil.copy(start / "tokenizer.json", self.tokenizer_file)
        self.tokenizer = self._tokenizer()
        self.model = Model(PATCH_LABELS, LABELS)
        if start is not None:
            self.model.load_weights(bundled_weights(start), strict=False)
        self.params = self.model.trainable_parameters()
        self.optimizer = optim.AdamW(PEAK_LR, betas=[0.9, 0.98], weight_decay=0.05)
        self.optimizer.init(self.params)
        self._resume()
        self.update = make_update(self.optimizer)

    def advance(self, pool: ProcessPoolExecutor) -> tuple[float, float]:
        """Do one step; return its losses of labels and of answers."""
        self.optimizer.learning_rate = mx.array(self._learning_rate())
        shared = tree_map(np.array, self.params)
        part = partial(_part, self.tokenizer_file, params=shared)
        answers = self.step >= self.tower_steps
        parts = [
            pool.submit(part, PARTS * self.step + number, answers=answers)
            for number in range(PARTS)
        ]
        losses, grads = zip(*(computed.result() for computed in parts), strict=True)
        self.params = self.update(self.params, [tree_map(mx.array, computed) for computed in grads])
        mx.eval(self.params, self.optimizer.state)
        self.step += 1
        labels, answered = np.mean(losses, axis=0)
        return float(labels), float(answered)

    def save(self) -> None:
        """Write weights, optimizer state and step; whole, or not at all."""
        state = tree_flatten({"params": self.params, "optimizer": self.optimizer.state})
        scratch = self.folder / "demo-vision.partial.safetensors"
        mx.save_safetensors(str(scratch), dict(state), metadata={"step": str(self.step)})
        scratch.replace(self.checkpoint)

    @property
    def checkpoint(self) -> Path:
        """The file with the state of the run."""
        return self.folder / "demo-vision.safetensors"

    @property
    def tokenizer_file(self) -> Path:
        return self.folder / "vision-tokenizer.json"

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
        return PEAK_LR * min(1.0, (self.step + 1) / WARMUP_STEPS, left / DECAY_SHARE)

    def _tokenizer(self) -> Tokenizer:
        if not self.tokenizer_file.exists():
            train_tokenizer(SEED).save(str(self.tokenizer_file))
        return Tokenizer.from_file(str(self.tokenizer_file))


def bundled_weights(folder: Path) -> list[tuple[str, mx.array]]:
    """The weights of a model as `bundle` writes it, by their names in training."""
    stored: Any = mx.load(str(folder / "model.safetensors"))
    weights = []
    for name, array in stored.items():
        if name.endswith((".scales", ".biases")):
            continue
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in stored:
            scales, biases = stored[f"{stem}.scales"], stored[f"{stem}.biases"]
            group_size = array.shape[-1] * 4 // scales.shape[-1]  # 8 bits: 4 numbers in a uint32
            array = mx.dequantize(array, scales, biases, group_size=group_size, bits=8)
        ours = name.replace("vision_tower.", "visual.").replace(
            "language_model.model.", "language_model."
        )
        if name.endswith("patch_embed.proj.weight"):  # two halves, of equal frames
            array = 2 * array.reshape(WIDTH, 3, 2, -1)[:, :, 0].reshape(WIDTH, -1)
        weights.append((ours, array.astype(mx.float32)))
    return weights


def train(run: Run, pool: ProcessPoolExecutor) -> None:
    """Train until the steps are done, reporting and saving on the way."""
    start_s = saved_s = time.monotonic()
    first, losses = run.step, list[tuple[float, float]]()
    while run.step < run.num_steps:
        losses.append(run.advance(pool))
        now_s = time.monotonic()
        if run.step % 20 == 0:
            labels, answers = np.mean(losses, axis=0)
            step_s = (now_s - start_s) / (run.step - first)
            report = {"step": run.step, "labels": round(labels, 3), "answers": round(answers, 4)}
            print(json.dumps({**report, "s": round(step_s, 2)}), flush=True)
            losses.clear()
        if now_s - saved_s > CHECKPOINT_S or run.step == run.num_steps:
            run.save()
            saved_s = now_s


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="in all")
    parser.add_argument("--tower-steps", type=int, default=TOWER_STEPS, help="at first, tower only")
    parser.add_argument("--processes", type=int, default=PARTS, help="that compute")
    parser.add_argument("--start", type=Path, help="a bundled model whose weights come first")
    parser.add_argument("--work", type=Path, default=Path("build/demo_model"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        train(Run(args.work, args.steps, args.tower_steps, args.start), pool)


if __name__ == "__main__":
    main()
