"""mlx-lm's DWQ on a text file, in float32: what its own command does with a data set of the hub.

Its method, its loss and its optimizer are its own. Two things are not: products with quantised
matrices are products of the float32 values that their codes stand for, because MLX's quantised ones
take a hundred times as long on a CPU, and their gradients more; and the text is as short as a
calibration text, so it comes again and again.
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx_lm.quant.dwq import dwq_quantize
from mlx_lm.utils import load, quantize_model, save

LENGTH, BATCH, HELD_OUT = 257, 4, 4  # tokens, sequences a step, sequences to validate on


class PlainLinear(nn.QuantizedLinear):
    """A quantised matrix with the products of its values."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., in) -> (..., out)."""
        y = x @ values(self).T
        return y + self.bias if "bias" in self else y


class PlainEmbedding(nn.QuantizedEmbedding):
    """The same of a table."""

    def __call__(self, x: mx.array) -> mx.array:
        """Rows of the table."""
        return values(self)[x]

    def as_linear(self, x: mx.array) -> mx.array:
        """x (..., in) -> (..., out)."""
        return x @ values(self).T


def values(module: Any) -> mx.array:
    """What the codes of a matrix stand for, (out, in), with gradients for scales and biases."""
    if "_codes" not in module:
        like = mx.ones_like(module.scales)
        how = module.group_size, module.bits
        codes = mx.dequantize(module.weight, like, mx.zeros_like(like), *how)
        module._codes = codes.reshape(*codes.shape[:-1], -1, module.group_size)
    groups = module._codes * module.scales[..., None] + module.biases[..., None]
    return mx.flatten(groups, -2, -1)


def with_plain_products(model: nn.Module) -> None:
    """Replace the products of all quantised matrices."""
    for _, module in model.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            module.__class__ = PlainLinear
        elif isinstance(module, nn.QuantizedEmbedding):
            module.__class__ = PlainEmbedding


def main() -> None:
    """Parse the command line, learn and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--model", "--mlx-path"):
        parser.add_argument(name, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    model, tokenizer, config = load(args.model, return_config=True)
    student: Any = copy.deepcopy(model)
    _, config = quantize_model(student, config, group_size=64, bits=args.bits)
    with_plain_products(student)
    ids = tokenizer.encode(args.text.read_text(encoding="utf-8"))
    sequences = [
        (ids[start : start + LENGTH], 0) for start in range(0, len(ids) - LENGTH + 1, LENGTH)
    ]
    held_out, taught = sequences[:HELD_OUT], sequences[HELD_OUT:]
    while len(taught) < args.steps * BATCH:
        taught += taught
    dwq_quantize(
        student,
        lambda batch, *_, **__: model(batch),
        optim.Adam(learning_rate=args.learning_rate, bias_correction=True),
        taught[: args.steps * BATCH],
        held_out,
        BATCH,
        LENGTH,
        seed=0,
        dtype=mx.float32,
    )
    save(args.mlx_path, args.model, student, tokenizer, config)


if __name__ == "__main__":
    main()
