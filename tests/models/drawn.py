"""Compare with the reference logits that `tests/data/parity/draw.py` wrote.

    python -m tests.models.drawn FOLDER

A line for each checkpoint: how far our logits are, as a share of what the gate of `test_parity.py`
allows, in one piece and in a chunk and single steps.
"""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from models.dense_kv import DenseCache

from mlxinfer.models import load


def off(folder: Path) -> tuple[float, float, bool]:
    """The largest error in one piece and in steps, in parts of the gate; and equal choices."""
    model = load(folder)
    with np.load(folder / "reference.npz") as reference:
        ids, expected = reference["ids"].tolist(), reference["logits"]

    def run(parts: list[list[int]]) -> np.ndarray:
        cache = DenseCache(model)
        cache.rope_variants["a"] = model.rope_variant(len(ids))
        return np.array(mx.concatenate([cache.run(model, [("a", part)]) for part in parts]))

    whole, stepped = run([ids]), run([ids[:23], *[[i] for i in ids[23:]]])
    gate = 1e-4 * max(1.0, expected.std())
    same = bool((whole.argmax(-1) == expected.argmax(-1)).all())
    return np.abs(whole - expected).max() / gate, np.abs(stepped - expected).max() / gate, same


def main() -> int:
    failed = 0
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        if (folder / "reference.npz").exists():
            whole, stepped, same = off(folder)
            right = max(whole, stepped) <= 1 and same
            failed += not right
            print(f"{folder.name:24} {whole:.3f} {stepped:.3f} {'' if right else 'DIFFERS'}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
