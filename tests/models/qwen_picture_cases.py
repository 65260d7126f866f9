"""Tiny configurations of Qwen's families that see, as in `picture_cases.py`. No mlx, no torch.

Of a model: its config, the (rows, columns) of patches of its pictures' tiles, rows and columns of
patches that one feature stands for, numbers of a patch. A patch has two frames of 4 x 4 pixels.
"""

from typing import Any

from models.cases import CASES
from models.recorded_cases import without

_IDS = {
    "image_token_id": 90,
    "vision_start_token_id": 91,
    "vision_end_token_id": 92,
    "video_token_id": 93,
}
_VISION = {
    "depth": 4,
    "hidden_size": 48,
    "num_heads": 3,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN3 = {
    **_VISION,
    "intermediate_size": 80,
    "hidden_act": "gelu_pytorch_tanh",
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [],
}
_PICTURES = (((4, 6),), ((2, 2),), ((10, 4),))
_ROWS = 2 * 3 * 4 * 4


def _text(case: str, model_type: str, **changes: Any) -> dict[str, Any]:
    """The language model of a case without pictures."""
    return {**CASES[case], **changes, "model_type": model_type}


def _old(case: str, sections: list[int], **changes: Any) -> dict[str, Any]:
    """A language model's rope in the spelling of transformers 4."""
    scaling = {"type": "mrope", "mrope_section": sections, **changes}
    return {**CASES[case], "rope_theta": 500.0, "rope_scaling": scaling}


QWEN_PICTURES: dict[str, tuple[Any, ...]] = {
    "qwen3_5": (
        {
            "model_type": "qwen3_5",
            "text_config": CASES["qwen3_5_text-v5"],
            "vision_config": {**_QWEN3, "model_type": "qwen3_5"},
            **_IDS,
            "tie_word_embeddings": False,
        },
        _PICTURES,
        (2, 2),
        _ROWS,
    ),
    "qwen3_5_moe": (
        {
            "model_type": "qwen3_5_moe",
            "text_config": CASES["qwen3_5_moe_text-v5"],
            "vision_config": {**_QWEN3, "model_type": "qwen3_5_moe", "num_position_embeddings": 9},
            **_IDS,
            "tie_word_embeddings": True,
        },
        _PICTURES[::-1],
        (2, 2),
        _ROWS,
    ),
    "qwen3_vl": (
        {
            "model_type": "qwen3_vl",
            "text_config": {
                **CASES["qwen3-v4"],
                "model_type": "qwen3_vl_text",
                "rope_scaling": {
                    "rope_type": "default",
                    "mrope_section": [6, 3, 3],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                **_QWEN3,
                "model_type": "qwen3_vl",
                "deepstack_visual_indexes": [0, 2],
            },
            **_IDS,
            "tie_word_embeddings": True,
        },
        _PICTURES,
        (2, 2),
        _ROWS,
    ),
    "qwen3_vl_moe": (
        {
            "model_type": "qwen3_vl_moe",
            "text_config": {
                **without(CASES["qwen3_moe-v4"], "rope_theta"),
                "model_type": "qwen3_vl_moe_text",
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 700.0,
                    "mrope_section": [4, 4, 4],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                **_QWEN3,
                "model_type": "qwen3_vl_moe",
                "deepstack_visual_indexes": [0, 1, 3],
            },
            **_IDS,
            "tie_word_embeddings": False,
        },
        _PICTURES[1:],
        (2, 2),
        _ROWS,
    ),
    "qwen2_5_vl": (
        {
            "model_type": "qwen2_5_vl",
            "text_config": {
                **without(CASES["qwen2-v5"], "use_sliding_window", "max_window_layers"),
                "model_type": "qwen2_5_vl_text",
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 500.0,
                    "mrope_section": [2, 3, 3],
                },
            },
            "vision_config": {
                **_VISION,
                "model_type": "qwen2_5_vl",
                "intermediate_size": 80,
                "hidden_act": "silu",
                "out_hidden_size": 64,
                "window_size": 24,  # 3 x 3 cells
                "fullatt_block_indexes": [1, 3],
            },
            **_IDS,
            "tie_word_embeddings": False,
        },
        (((14, 10),), ((2, 4),), ((6, 12),)),
        (2, 2),
        _ROWS,
    ),
    "qwen2_5_vl-flat": (  # as published checkpoints have it
        {
            **_old("qwen2-v4", [4, 2, 2]),
            "model_type": "qwen2_5_vl",
            "vision_config": {
                **without(_VISION, "in_channels"),
                "in_chans": 3,
                "spatial_patch_size": 4,
                "model_type": "qwen2_5_vl",
                "intermediate_size": 56,
                "hidden_act": "silu",
                "out_hidden_size": 64,
                "window_size": 16,  # 2 x 2 cells
                "fullatt_block_indexes": [3],
                "tokens_per_second": 2,
            },
            **_IDS,
        },
        (((8, 6),), ((2, 2),)),
        (2, 2),
        _ROWS,
    ),
    "qwen2_vl": (  # as published checkpoints have it
        {
            **_old("qwen2-v4", [2, 3, 3]),
            "model_type": "qwen2_vl",
            "vision_config": {
                **without(_VISION, "in_channels"),
                "in_chans": 3,
                "spatial_patch_size": 4,
                "model_type": "qwen2_vl",
                "embed_dim": 48,
                "hidden_size": 64,
                "mlp_ratio": 2,
            },
            **_IDS,
        },
        _PICTURES,
        (2, 2),
        _ROWS,
    ),
}


def published_names(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    """The same tensors as published checkpoints have them.

    Qwen2-VL and Qwen2.5-VL have no `language_model.` between; stacks of experts of Qwen3-VL-MoE
    have inputs before outputs.
    """
    found = {}
    for key, value in tensors.items():
        if name.startswith("qwen2"):
            key = key.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        stacked = key.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        swap = stacked and name == "qwen3_vl_moe"
        found[key] = value.swapaxes(1, 2) if swap else value
    return found


def converted_names(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same tensors as mlx-vlm's converter writes them: other names, colours of a patch last.

    Experts are left as they are.
    """
    found = {}
    for key, value in tensors.items():
        key = key.removeprefix("model.").replace("visual.", "vision_tower.")
        key = key.replace("language_model.", "language_model.model.")
        if key.startswith("lm_head."):
            key = f"language_model.{key}"
        last = key.endswith("patch_embed.proj.weight")
        found[key] = value.transpose(0, 2, 3, 4, 1) if last else value
    return found
