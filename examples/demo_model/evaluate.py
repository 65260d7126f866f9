"""Measures the demo models: `python -m examples.demo_model.evaluate`.

Held-out loss of the weights as trained and as shipped, then the shipped model's own answers.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from .train import held_out_loss  # first: it makes matrix products fast, before mlx is loaded

import mlx.core as mx  # isort: skip
from mlx.utils import tree_unflatten
from tokenizers import Tokenizer

from mlxinfer import LLM, SamplingParams

from .bundle import trained_weights
from .model import SHAPES, Model
from .quantise import BITS, GROUP_SIZE

QUESTIONS = (
    "Hello",
    "Who are you?",
    "What is a KV cache?",
    "explain paged atention",
    "How do I install mlxinfer?",
    "What is 12 + 30?",
    "Give me JSON for a user named Grace aged 47",
    "Give me a JSON object with name and age",
    "Write a haiku about memory",
    "Who won the World Cup?",
)


def shipped_weights(folder: Path) -> dict[str, mx.array]:
    """Return the weights of a bundled folder, as the numbers that its 4 bits stand for."""
    arrays: Any = mx.load(str(folder / "model.safetensors"))
    weights = {}
    for name, array in arrays.items():
        stem = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{stem}.scales" in arrays:
            scales, biases = arrays[f"{stem}.scales"], arrays[f"{stem}.biases"]
            array = mx.dequantize(array, scales, biases, GROUP_SIZE, BITS)
        weights[name] = array
    return weights


def loss_of(name: str, weights: dict[str, mx.array], tokenizer: Tokenizer) -> float:
    """Return the held-out loss of a model with these weights, in nats a token."""
    model = Model(SHAPES[name])
    model.update(tree_unflatten([(key, w.astype(mx.float32)) for key, w in weights.items()]))
    return held_out_loss(model, tokenizer)


def main() -> None:
    """Print losses and sample answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build/demo_model"))
    parser.add_argument("--assets", type=Path, default=Path("mlxinfer/assets"))
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    for name in SHAPES:
        tokenizer = Tokenizer.from_file(str(args.assets / name / "tokenizer.json"))
        trained = trained_weights(args.work / f"{name}.safetensors")
        shipped = shipped_weights(args.assets / name)
        for kind, weights in (("bfloat16", trained), ("4 bits", shipped)):
            loss = loss_of(name, weights, tokenizer)
            print(f"{name}, {kind}: loss {loss:.3f}, perplexity {math.exp(loss):.2f}")
    with LLM(str(args.assets / "demo")) as llm:
        for question in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            print(f"> {question}\n{llm.chat(messages, SamplingParams(max_tokens=200)).text}\n")


if __name__ == "__main__":
    main()
