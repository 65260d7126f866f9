"""Text models inside checkpoints that also see or hear: their configs, and their tensors' names.

Only text goes in, so what sees and hears is left out, by name. Positions of text alone are the same
on all axes of a multimodal rope.
"""

from collections.abc import Mapping

from ..errors import UnsupportedModelError
from .jsonfields import Fields

_QWEN2 = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen2_vl": "qwen2"}
WRAPPERS: Mapping[str, Mapping[str, str]] = {  # model_type -> those of its text, and ours of them
    "llama4": {"llama4_text": "llama4_text"},
    "mistral3": {"mistral": "mistral", "ministral3": "ministral3", "mistral4": "mistral4"},
    "kimi_k25": {"kimi_k2": "kimi_k2", "deepseek_v3": "deepseek_v3"},
    "kimi_vl": {"deepseek_v3": "deepseek_v3"},
    "lfm2_vl": {"lfm2": "lfm2", "lfm2_moe": "lfm2_moe"},
    "lfm2-vl": {"lfm2": "lfm2", "lfm2_moe": "lfm2_moe"},
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": {**_QWEN2, "qwen2_5_vl": "qwen2"},
    "qwen3_vl": {"qwen3_vl_text": "qwen3", "qwen3_vl": "qwen3"},
    "qwen3_vl_moe": {"qwen3_vl_moe_text": "qwen3_moe", "qwen3_vl_moe": "qwen3_moe"},
}
_LANGUAGE = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.lm_head.": "lm_head.",
    "language_model.": "model.",
}
_BARE = ("embed_tokens.", "layers.", "norm.")  # of models without an output projection
_SENSES = (
    *("visual.", "vision_tower.", "vision_model.", "vision_embedder.", "embed_vision."),
    *("multi_modal_projector.", "mm_projector.", "audio_tower.", "embed_audio."),
)


def text_config(config: Fields) -> Fields:
    """The config of the text model, by the name of its native family.

    Raises:
        UnsupportedModelError: a text model that is not known inside of this one.
    """
    outer = config.text("model_type")
    if outer not in WRAPPERS:
        return config
    text = config.fields("text_config") or config
    inner = text.text("model_type", default=outer)
    if inner not in WRAPPERS[outer]:
        raise UnsupportedModelError(
            f"The text model of {config.where} ({outer}) is {inner[:60]!r}; supported are "
            f"{', '.join(WRAPPERS[outer])}."
        )
    return Fields({**text.values, "model_type": WRAPPERS[outer][inner]}, text.where)


def language_name(name: str) -> str | None:
    """A name of the language model without its prefix; None: of what sees or hears."""
    if name.removeprefix("model.").startswith(_SENSES):
        return None
    for prefix, ours in _LANGUAGE.items():
        if name.startswith(prefix):
            return ours + name[len(prefix) :]
    return f"model.{name}" if name.startswith(_BARE) else name
