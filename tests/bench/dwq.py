"""mlx-lm's DWQ on a text file, in float32: what its own command does with a data set of the hub.

Its defaults are 2,048 sequences of 1,025 tokens at a learning rate of 1e-6. A step of 1,028 tokens
takes seconds on a CPU, so there are few, at a rate that lets scales move as far in all.
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx_lm.quant.dwq import dwq_quantize
from mlx_lm.utils import load, quantize_model, save

LENGTH, BATCH, HELD_OUT = 257, 4, 4  # tokens, sequences a step, sequences to validate on
TRAVEL = 512 * 1e-6  # of a scale, over all steps


def main() -> None:
    """Parse the command line, learn and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--model", "--mlx-path"):
        parser.add_argument(name, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    model, tokenizer, config = load(args.model, return_config=True)
    student: Any = copy.deepcopy(model)
    _, config = quantize_model(student, config, group_size=64, bits=args.bits)
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
        optim.Adam(learning_rate=TRAVEL / args.steps, bias_correction=True),
        taught[: args.steps * BATCH],
        held_out,
        BATCH,
        LENGTH,
        seed=0,
        dtype=mx.float32,
    )
    save(args.mlx_path, args.model, student, tokenizer, config)
