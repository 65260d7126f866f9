"""Write reference logits of texts inside of models that see: transformers in float32.

Needs torch and transformers, which nothing else here does:

    python tests/data/parity/wrappers.py

`wrappers.json` has the config of each one's texts, which is read: a new one needs what differs from
its type's defaults. It gets the tensors under the names that transformers saves; their values come
from `tests/models/random_weights.py`, by name. `wrappers.npz` gets the logits.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from models.names import shortened  # noqa: E402
from models.random_weights import LESS_ONE, random_tensor  # noqa: E402

LENGTH = 16
TEXTS: dict[str, dict[str, Any]] = {
    outer: case["config"]["text_config"]
    for outer, case in json.loads((HERE / "wrappers.json").read_text()).items()
}
VISION = {
    **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "depth": 1},
    **{"num_attention_heads": 2, "num_heads": 2, "image_size": 32, "patch_size": 16},
    **{"embed_dim": 8, "out_hidden_size": 64, "spatial_merge_size": 2},
}
CLIP = {**VISION, "model_type": "clip_vision_model"}
OUTER: dict[str, dict[str, Any]] = {  # beside the texts' part
    "fast_vlm": {"vision_config": CLIP},  # any tower: that of the release needs a package
    "granite4_vision": {
        **{"deepstack_layer_map": [], "downsample_rate": "1/2"},
        "vision_config": {**CLIP, "hidden_size": 64},
    },
    "ovis2": {"vocab_size": 96, "hidden_size": 64},
    "perception_lm": {"vision_config": {**CLIP, "model_args": {"embed_dim": 8}}},
}


def config_of(outer: str) -> Any:
    """transformers' config of a tiny model of this type."""
    sight = CONFIG_MAPPING[outer]().vision_config
    vision = {key: value for key, value in VISION.items() if hasattr(sight, key)}
    config = {"text_config": TEXTS[outer], "tie_word_embeddings": False}
    config["vision_config"] = {**vision, "model_type": sight.model_type}
    return CONFIG_MAPPING[outer](**{**config, **OUTER.get(outer, {})})


def reference(outer: str) -> tuple[dict[str, Any], dict[str, Any], np.ndarray, np.ndarray]:
    """config.json, tensors in short, token ids (LENGTH,) and logits (LENGTH, vocab_size)."""
    config = config_of(outer)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
        with safe_open(folder / "model.safetensors", "pt") as file:
            shapes = {
                published(key): tuple(file.get_slice(key).get_shape())
                for key in file.keys()  # noqa: SIM118
            }
        tensors = {
            key: torch.tensor(random_tensor(key, shape, 0, less_one=has_less_one(written)))
            for key, shape in shapes.items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    ids = np.random.default_rng(1).integers(3, TEXTS[outer]["vocab_size"], LENGTH)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids)[None]).logits[0].numpy()
    return written, shortened(shapes), ids.astype(np.int32), logits.astype(np.float32)


def published(name: str) -> str:
    """The name of a tensor in published checkpoints.

    transformers 5.24 writes layers of Kimi K2.5 as blocks, and reads both.
    """
    return name.replace("language_model.model.blocks.", "language_model.model.layers.")


def has_less_one(config: dict[str, Any]) -> bool:
    return bool(config["text_config"]["model_type"].startswith(LESS_ONE))


def main() -> None:
    cases, arrays = {}, {}
    for outer in TEXTS:
        config, tensors, arrays[f"{outer}.ids"], logits = reference(outer)
        cases[outer] = {"config": kept(config), "tensors": tensors}
        arrays[f"{outer}.logits"] = logits
        print(f"{outer:16} std {logits.std():.2f}, {len(tensors)} kinds of tensors")
    lines = [f"{json.dumps(key)}: {json.dumps(case)}" for key, case in cases.items()]
    (HERE / "wrappers.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    np.savez_compressed(HERE / "wrappers.npz", **arrays)


def kept(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the text's part and little of the rest."""
    keys = ("model_type", "text_config", "tie_word_embeddings")
    return {**{key: config[key] for key in keys if key in config}, "vision_config": {}}


if __name__ == "__main__":
    main()
