"""Random weights that depend on a seed and the tensor's name alone. No mlx, no torch.

The script that generates reference logits and the tests that compare with them both call this, so
no weights are stored.
"""

import hashlib
from typing import Any

import numpy as np
from models.shapes import shapes

# Types whose norm weights are stored less one.
LESS_ONE = (
    "gemma2",
    "gemma3_",
    "qwen3_next",
    "qwen3_5",
    "muse_glimmer",
    "step3p5",
    "qwen4",
    "minimax_m3",
)


def random_tensor(name: str, shape: tuple[int, ...], seed: int, *, less_one: bool) -> np.ndarray:
    """Values that depend on name, shape and seed alone, float32 or int64; no kind is trivial.

    `less_one`: norm weights are stored less one, but for those inside of a recurrent layer.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    if "ple_embedding" in name and len(shape) == 1:  # how ids become rows of a table
        item = np.arange(shape[0], dtype=np.int64)
        if name.endswith("multipliers"):
            return int.from_bytes(digest[:5], "little") * (2 * item + 3) | 1
        return 21 * item if name.endswith("offsets") else 11 + 2 * item
    if name.endswith("tid2eid"):  # whole numbers, experts of each token
        count = 6
        return (
            np.random.default_rng(digest[0]).permuted(
                np.tile(np.arange(count), (shape[0], 1)), axis=1
            )[:, : shape[1]]
        ).astype(np.int64)
    noise = np.random.default_rng(int.from_bytes(digest[:8], "little")).standard_normal(shape)
    if name.endswith(("norm.weight", "norm_f.weight")) or "layernorm_" in name:
        values = 0.2 * noise + (0.0 if less_one and "linear_attn" not in name else 1.0)
    elif name.endswith(("scale", "scalar")):
        values = 0.2 * noise + 1.0
    elif name.endswith("sinks"):
        values = noise
    elif "embed_tokens" in name or "embeddings" in name:
        values = 0.4 * noise
    elif len(shape) < 2 or name.endswith("_bias"):
        values = 0.3 * noise
    else:
        inputs_first = "mlp.experts.gate_up_proj" in name or "feed_forward.experts.gate_up" in name
        in_dims = shape[-2] if inputs_first else shape[-1]
        gain = (
            3.0
            if "lm_head" in name
            or name == "head.weight"
            or "router" in name
            or ".gate.weight" in name
            else 1.0
        )
        values = noise * gain / np.sqrt(in_dims)
    return np.asarray(values, np.float32)


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint with this config, by its name on the hub."""
    less_one = config["model_type"].startswith(LESS_ONE)
    return {
        name: random_tensor(name, shape, seed, less_one=less_one)
        for name, shape in shapes(config).items()
    }


def coarse(values: np.ndarray, name: str) -> np.ndarray:
    """Values that cost few bits; matrices have three of them, exact in every type."""
    if values.dtype.kind == "i":
        return values
    if values.ndim < 2:
        return np.asarray(np.round(values * 256) / np.float32(256))
    spread = float(values.std())
    in_blocks = values.ndim < 4 and values.shape[-1] % 32 == 0 and "mm_input" not in name
    step = (
        127 * np.float32(np.float16(spread * 1.22 / 127))
        if in_blocks
        else np.float32(np.round(spread * 312) / 256)
    )
    if ".ffn.experts." in name:  # of DeepSeek V4, which are in MXFP4
        step = np.exp2(np.round(np.log2(step)))
    return np.where(np.abs(values) < 0.43 * spread, 0, np.sign(values)).astype(np.float32) * step
