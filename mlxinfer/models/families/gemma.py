"""Gemma 3, alone or as the language model of a multimodal checkpoint."""

from ..build import Plan, build_decoder
from ..config import ModelConfig
from ..decoder import Model
from ..weights import Weights

_LANGUAGE = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_VISION = ("vision_tower.", "multi_modal_projector.")


def rename(name: str) -> str | None:
    """The language model's names without their prefix; what sees images is left out."""
    if name.removeprefix("model.").startswith(_VISION):
        return None
    for prefix, ours in _LANGUAGE.items():
        if name.startswith(prefix):
            return ours + name[len(prefix) :]
    return name


def build(config: ModelConfig, weights: Weights) -> Model:
    """Sandwich norms and QK-norm whose weights are stored less one, and scaled embeddings."""
    plan = Plan(qk_norm=True, norm_offset=1.0, sandwich=True, embed_scale=config.hidden_size**0.5)
    return build_decoder(config, weights, plan)
