"""Conversations with pictures for the tiny models that see. No mlx, no torch.

The script that generates references and the tests that compare with them both read this.
"""

from typing import Any

import numpy as np
from models.picture_cases import ALL_PICTURE_CASES, AUDIO, BEGIN, END, IMAGE, VIDEO
from PIL import Image

NUM_TOKENS = 8  # of an answer
NEVER = (IMAGE, VIDEO, AUDIO)  # in an answer: each would be a feature without a picture
BREAK, VIEW = 95, 89
TOKENS = {  # of the vocabularies, by their text
    "<|image_start|>": BEGIN,
    "<|image_end|>": END,
    "<|img_thumbnail|>": VIEW,
    "[IMG_BREAK]": BREAK,
    "[IMG_END]": END,
    **{
        f"<|img_row_{row}_col_{column}|>": 77 + 4 * row + column
        for row in (1, 2)
        for column in (1, 2, 3, 4)
    },
}
_PIXTRAL = {"size": {"longest_edge": 112}}
_GEMMA4 = {"max_soft_tokens": 70, "patch_size": 16, "pooling_kernel_size": 3}
_LFM2 = {
    "encoder_patch_size": 16,
    "tile_size": 64,
    "min_image_tokens": 2,
    "max_image_tokens": 4,
    "min_tiles": 2,
    "max_tiles": 4,
}
_QWEN = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
_QWEN2 = {**_QWEN, "min_pixels": 256, "max_pixels": 1600}
_QWEN3 = {
    **_QWEN,
    "size": {"shortest_edge": 256, "longest_edge": 1600},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
SETTINGS: dict[str, dict[str, Any]] = {  # of preprocessor_config.json
    "gemma4_e": _GEMMA4,
    "gemma4_moe": _GEMMA4,
    "gemma4_dense": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "lfm2_vl-norm": _LFM2,
    "lfm2_vl": {**_LFM2, "do_image_splitting": False, "min_image_tokens": 1},
    "mistral3": {**_PIXTRAL, "patch_size": 14},
    "ministral3": {**_PIXTRAL, "patch_size": 14},
    "pixtral": {**_PIXTRAL, "patch_size": 16},
    "gemma3": {"size": {"height": 56, "width": 56}},
    "gemma3-v5": {"size": {"height": 56, "width": 56}},
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl-flat": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
}


def around(name: str) -> tuple[list[int], list[int]]:
    """Tokens that the template of a model writes before and after a picture."""
    return ([BEGIN], [END]) if name.startswith("qwen") else ([], [])


def conversation_config(name: str) -> dict[str, Any]:
    """The config of a case, for longer prompts."""
    config = dict(ALL_PICTURE_CASES[name].config)
    if "text_config" not in config:
        return {**config, "max_position_embeddings": 1024}
    return {**config, "text_config": {**config["text_config"], "max_position_embeddings": 1024}}


def picture(number: int) -> Image.Image:
    """One of some pictures of shapes, wide, tall and square."""
    width, height = [(150, 60), (45, 130), (64, 64), (9, 7)][number]
    rows, columns = np.mgrid[:height, :width]
    levels = np.stack([rows * 3 + number * 40, columns * 2, (rows + columns) * 5 % 256], -1)
    levels[height // 4 : height // 2, width // 3 : width // 2] = (250, 20 * number, 10)
    return Image.fromarray((levels % 256).astype(np.uint8))


Part = int | list[int]  # the number of a picture, or token ids of text

# What is asked, turn by turn: the answer to a turn stands before the next.
CONVERSATIONS: dict[str, list[list[Part]]] = {
    "first": [[0, [7, 8, 9]], [[11, 12], 1, [13]]],
    "between": [[[20, 21, 22], 1, [23], 2, [24, 25]], [[26, 27]]],
    "last": [[[30, 31, 32, 33], 3, 0]],
}
