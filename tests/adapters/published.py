"""Adapters with logits of PEFT itself: how they are drawn, for the test and for the reference.

The references in tests/data/adapters are made in two steps, the second in an environment with
torch, transformers and peft (0.21):

    python -m adapters.published FOLDER               # in tests/, writes checkpoints and adapters
    python tests/data/adapters/reference.py FOLDER    # PEFT's logits, one .npy each
"""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from adapters.drawn import dense_tensors, draw, write_folder, write_peft
from models.tiny import tiny_checkpoint

MOE = "qwen3_moe-v4"
CASES = {  # name -> checkpoint
    "lora": "qwen3-v4",
    "rslora": "qwen3-v4",
    "dora": "qwen3-v4",
    "patterns": "llama-v4",
    "experts": MOE,
}
PROMPT = np.random.default_rng(5).integers(3, 96, 24).tolist()


def write_case(root: Path, name: str) -> tuple[Path, Path]:
    """The checkpoint and the adapter of a case."""
    base = tiny_checkpoint(root / CASES[name], CASES[name])
    tensors, folder = dense_tensors(base), root / name
    if name == "experts":
        return base, write_experts(folder, tensors)
    drawn = draw(tensors, 3, rank=4, dora=name == "dora", scale=1.5)
    if name == "lora":
        write_peft(folder, drawn, target_modules=r".*\.(self_attn|mlp)\.[a-z]+_proj")
    elif name == "rslora":
        write_peft(folder, drawn, use_rslora=True, lora_alpha=3.0, target_modules="all-linear")
    elif name == "patterns":
        for path in [path for path in drawn.a if "q_proj" in path]:
            drawn.a[path] = np.concatenate([drawn.a[path], drawn.a[path][:2] * 0.5])
            drawn.b[path] = np.concatenate([drawn.b[path], drawn.b[path][:, :2]], axis=1)
        for path in [path for path in drawn.a if ".1." in path]:
            del drawn.a[path]
        patterns = {"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"layers.2.mlp.up_proj": 9}}
        write_peft(folder, drawn, **patterns, layers_to_transform=[0, 2])
    else:
        write_peft(folder, drawn)
    return base, folder


def write_experts(folder: Path, tensors: dict[str, mx.array]) -> Path:
    """Parameters of experts, as transformers 5 has them, and attention beside them."""
    rng, rank, arrays = np.random.default_rng(4), 2, {}
    paths = {name.partition(".experts.")[0] for name in tensors if ".experts.0." in name}
    for path in sorted(paths):
        count = sum(f"{path}.experts.{i}.up_proj.weight" in tensors for i in range(99))
        inner, hidden = tensors[f"{path}.experts.0.up_proj.weight"].shape
        front = f"base_model.model.{path}.experts"
        sizes = {f"{front}.base_layer": (hidden, 2 * inner), front: (inner, hidden)}
        for name, (inputs, outputs) in sizes.items():
            a = rng.normal(size=(count * rank, inputs)).astype(np.float32)
            b = rng.normal(size=(outputs, count * rank)).astype(np.float32) * 0.05
            arrays[f"{name}.lora_A.weight"] = mx.array(a)
            arrays[f"{name}.lora_B.weight"] = mx.array(b.astype(np.float32))
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 4,
        "target_modules": [],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "bias": "none",
    }
    return write_folder(folder, "adapter_model.safetensors", arrays, config)


if __name__ == "__main__":
    for case in CASES:
        write_case(Path(sys.argv[1]), case)
