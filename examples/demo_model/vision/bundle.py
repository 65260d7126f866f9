"""Writes the demo that sees as it ships: `python -m examples.demo_model.vision.bundle`.

The trained weights become a checkpoint of Qwen3-VL in bfloat16, and mlxinfer's converter makes
8 bits of it, tower and text.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from ..model import NORM_EPS
from ..tokenizer import END, END_OF_TEXT
from .batches import HIGH, LOW
from .model import DEPTH, HEADS, INNER, MERGE, PATCH, PLACES, SECTIONS, TEXT, THETA, WIDTH
from .tokenizer import BEGIN, CLOSE, PAD, VIDEO, write_tokenizer

MAX_POSITIONS = 2048
LEFT_OUT = ("README.md", "report.json", "model.safetensors.index.json")  # of the conversion


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return config.json."""
    ends = [tokenizer.token_to_id(token) for token in (END, END_OF_TEXT)]
    rope = {"rope_type": "default", "mrope_section": list(SECTIONS), "mrope_interleaved": True}
    text = {
        "model_type": "qwen3_vl_text",
        "vocab_size": TEXT.vocab_size,
        "hidden_size": TEXT.hidden_size,
        "intermediate_size": TEXT.intermediate_size,
        "num_hidden_layers": TEXT.num_layers,
        "num_attention_heads": TEXT.num_heads,
        "num_key_value_heads": TEXT.num_kv_heads,
        "head_dim": TEXT.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": THETA,
        "rope_scaling": rope,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": MAX_POSITIONS,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": ends,
        "pad_token_id": ends[1],
        "tie_word_embeddings": True,
    }
    vision = {
        "model_type": "qwen3_vl",
        "depth": DEPTH,
        "hidden_size": WIDTH,
        "hidden_act": "relu",
        "intermediate_size": INNER,
        "num_heads": HEADS,
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": TEXT.hidden_size,
        "num_position_embeddings": PLACES**2,
        "deepstack_visual_indexes": [],
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": tokenizer.token_to_id(PAD),
        "video_token_id": tokenizer.token_to_id(VIDEO),
        "vision_start_token_id": tokenizer.token_to_id(BEGIN),
        "vision_end_token_id": tokenizer.token_to_id(CLOSE),
        "eos_token_id": ends,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def processor_config() -> dict[str, Any]:
    """Return preprocessor_config.json."""
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": LOW, "longest_edge": HIGH},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }


def trained_weights(checkpoint: Path) -> dict[str, mx.array]:
    """Return the weights of a training checkpoint in bfloat16, by the names of Qwen3-VL."""
    arrays: Any = mx.load(str(checkpoint))
    weights = {}
    for name, array in sorted(arrays.items()):
        part, _, rest = name.removeprefix("params.").partition(".")
        if not name.startswith("params.") or part not in ("visual", "language_model"):
            continue
        if rest == "patch_embed.proj.weight":  # half of it for each of two equal frames
            half = array.reshape(WIDTH, 3, 1, PATCH, PATCH) / 2
            array = mx.concatenate([half, half], axis=2)
        weights[f"model.{part}.{rest}"] = array.astype(mx.bfloat16)
    return weights


def write_whole(work: Path, folder: Path) -> None:
    """Write the folder of the model in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(work / "vision-tokenizer.json"))
    weights = trained_weights(work / "demo-vision.safetensors")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = model_config(tokenizer)
    _write_json(folder / "config.json", config)
    _write_json(folder / "preprocessor_config.json", processor_config())
    ends = config["eos_token_id"]
    generation = {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1]}
    _write_json(folder / "generation_config.json", generation)
    write_tokenizer(tokenizer, folder)


def bundle(work: Path, out: Path) -> None:
    """Write the model as it ships."""
    whole = work / "demo-vision-bf16"
    write_whole(work, whole)
    if out.exists():
        shutil.rmtree(out)
    command = [sys.executable, "-m", "mlxinfer.cli", "convert", str(whole), str(out)]
    options = ["--recipe", "8bit", "--quantize-tower", "8", "--fast"]
    subprocess.run([*command, *options], check=True)
    for name in LEFT_OUT:
        (out / name).unlink(missing_ok=True)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Parse the command line and bundle."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build/demo_model"))
    parser.add_argument("--out", type=Path, default=Path("mlxinfer/assets/demo-vision"))
    args = parser.parse_args()
    bundle(args.work, args.out)


if __name__ == "__main__":
    main()
