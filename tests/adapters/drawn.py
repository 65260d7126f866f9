"""Random adapters in either layout for tiny models, and the same merged into their weights by hand.

The merge is numpy's, on the tensors of the checkpoint: nothing of it is shared with the library.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from models.tiny import arrays_in, config_of, write
from numpy.typing import NDArray

Floats = NDArray[np.float32]
DENSE = r"\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|qkv_proj|gate_up_proj|fc1|fc2|"
DENSE += r"in_proj\w*|out_proj|kv_a_proj_with_mqa|q_a_proj|q_b_proj|w1|w2|w3|"
DENSE += r"w[qkvr]_d[uv]|wo_ud)\.weight$"


@dataclass
class Drawn:
    """An adapter: what it adds to each matrix of a checkpoint, and how it is written."""

    rank: int
    scale: float
    a: dict[str, Floats] = field(default_factory=dict)  # by path, (r, in)
    b: dict[str, Floats] = field(default_factory=dict)  # (out, r)
    lengths: dict[str, Floats] = field(default_factory=dict)  # of DoRA, (out,)

    def merged(self, path: str, weight: Floats) -> Floats:
        """The matrix (out, in) with the adapter."""
        if path not in self.a:
            return weight
        whole = weight + self.scale * self.b[path] @ self.a[path]
        if self.lengths:
            norms = np.linalg.norm(whole, axis=1, keepdims=True)
            whole = self.lengths[path][:, None] * whole / norms
        return whole.astype(np.float32)


def draw(
    tensors: Mapping[str, mx.array],
    seed: int,
    *,
    rank: int = 4,
    pattern: str = DENSE,
    dora: bool = False,
    scale: float = 2.0,
    strength: float = 0.6,
) -> Drawn:
    """Matrices for every dense one with a name that matches.

    `strength`: of the change, as a share of the matrix; enough to change most tokens.
    """
    rng = np.random.default_rng(seed)
    drawn = Drawn(rank, scale)
    for name in sorted(tensors):
        weight = tensors[name]
        if weight.ndim != 2 or not re.search(pattern, name):
            continue
        out_dims, in_dims = weight.shape
        path, size = name.removesuffix(".weight"), float(mx.std(weight.astype(mx.float32)))
        drawn.a[path] = rng.normal(size=(rank, in_dims)).astype(np.float32)
        b = rng.normal(size=(out_dims, rank)) * size * strength / (scale * rank**0.5)
        drawn.b[path] = b.astype(np.float32)
        if dora:
            drawn.lengths[path] = (
                np.linalg.norm(np.array(weight.astype(mx.float32)), axis=1)
                * rng.uniform(0.8, 1.25, out_dims)
            ).astype(np.float32)
    assert drawn.a, "nothing to adapt"
    return drawn


def write_peft(folder: Path, drawn: Drawn, **config: Any) -> Path:
    """The adapter in PEFT's layout."""
    tensors: dict[str, mx.array] = {}
    for path in drawn.a:
        tensors[f"base_model.model.{path}.lora_A.weight"] = mx.array(drawn.a[path])
        tensors[f"base_model.model.{path}.lora_B.weight"] = mx.array(drawn.b[path])
        if drawn.lengths:
            name = f"base_model.model.{path}.lora_magnitude_vector"
            tensors[name] = mx.array(drawn.lengths[path])
    stated = {
        "peft_type": "LORA",
        "r": drawn.rank,
        "lora_alpha": drawn.scale * drawn.rank,
        "target_modules": sorted({path.rpartition(".")[2] for path in drawn.a}),
        "use_dora": bool(drawn.lengths),
        "bias": "none",
        **config,
    }
    return write_folder(folder, "adapter_model.safetensors", tensors, stated)


def write_mlx(folder: Path, drawn: Drawn, num_layers: int = -1, **config: Any) -> Path:
    """The adapter in mlx-lm's layout."""
    tensors: dict[str, mx.array] = {}
    for path in drawn.a:
        tensors[f"{path}.lora_a"] = mx.array(np.ascontiguousarray(drawn.a[path].T))
        tensors[f"{path}.lora_b"] = mx.array(np.ascontiguousarray(drawn.b[path].T))
        if drawn.lengths:
            tensors[f"{path}.m"] = mx.array(drawn.lengths[path])
    stated = {
        "fine_tune_type": "dora" if drawn.lengths else "lora",
        "num_layers": num_layers,
        "lora_parameters": {"rank": drawn.rank, "scale": drawn.scale, "dropout": 0.0},
        **config,
    }
    return write_folder(folder, "adapters.safetensors", tensors, stated)


def write_folder(
    folder: Path, file: str, tensors: Mapping[str, mx.array], config: Mapping[str, Any]
) -> Path:
    """Tensors and config of an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / file), dict(tensors))
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge(base: Path, drawn: Drawn, out: Path) -> Path:
    """The checkpoint with the adapter merged into its dense matrices; quantised ones become so."""
    tensors = dense_tensors(base)
    config = config_of(base)
    config.pop("quantization", None)
    for path in drawn.a:
        plain = np.array(tensors[f"{path}.weight"].astype(mx.float32))
        tensors[f"{path}.weight"] = mx.array(drawn.merged(path, plain))
    return write(out, config, tensors)


def dense_tensors(base: Path) -> dict[str, mx.array]:
    """The tensors of a checkpoint, quantised matrices as numbers."""
    tensors = arrays_in(base)
    stated = config_of(base).get("quantization")
    for path in [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]:
        parts = [tensors.pop(f"{path}.{part}", None) for part in ("weight", "scales", "biases")]
        how = stated.get(path, stated)
        form = (how["group_size"], how["bits"], how.get("mode", "affine"))
        tensors[f"{path}.weight"] = mx.dequantize(*parts, *form)
    return tensors
