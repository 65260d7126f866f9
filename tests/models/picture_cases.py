"""Tiny configurations of models that see, and prompts with pictures. No mlx, no torch.

The script that generates references and the tests that compare with them both read this, so neither
weights nor pixels are stored. `pictures.yml` has the cases. A patch of Qwen's families has two
frames of 4 x 4 pixels.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from models.cases import CASES, without
from models.names import expanded
from models.random_weights import random_tensor

DATA = Path(__file__).parents[1] / "data" / "pictures"
IMAGE, BEGIN, END, VIDEO, AUDIO = 90, 91, 92, 93, 94


class Case(NamedTuple):
    """A model and the pictures of its prompt.

    Attributes:
        config: of config.json.
        pictures: of each picture the (rows, columns) of patches of its tiles.
        features: rows and columns of patches that one feature stands for.
        patch: numbers of a patch.
        unit: pixels are from 0 to 1, as Gemma 4 has them; else from -1 to 1.
    """

    config: dict[str, Any]
    pictures: tuple[tuple[tuple[int, int], ...], ...]
    features: tuple[int, int]
    patch: int
    unit: bool = False

    def num_features(self, grid: tuple[int, int]) -> int:
        """Of a tile."""
        return grid[0] // self.features[0] * (grid[1] // self.features[1])


def _resolved(config: dict[str, Any]) -> dict[str, Any]:
    """A config with the case that it names: less some of its fields, and with others."""
    case = without(CASES[config["case"]], *config.get("less", ())) if "case" in config else {}
    result = case | without(config, "case", "less")
    if "text_config" in result:
        result["text_config"] = _resolved(result["text_config"])
    return result


def _case(entry: dict[str, Any]) -> Case:
    pictures = tuple(tuple(tuple(grid) for grid in tiles) for tiles in entry["pictures"])
    config, features = _resolved(entry["config"]), tuple(entry["features"])
    return Case(**(entry | {"config": config, "pictures": pictures, "features": features}))


_MODELS = yaml.load(Path(__file__).with_name("pictures.yml").read_text(), yaml.CSafeLoader)
PICTURE_CASES = {name: _case(entry) for name, entry in _MODELS["models"].items()}
QWEN_CASES = {name: _case(entry) for name, entry in _MODELS["qwen"].items()}
ALL_PICTURE_CASES = {**PICTURE_CASES, **QWEN_CASES}


def picture_tensors(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of a case's checkpoint, as transformers 5 names it."""
    table = json.loads((DATA / "tensors.json").read_text())[name]
    model_type = ALL_PICTURE_CASES[name].config["model_type"]
    return {
        key: picture_tensor(key, shape, seed, model_type) for key, shape in expanded(table).items()
    }


def picture_tensor(name: str, shape: tuple[int, ...], seed: int, model_type: str) -> np.ndarray:
    """float32 values that depend on name, shape and seed alone; no kind is trivial."""
    if "language_model." in name or name.startswith(("lm_head", "model.llm.", "model.attn_res")):
        less_one = model_type.startswith(("gemma3", "qwen3_5"))
        result = random_tensor(name, shape, seed, less_one=less_one)
        if model_type.startswith("gemma4") and name.endswith("q_norm.weight"):
            result *= np.float32(0.5)  # nothing else scales the scores, and rounding is amplified
        return result
    noise = _noise(f"{seed}:{name}", shape)
    if name.endswith(("_min", "_max")):  # limits that some numbers pass
        noise = (1.2 + 0.3 * np.abs(noise)) * (-1 if name.endswith("_min") else 1)
    elif name.endswith(("q_norm.weight", "k_norm.weight")):  # else rounding is amplified
        noise = 0.4 + 0.1 * noise
    elif name.endswith("mm_soft_emb_norm.weight"):
        noise = 0.2 * noise
    elif len(shape) == 1 and ("norm" in name or "ln" in name) and name.endswith("weight"):
        noise = 1 + 0.2 * noise
    elif "position_embedding" in name or "pos_embedding" in name:
        noise = 0.4 * noise
    elif name.endswith("std_scale"):
        noise = 1 + 0.2 * noise
    elif len(shape) == 1:
        noise = 0.3 * noise
    elif name.endswith("mm_input_projection_weight"):
        noise = noise / np.sqrt(shape[0])
    else:
        noise = noise / np.sqrt(np.prod(shape[1:]))
    return np.asarray(noise, np.float32)


def pixels(name: str) -> list[list[np.ndarray]]:
    """Of each picture of a case the patches (rows * columns, patch) of its tiles, in raster order.

    Numbers of a patch are in the order (channel, row, column).
    """
    case = ALL_PICTURE_CASES[name]
    return [
        [_pixels(case, f"{name}:{i}:{j}", grid) for j, grid in enumerate(tiles)]
        for i, tiles in enumerate(case.pictures)
    ]


def _pixels(case: Case, key: str, grid: tuple[int, int]) -> np.ndarray:
    noise = np.tanh(_noise(key, (grid[0] * grid[1], case.patch)))
    return np.asarray(0.5 + 0.5 * noise if case.unit else noise, np.float32)


def _noise(key: str, shape: tuple[int, ...]) -> np.ndarray:
    digest = hashlib.sha256(key.encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little")).standard_normal(shape)


def prompt(name: str) -> tuple[list[int], list[range]]:
    """Token ids of text and pictures in turn, and where the features of each picture stand.

    The first picture is at the very start, and the last one is followed by text.
    """
    case, draw = ALL_PICTURE_CASES[name], np.random.default_rng(5)
    ids: list[int] = []
    places = []
    for tiles in case.pictures:
        count = sum(case.num_features(grid) for grid in tiles)
        places.append(range(len(ids) + 1, len(ids) + 1 + count))
        ids += [BEGIN, *[IMAGE] * count, END, *draw.integers(6, 80, 5).tolist()]
    return ids, places


def older_names(tensors: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The same tensors as published checkpoints name them."""
    return {_older(name, model_type): value for name, value in tensors.items()}


def _older(name: str, model_type: str) -> str:
    if model_type == "inkling2_loop":
        return name
    if model_type in ("gemma4", "gemma4_unified"):  # as conversions for MLX have them
        name = name.removeprefix("model.")
        return name.replace("language_model.", "language_model.model.", 1)
    tower = "vision_tower."
    if model_type in ("gemma3", "lfm2_vl"):
        name = name.replace(tower, f"{tower}vision_model.", 1)
    if model_type == "lfm2_vl":
        return name
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    name = name.removeprefix("model.")
    return name.replace("language_model.", "language_model.model.", 1)


def published_names(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    """The same tensors as published checkpoints have them.

    Qwen2-VL and Qwen2.5-VL have no `language_model.` between; stacks of experts of Qwen3-VL-MoE
    have inputs before outputs.
    """
    names = {}
    for key, value in tensors.items():
        if name.startswith("qwen2"):
            key = key.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        stacked = key.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        swap = stacked and name == "qwen3_vl_moe"
        names[key] = value.swapaxes(1, 2) if swap else value
    return names


def converted_names(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same tensors as mlx-vlm's converter writes them: other names, colours of a patch last.

    Experts are left as they are.
    """
    names = {}
    for key, value in tensors.items():
        key = key.removeprefix("model.").replace("visual.", "vision_tower.")
        key = key.replace("language_model.", "language_model.model.")
        if key.startswith("lm_head."):
            key = f"language_model.{key}"
        last = key.endswith("patch_embed.proj.weight")
        names[key] = value.transpose(0, 2, 3, 4, 1) if last else value
    return names
