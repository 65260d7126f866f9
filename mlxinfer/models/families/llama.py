"""Llama and its kin: Llama 2 and 3, Mistral, Qwen 2 and 3 (dense). Biases come from the config."""

from ..build import Plan, build_decoder
from ..config import ModelConfig
from ..decoder import Model
from ..weights import Weights


def rename(name: str) -> str | None:
    """Old checkpoints carry the rope's frequencies, which follow from the config."""
    return None if name.endswith(".rotary_emb.inv_freq") else name


def build(config: ModelConfig, weights: Weights) -> Model:
    """The decoder as it is; Qwen 3 normalises the heads of Q and K."""
    return build_decoder(config, weights, Plan(qk_norm=config.model_type == "qwen3"))
