"""Write reference logits of texts inside of models that see: transformers in float32.

Needs torch and transformers, which nothing else here does:

    python tests/data/parity/wrappers.py

`wrappers.json` gets each config, and the tensors under the names that transformers saves; their
values come from `tests/models/random_weights.py`, by name. `wrappers.npz` gets the logits.
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
TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 32,
    "patch_size": 16,
    "embed_dim": 8,
    "out_hidden_size": 64,
    "spatial_merge_size": 2,
}
CLIP = {**VISION, "model_type": "clip_vision_model"}
WINDOWS = {"sliding_window": 6, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "num_key_value_heads": 4,
}
DELTA = {
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def mrope(sections: list[int], part: float) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 300.0, "mrope_section": sections}
    return {"rope_parameters": {**rope, "partial_rotary_factor": part}}


WRAPPERS: dict[str, dict[str, Any]] = {
    "aya_vision": WINDOWS,
    "cohere2_vision": WINDOWS,
    "deepseek_vl": {},
    "deepseek_vl_hybrid": {},
    "ernie4_5_vl_moe": {
        **{"moe_intermediate_size": [24, 16], "moe_num_experts": 4, "moe_k": 2},
        **{"moe_num_shared_experts": 1, "tie_word_embeddings": False},
        **mrope([3, 3, 2], 1.0),
    },
    "exaone4_5": WINDOWS,
    "fast_vlm": {},
    "glm4v": mrope([2, 1, 1], 0.5),
    "glm46v": mrope([2, 1, 1], 0.5),
    "glm4v_moe": {**mrope([2, 1, 1], 0.5), **EXPERTS},
    "glm_ocr": mrope([2, 3, 3], 1.0),
    "glmga": mrope([2, 1, 1], 0.5),
    "got_ocr2": {},
    "granite4_vision": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.125,
        "residual_multiplier": 0.6,
        "logits_scaling": 0.5,
    },
    "hunyuan_vl": {
        "rope_parameters": {
            **{"rope_type": "xdrope", "rope_theta": 300.0, "factor": 1.0, "alpha": 50.0},
            "xdrope_section": [2, 2, 2, 2],
        }
    },
    "idefics2": {},
    "idefics3": {},
    "internvl": {},
    "kimi_k25": {**EXPERTS, **LATENT},
    "lighton_ocr": {},
    "llava": {},
    "llava_next": {},
    "llava_next_video": {},
    "llava_onevision": {},
    "muse_glimmer": {
        "num_hidden_layers": 5,
        "sliding_window": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        "final_logit_softcapping": 6.0,
        "output_multiplier": 0.5,
    },
    "minimax_m3_vl": {
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
        "mlp_layer_types": ["dense", *["sparse"] * 3],
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 2,
        "index_topk_blocks": 3,
        "rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.5},
    },
    "minicpmv4_6": DELTA,
    "minicpmv4_7": DELTA,
    "minicpm_ocr": DELTA,
    "ovis2": {},
    "paddleocr_vl": {"rope_parameters": {"rope_theta": 300.0, "mrope_section": [2, 3, 3]}},
    "perception_lm": {},
    "smolvlm": {},
    "video_llama_3": {},
    "video_llava": {},
    "vipllava": {},
}
OUTER: dict[str, dict[str, Any]] = {  # beside the texts' part
    "fast_vlm": {"vision_config": CLIP},  # any tower: that of the release needs a package
    "granite4_vision": {
        **{"deepstack_layer_map": [], "downsample_rate": "1/2"},
        "vision_config": {**CLIP, "hidden_size": 64},
    },
    "ovis2": {"vocab_size": TEXT["vocab_size"], "hidden_size": TEXT["hidden_size"]},
    "perception_lm": {"vision_config": {**CLIP, "model_args": {"embed_dim": 8}}},
}


def config_of(outer: str) -> Any:
    """transformers' config of a tiny model of this type."""
    usual = CONFIG_MAPPING[outer]()
    config = {
        "text_config": {"model_type": usual.text_config.model_type, **TEXT, **WRAPPERS[outer]},
        "tie_word_embeddings": False,
    }
    sight = usual.vision_config
    config["vision_config"] = {key: value for key, value in VISION.items() if hasattr(sight, key)}
    config["vision_config"]["model_type"] = sight.model_type
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
    ids = np.random.default_rng(1).integers(3, TEXT["vocab_size"], LENGTH)
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
    for outer in WRAPPERS:
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
