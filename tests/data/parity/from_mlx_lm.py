"""Write the reference logits of the cases with mlx-lm's definition as their reference.

    python tests/data/parity/from_mlx_lm.py

Those are DeepSeek V3.2 and GLM 5: small models of them were never run through transformers here.
Where the two differ by what they say, transformers counts: the epsilon of the indexer's norm is
1e-6, as in DeepSeek's own code, and mlx-lm has 1e-5.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from models.tiny import tiny_checkpoint, tiny_config  # noqa: E402

from mlxinfer.bench.peer import load_peer_model  # noqa: E402

CASES = ("deepseek_v32-v4", "glm_moe_dsa-v5")
LENGTH, MIN_LOGIT_GAP = 40, 2e-3


def reference(case: str) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (LENGTH,) and logits (LENGTH, vocab_size), the best of them never near a tie."""
    with TemporaryDirectory() as folder:
        model = load_peer_model(tiny_checkpoint(Path(folder), case))
        for layer in model.layers:
            layer.self_attn.indexer.k_norm.eps = 1e-6
        for seed in range(1, 1000):
            ids = np.random.default_rng(seed).integers(3, tiny_config(case)["vocab_size"], LENGTH)
            logits = np.array(model(mx.array(ids)[None])[0])
            top = np.sort(logits, axis=-1)
            if (top[:, -1] - top[:, -2]).min() >= MIN_LOGIT_GAP:
                return ids.astype(np.int32), logits
    raise AssertionError(f"all seeds of {case} come near a tie")


if __name__ == "__main__":
    for name in CASES:
        ids, logits = reference(name)
        np.savez_compressed(HERE / f"{name}.npz", ids=ids, logits=logits.astype(np.float32))
        print(f"{name:16} std {logits.std():.2f}")
