"""What stands beside the weights: config.json, the index, the tokenizer. Knows no tensors' values.

Written so that mlx-lm reads them as its own: formats under `quantization` and, for the hub,
`quantization_config`; rope settings also as transformers 4 spelled them, without which mlx-lm takes
its defaults and answers nonsense.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..models.files import INDEX
from .files import write_file
from .plan import Plan
from .read import Source

_LEFT_OUT = ("_name_or_path", "vision_config", "auto_map")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")
_NEVER = (".py", ".safetensors", ".gguf", ".bin", ".pt", ".pth")


def config_json(source: Source, plan: Plan) -> dict[str, Any]:
    """The output's config.json."""
    config = {key: value for key, value in source.config.items() if key not in _LEFT_OUT}
    config = _both_spellings(config)
    if isinstance(config.get("text_config"), Mapping):
        config["text_config"] = _both_spellings(dict(config["text_config"]))
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    quantization = plan.quantization()
    if quantization is not None:
        config |= {"quantization": quantization, "quantization_config": quantization}
    if plan.recipe.dtype is not None:
        config["torch_dtype"] = plan.recipe.dtype
    return dict(sorted(config.items()))


def index_json(plan: Plan) -> dict[str, Any]:
    """model.safetensors.index.json."""
    weight_map = {
        array.name: name
        for name, tensors in plan.shards()
        for tensor in tensors
        for array in tensor.arrays
    }
    return {
        "metadata": {"total_size": plan.num_bytes, "total_parameters": plan.num_weights},
        "weight_map": dict(sorted(weight_map.items())),
    }


def write_side_files(folder: Path, source: Source) -> None:
    """Tokenizer, templates and the like, as the source has them; never code."""
    for name, content in sorted(source.side_files().items()):
        if name in ("config.json", INDEX) or name.endswith(_NEVER):
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            write_file(target, content)
        else:
            shutil.copyfile(content, target)


def has_tokenizer(names: Iterable[str]) -> bool:
    """Whether one of these side files is a tokenizer."""
    return any(name in _TOKENIZERS or name.endswith(".tiktoken") for name in names)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """With a newline at the end."""
    write_file(path, (json.dumps(value, indent=4, ensure_ascii=False) + "\n").encode())


def _both_spellings(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5's keys also as transformers 4 spelled them, where they are missing."""
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_type" in rope:
        config.setdefault("rope_theta", rope.get("rope_theta"))
        if rope["rope_type"] != "default":
            scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
            config.setdefault("rope_scaling", scaling)
    if "dtype" in config:
        config.setdefault("torch_dtype", config["dtype"])
    if "num_local_experts" in config and config.get("model_type") == "qwen3_moe":
        config.setdefault("num_experts", config["num_local_experts"])
    return config
