"""Writes the trained models as they ship: `python -m examples.demo_model.bundle`.

Knows the checkpoint format (that of mlx-lm: affine 4-bit weights in groups of 64, norms in
bfloat16); knows nothing of training but where it left its checkpoints.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from .model import NORM_EPS, ROPE_THETA, SHAPES, Shape
from .quantise import BITS, GROUP_SIZE, quantised
from .tokenizer import END, END_OF_TEXT, write_tokenizer

MAX_POSITIONS = 2048
SAMPLING = {"do_sample": True, "temperature": 0.3, "top_p": 0.9}  # what suits the model


def model_config(shape: Shape, eos_ids: list[int | None]) -> dict[str, Any]:
    """Return config.json, as transformers 4 spells it, without a quantisation."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos_ids,
    }


def bundle(name: str, work: Path, out: Path, *, bits: int | None = BITS) -> None:
    """Write the folder of one model; `bits=None` leaves the weights in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    eos_ids = [tokenizer.token_to_id(token) for token in (END, END_OF_TEXT)]
    config = model_config(SHAPES[name], eos_ids)
    weights = trained_weights(work / f"{name}.safetensors")
    if bits is not None:
        weights = quantised(weights)
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": bits}
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(out / "config.json", config)
    generation = {"eos_token_id": eos_ids, "pad_token_id": eos_ids[1], **SAMPLING}
    _write_json(out / "generation_config.json", generation)
    write_tokenizer(tokenizer, out)


def trained_weights(checkpoint: Path) -> dict[str, mx.array]:
    """Return the named weights of a training checkpoint in bfloat16."""
    arrays: Any = mx.load(str(checkpoint))
    return {
        name.removeprefix("params."): array.astype(mx.bfloat16)
        for name, array in sorted(arrays.items())
        if name.startswith("params.")
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Parse the command line and bundle every model that has a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build/demo_model"))
    parser.add_argument("--out", type=Path, default=Path("mlxinfer/assets"))
    parser.add_argument("--bf16", type=Path, help="also write the demo in bfloat16 here")
    args = parser.parse_args()
    for name in SHAPES:
        if (args.work / f"{name}.safetensors").exists():
            bundle(name, args.work, args.out / name)
    if args.bf16:
        bundle("demo", args.work, args.bf16, bits=None)


if __name__ == "__main__":
    main()
