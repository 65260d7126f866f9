"""Tiny configurations of models that see, and prompts with pictures. No mlx, no torch.

The script that generates references and the tests that compare with them both read this, so neither
weights nor pixels are stored.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from models.cases import CASES
from models.names import expanded
from models.qwen_picture_cases import QWEN_PICTURES
from models.random_weights import random_tensor
from models.recorded_cases import without

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


_GEMMA_IDS = {"image_token_id": IMAGE, "boi_token_id": BEGIN, "eoi_token_id": END}
_GEMMA4_IDS = {
    **_GEMMA_IDS,
    "video_token_id": VIDEO,
    "audio_token_id": AUDIO,
    "audio_config": None,
}
_GEMMA4_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "position_embedding_size": 64,
    "patch_size": 16,
    "pooling_kernel_size": 3,
}
_GEMMA4_PICTURES = (((6, 9),), ((9, 12),))
_SIGLIP2 = {
    "model_type": "siglip2_vision_model",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_patches": 16,
    "patch_size": 16,
    "vision_use_head": False,
}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "hidden_act": "silu",
}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 7,
    "vision_use_head": False,
}


def _text(case: str, **changes: Any) -> dict[str, Any]:
    """The language model of a case without pictures."""
    return {**CASES[case], **changes}


PICTURE_CASES = {
    "gemma4_e": Case(
        {
            "tie_word_embeddings": False,  # answers of tied ones repeat a token
            "model_type": "gemma4",
            "text_config": _text("gemma4_e-v4", pad_token_id=3),
            "vision_config": {**_GEMMA4_VISION, "use_clipped_linears": True},
            **_GEMMA4_IDS,
        },
        _GEMMA4_PICTURES,
        (3, 3),
        768,
        unit=True,
    ),
    "gemma4_moe": Case(
        {
            "tie_word_embeddings": False,
            "model_type": "gemma4",
            "text_config": _text("gemma4_text-v4", use_bidirectional_attention="vision"),
            "vision_config": {**_GEMMA4_VISION, "standardize": True},
            **_GEMMA4_IDS,
        },
        _GEMMA4_PICTURES,
        (3, 3),
        768,
        unit=True,
    ),
    "gemma4_dense": Case(
        {
            "model_type": "gemma4",
            "text_config": _text("gemma4_text-v5", use_bidirectional_attention="vision"),
            "vision_config": {
                **_GEMMA4_VISION,
                "standardize": True,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "rope_parameters": {"rope_type": "axial", "rope_theta": 30.0},
            },
            **_GEMMA4_IDS,
            "tie_word_embeddings": False,
        },
        (((3, 3),), ((15, 6),), ((3, 6),)),
        (3, 3),
        768,
        unit=True,
    ),
    "gemma4_unified": Case(
        {
            "tie_word_embeddings": False,
            "model_type": "gemma4_unified",
            "text_config": {
                **without(
                    _text("gemma4_text-v4", model_type="gemma4_unified_text"),
                    *("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"),
                    *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
                ),
            },
            "vision_config": {
                "model_type": "gemma4_unified_vision",
                "patch_size": 16,
                "pooling_kernel_size": 3,
                "mm_embed_dim": 40,
                "mm_posemb_size": 24,
                "output_proj_dims": 40,
            },
            **_GEMMA4_IDS,
        },
        (((2, 3),), ((3, 4),)),
        (1, 1),
        6912,
        unit=True,
    ),
    "lfm2_vl-norm": Case(
        {
            "model_type": "lfm2_vl",
            "text_config": _text("lfm2-v4"),
            "vision_config": _SIGLIP2,
            "image_token_id": IMAGE,
            "projector_hidden_size": 56,
            "projector_use_layernorm": True,
            "tie_embedding": True,
        },
        (((4, 6),), ((8, 8), (8, 8), (4, 10))),
        (2, 2),
        768,
    ),
    "lfm2_vl": Case(
        {
            "model_type": "lfm2_vl",
            "text_config": _text("lfm2-v5"),
            "vision_config": {**_SIGLIP2, "num_patches": 36, "hidden_act": "gelu"},
            "image_token_id": IMAGE,
            "projector_hidden_size": 40,
            "projector_use_layernorm": False,
            "projector_bias": False,
            "tie_word_embeddings": False,
        },
        (((2, 2),), ((2, 14),)),
        (2, 2),
        768,
    ),
    "mistral3": Case(
        {
            "model_type": "mistral3",
            "text_config": _text("mistral-v4"),
            "vision_config": {**_PIXTRAL, "patch_size": 14, "image_size": 280},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "spatial_merge_size": 2,
            "tie_word_embeddings": False,
        },
        (((4, 6),), ((6, 8),)),
        (2, 2),
        588,
    ),
    "ministral3": Case(
        {
            "tie_word_embeddings": False,
            "model_type": "mistral3",
            "text_config": _text("ministral3-v5"),
            "vision_config": {
                **_PIXTRAL,
                "patch_size": 14,
                "image_size": 280,
                "hidden_act": "gelu",
                "num_attention_heads": 2,
                "head_dim": 24,
                "rope_parameters": {"rope_type": "axial", "rope_theta": 500.0},
            },
            "image_token_index": IMAGE,
            "vision_feature_layer": -2,
            "spatial_merge_size": 2,
            "multimodal_projector_bias": True,
        },
        (((2, 4),), ((8, 4),)),
        (2, 2),
        588,
    ),
    "pixtral": Case(
        {
            "model_type": "llava",
            "text_config": _text("mistral-v4"),
            "vision_config": {**_PIXTRAL, "patch_size": 16, "image_size": 256},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "tie_word_embeddings": False,
        },
        (((2, 3),), ((3, 5),)),
        (1, 1),
        768,
    ),
    "gemma3": Case(
        {
            "tie_word_embeddings": False,
            "model_type": "gemma3",
            "text_config": _text("gemma3_text-v4"),
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 16,
            "image_token_index": IMAGE,
            "boi_token_index": BEGIN,
            "eoi_token_index": END,
        },
        (((8, 8),), ((8, 8),)),
        (2, 2),
        147,
    ),
    "gemma3-v5": Case(
        {
            "model_type": "gemma3",
            # transformers' model that sees leaves the soft cap out; no published model has one.
            "text_config": without(_text("gemma3_text-v5"), "final_logit_softcapping"),
            "vision_config": {**_SIGLIP, "num_attention_heads": 2, "layer_norm_eps": 1e-5},
            "mm_tokens_per_image": 4,
            "image_token_id": IMAGE,
            "boi_token_id": BEGIN,
            "eoi_token_id": END,
        },
        (((8, 8),), ((8, 8),)),
        (4, 4),
        147,
    ),
}


QWEN_CASES = {name: Case(*case) for name, case in QWEN_PICTURES.items()}
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
    if "language_model." in name or name.startswith("lm_head"):
        less_one = model_type.startswith(("gemma3", "qwen3_5"))
        found = random_tensor(name, shape, seed, less_one=less_one)
        if model_type.startswith("gemma4") and name.endswith("q_norm.weight"):
            found *= np.float32(0.5)  # nothing else scales the scores, and rounding is amplified
        return found
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
