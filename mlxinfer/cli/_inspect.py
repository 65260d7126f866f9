"""Facts about a model folder from its JSON files and safetensors headers. Loads no weights."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

from ..errors import CheckpointError, MlxinferError
from ..models import load_any_config
from ..models.decoder import LanguageConfig
from ..models.jsonfields import read_json
from ..models.safetensors import TensorInfo, read_headers
from ..text import Tokenizer
from ._model import has_chat_template


@dataclass(frozen=True, slots=True)
class Weights:
    """Sizes from the safetensors headers."""

    parameters: int
    num_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Average over all tensors, scales included."""
        return 8 * self.num_bytes / self.parameters if self.parameters else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """The facts of `show`. `config` is None where `problem` says why the model cannot run."""

    folder: Path
    model_type: str | None
    config: LanguageConfig | None
    weights: Weights | None
    chat_template: bool
    problem: str | None


def summarise(folder: Path) -> Summary:
    """Read what can be read; a broken or unsupported part is reported in `problem`, not raised."""
    problem, config, weights, template = None, None, None, False
    try:
        template = has_chat_template(folder)
        config = load_any_config(folder)
    except MlxinferError as error:
        problem = str(error)
    try:
        weights = count_weights(folder, config)
        Tokenizer.from_folder(folder)
    except MlxinferError as error:
        problem = problem or str(error)
    return Summary(folder, _model_type(folder), config, weights, template, problem)


def _model_type(folder: Path) -> str | None:
    """Return the config's model_type, None if it cannot be read."""
    try:
        model_type = read_json(folder / "config.json").get("model_type")
    except CheckpointError:
        return None
    return model_type if isinstance(model_type, str) else None


def count_weights(folder: Path, config: LanguageConfig | None) -> Weights:
    """Return parameters and bytes of the checkpoint; packed weights count unpacked."""
    parameters = num_bytes = 0
    for tensors in read_headers(folder).values():
        for name, info in tensors.items():
            num_bytes += info.end - info.start
            parameters += _parameters(name, info, tensors, config)
    return Weights(parameters, num_bytes)


def _parameters(
    name: str, info: TensorInfo, tensors: dict[str, TensorInfo], config: LanguageConfig | None
) -> int:
    stem, _, last = name.rpartition(".")
    packed = tensors.get(f"{stem}.weight")
    if last in ("scales", "biases") and packed is not None and packed.dtype == "U32":
        return 0
    if info.dtype == "U32" and config is not None and config.quantization is not None:
        return prod(info.shape) * 32 // config.quantization.of(stem).bits
    if name.endswith("_scales"):
        return 0
    return prod(info.shape) * (2 if name.endswith("_blocks") else 1)  # two 4-bit numbers a byte
