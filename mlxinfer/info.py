"""What a loaded model is, for people. Plain data; imports no mlx."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .memory import human_bytes

if TYPE_CHECKING:
    from .models.decoder import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of one loaded model."""

    name: str
    path: Path
    architecture: str
    num_layers: int
    vocab_size: int
    max_context: int  # tokens
    weights_bytes: int
    kv_bytes_per_token: int  # of all layers; windows hold no more than their length
    quantization: str | None  # "4-bit affine, group 64"
    eos_token_ids: tuple[int, ...]

    @property
    def summary(self) -> str:
        """One short line."""
        bits = f", {self.quantization}" if self.quantization else ""
        return f"{self.architecture}, {human_bytes(self.weights_bytes)}{bits}"


def describe(name: str, path: Path, model: "Model") -> ModelInfo:
    """The facts of `model`, loaded from `path`."""
    config, spec = model.config, model.config.quantization
    default = spec.default if spec is not None else None
    return ModelInfo(
        name=name,
        path=path,
        architecture=config.model_type,
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        weights_bytes=model.num_bytes,
        kv_bytes_per_token=sum(
            s.num_kv_heads * (s.key_dim + s.value_dim) * model.activation_dtype.size
            for s in model.cache_specs
        ),
        quantization=(
            f"{default.bits}-bit {default.mode}, group {default.group_size}" if default else None
        ),
        eos_token_ids=config.eos_token_ids,
    )
