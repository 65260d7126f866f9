"""What stands beside the weights: config.json, the index, the tokenizer. Knows no tensors' values.

Written so that mlx-lm reads them as its own: formats under `quantization` and, for the hub,
`quantization_config`; settings as spellings.py has them.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..models.config import ModelConfig
from ..models.files import INDEX
from .files import write_file
from .plan import Plan
from .read import Source
from .spellings import spelled_out

_LEFT_OUT = ("_name_or_path", "vision_config", "auto_map")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")
_NEVER = (".py", ".safetensors", ".gguf", ".bin", ".pt", ".pth")


def config_json(source: Source, model: ModelConfig, plan: Plan) -> dict[str, Any]:
    """The output's config.json; `model` is what the source's says."""
    config = {key: value for key, value in source.config.items() if key not in _LEFT_OUT}
    config = spelled_out(config, model)
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    quantization = plan.quantization()
    if quantization is not None:
        config |= {"quantization": quantization, "quantization_config": quantization}
    if plan.recipe.dtype is not None:
        config |= {"torch_dtype": plan.recipe.dtype, "dtype": plan.recipe.dtype}
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
