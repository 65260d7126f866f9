"""Large checkpoints of random bf16 weights in shards: dense, and a mixture of experts.

`python -m tests.bench.large_checkpoints FOLDER KIND BYTES TOKENIZER` makes one, in a process of
its own.
"""

import json
import shutil
import sys
from dataclasses import asdict, replace
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np

from tests.bench.checkpoints import TOKENIZER, Dense, Experts

SHARD_BYTES = 500_000_000
NOISE = 1 << 23  # different numbers; speed does not depend on them, so they come again and again
DENSE = Dense(
    **{"hidden": 2048, "inner": 6144, "layers": 1, "heads": 16, "kv_heads": 8, "head_dim": 128},
    vocab=32_000,
    max_context=4096,
)
MOE = Experts(**{**asdict(DENSE), "inner": 768}, experts=32, chosen=4)


def write_large(folder: Path, sizes: Dense, num_bytes: int, tokenizer: Path) -> None:
    """Write about `num_bytes` of weights, in as many layers as that takes."""
    folder.mkdir(parents=True)
    one, two = sizes.num_weights, replace(sizes, layers=2).num_weights
    layers = max(1, round((num_bytes / 2 - (2 * one - two)) / (two - one)))
    sizes = replace(sizes, layers=layers)
    config = {**sizes.config(), "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER:
        shutil.copyfile(tokenizer / name, folder / name)
    noise = np.random.default_rng(0).standard_normal(NOISE, dtype=np.float32) * 0.02
    _write_shards(folder, sizes.shapes(), mx.array(noise).astype(mx.bfloat16))


def _write_shards(folder: Path, shapes: dict[str, tuple[int, ...]], noise: mx.array) -> None:
    weight_map: dict[str, str] = {}
    pending: dict[str, mx.array] = {}
    for number, (name, shape) in enumerate(shapes.items(), start=1):
        size = prod(shape)
        repeated = mx.concatenate([noise] * -(-size // NOISE))
        pending[name] = repeated[:size].reshape(shape)
        if sum(a.nbytes for a in pending.values()) < SHARD_BYTES and number < len(shapes):
            continue
        file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        mx.save_safetensors(str(folder / file), pending, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(pending, file)
        pending = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


if __name__ == "__main__":
    target, kind, size, beside = sys.argv[1:]
    write_large(Path(target), DENSE if kind == "dense" else MOE, int(size), Path(beside))
