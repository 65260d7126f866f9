"""The files beside the weights: config.json, the index, the tokenizer.

They are written so that mlx-lm reads them unchanged. Formats stand under `quantization` and, for
the hub, `quantization_config`. mlx-lm reads the configs of transformers 4, and replaces missing
keys by defaults of its own. So keys of transformers 5 are repeated in the old spelling, and the
family's defaults are written out.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..models.config import ModelConfig
from ..models.registry import family
from ..models.weights.files import INDEX
from ..models.zoo.spelling import respelled as zoo_spelling
from .arrange import ArrangedSource, language_config
from .files import write_file
from .mlx_lm import UNDEFINED_BY_MLX_LM, asked_for, respelled
from .plan import ConversionPlan
from .read import SourceModel

_LEFT_OUT = ("_name_or_path", "vision_config", "audio_config", "auto_map")
_OF_ALL_SENSES = ("text_config", "architectures")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")
_MODULE = ("_Dense/model.safetensors", "_LayerNorm/model.safetensors")  # behind pooling
_NEVER = (".py", ".safetensors", ".gguf", ".bin", ".pt", ".pth")


def config_json(arranged: ArrangedSource, plan: ConversionPlan) -> dict[str, Any]:
    sees = any(tensor.output.seeing for tensor in plan.tensors)
    keeps = sees or arranged.definition is not None
    left_out = [key for key in _LEFT_OUT if key != "vision_config" or not keeps]
    config = {key: value for key, value in arranged.source.config.items() if key not in left_out}
    if arranged.definition is None:
        config = spelled_out(config, arranged.family_config, sees=sees)
    else:
        config = zoo_spelling(type(arranged.definition.args), config) | config
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    quantization = plan.quantization()
    if quantization is not None:
        config |= {"quantization": quantization, "quantization_config": quantization}
    if plan.recipe.dtype is not None:
        config |= {"torch_dtype": plan.recipe.dtype, "dtype": plan.recipe.dtype}
    return dict(sorted(config.items()))


def index_json(plan: ConversionPlan) -> dict[str, Any]:
    weight_map = {
        piece.name: name
        for name, tensors in plan.shards()
        for pieces in plan.pieces(tensors).values()
        for piece in pieces
    }
    return {
        "metadata": {"total_size": plan.num_bytes, "total_parameters": plan.num_weights},
        "weight_map": dict(sorted(weight_map.items())),
    }


def write_side_files(folder: Path, source: SourceModel) -> None:
    """Tokenizer, templates and the like, as the source has them; never code."""
    for name, content in sorted(source.side_files().items()):
        of_module = name.endswith(_MODULE)
        if name in ("config.json", INDEX) or (name.endswith(_NEVER) and not of_module):
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            write_file(target, content)
        else:
            shutil.copyfile(content, target)


def has_tokenizer(names: Iterable[str]) -> bool:
    return any(name in _TOKENIZERS or name.endswith(".tiktoken") for name in names)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """With a newline at the end."""
    write_file(path, (json.dumps(value, indent=4, ensure_ascii=False) + "\n").encode())


def spelled_out(
    config: Mapping[str, Any], model: ModelConfig, *, sees: bool = False
) -> dict[str, Any]:
    """A config with keys added that are missing in the old spelling. The source's keys stay.

    Args:
        sees: it stays the config of a model that sees, with a text_config if it has one.
    """
    inner = config.get("text_config") if sees else language_config(config)
    top = _old_spelling(config if sees or inner is not None else _flat(config))
    text = top if inner is None else _old_spelling(inner)
    defaults = family(model.model_type).defaults
    if "sliding_window_pattern" in defaults:
        _spell_windows(text, model)
    if model.model_type not in UNDEFINED_BY_MLX_LM:
        _spell_silent(text, model)
    for key in defaults:
        _fill(text, key, model.fields.get(key))
    text |= respelled(text, model)
    if inner is None and not sees:
        top["model_type"] = model.model_type
    elif inner is not None:
        top |= {"text_config": text, "vocab_size": model.vocab_size}
    top["tie_word_embeddings"] = text["tie_word_embeddings"] = model.tie_word_embeddings
    return top


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A multimodal model's config as that of its language model, which alone is converted."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(config)
    outer = {key: value for key, value in config.items() if key not in _OF_ALL_SENSES}
    return outer | {key: value for key, value in inner.items() if value is not None}


def _old_spelling(stated: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(stated)
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping):
        full, local = rope.get("full_attention", rope), rope.get("sliding_attention")
        if isinstance(full, Mapping):
            _fill(config, "rope_theta", full.get("rope_theta"))
            if full is rope:  # of all layers
                _fill(config, "partial_rotary_factor", full.get("partial_rotary_factor"))
            if (kind := full.get("rope_type", "default")) != "default":
                scaling = {key: value for key, value in full.items() if key != "rope_theta"}
                _fill(config, "rope_scaling", {"type": kind, **scaling})
        if isinstance(local, Mapping):
            _fill(config, "rope_local_base_freq", local.get("rope_theta"))
    _fill(config, "torch_dtype", config.get("dtype"))
    return config


def _spell_windows(config: dict[str, Any], model: ModelConfig) -> None:
    full = [window is None for window in model.windows]
    period = next((i + 1 for i, sees_all in enumerate(full) if sees_all), 0)
    stated = config.get("sliding_window_pattern")  # EXAONE has letters, which mlx-lm counts
    if (
        period
        and not isinstance(stated, str)
        and full == [not (i + 1) % period for i in range(len(full))]
    ):
        config["sliding_window_pattern"] = period


def _spell_silent(config: dict[str, Any], model: ModelConfig) -> None:
    """Spell out what families assume here: mlx-lm refuses a silent config or assumes otherwise."""
    pairs = zip(model.ropes, model.windows, strict=True)
    ropes = [(rope, window) for rope, window in pairs if rope is not None]
    rope = next((rope for rope, window in ropes if window is None), ropes[0][0] if ropes else None)
    spelled: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": None if rope is None else rope.theta,
        "max_position_embeddings": model.fields.get("max_position_embeddings"),
    }
    if model.num_experts:
        experts_key = "num_local_experts" if model.model_type == "gpt_oss" else "num_experts"
        spelled |= {experts_key: model.num_experts, "num_experts_per_tok": model.experts_per_token}
    if model.model_type == "qwen3_moe":
        spelled |= {
            "moe_intermediate_size": model.moe_intermediate_size,
            "norm_topk_prob": model.norm_topk_prob,
            "decoder_sparse_step": model.fields.get("decoder_sparse_step") or 1,
            "mlp_only_layers": model.fields.get("mlp_only_layers") or [],
        }
    for key, value in (spelled | asked_for(model)).items():
        _fill(config, key, value)
    config.setdefault("rope_scaling", None)


def _fill(config: dict[str, Any], key: str, value: Any) -> None:
    if config.get(key) is None and value is not None:
        config[key] = value
