"""Finds the tower of a checkpoint, and builds it from the tensors that the text model leaves out.

A tower's module is imported when it is used. A checkpoint without the tensors of a tower, such as
a conversion of the text alone, has none, whatever its config says.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol

from ...errors import CheckpointError
from ..decoder import Model
from ..jsonfields import Fields, read_json
from ..weights.files import read_headers
from ..weights.source import Checkpoint
from ..weights.tensors import FLOATS, Tensor
from ..weights.weights import Watch, Weights
from .tower import Tower

TOWERS: Mapping[str, tuple[str, str]] = {  # model_type of the whole -> module here, class
    "gemma3": ("siglip", "Gemma3Tower"),
    "gemma4": ("gemma4", "Gemma4Tower"),
    "gemma4_unified": ("gemma4", "Gemma4UnifiedTower"),
    "inkling2_loop": ("inkling", "InklingTower"),
    "lfm2_vl": ("siglip", "Lfm2Tower"),
    "lfm2-vl": ("siglip", "Lfm2Tower"),
    "mistral3": ("pixtral", "Mistral3Tower"),
    "pixtral": ("pixtral", "PixtralTower"),
    "qwen2_vl": ("qwen", "Qwen2VLTower"),
    "qwen2_5_vl": ("qwen", "Qwen2_5VLTower"),
    "qwen3_vl": ("qwen", "Qwen3VLTower"),
    "qwen3_vl_moe": ("qwen", "Qwen3VLTower"),
    "qwen3_5": ("qwen", "Qwen3_5Tower"),
    "qwen3_5_moe": ("qwen", "Qwen3_5Tower"),
    "prism_hadamard_qwen35": ("qwen", "Qwen3_5Tower"),
}
_PARTS = {  # what a tensor's name begins with, without "model." -> what it begins with here
    "visual.": "vision.",
    "vision_tower.vision_model.": "vision.",
    "vision_tower.": "vision.",
    "vision_model.": "vision.",
    "multi_modal_projector.": "projector.",
    "mm_projector.": "projector.",
    "vision_embedder.": "vision.",
    "embed_vision.patch_": "vision.patch_",
    "embed_vision.pos_": "vision.pos_",
    "embed_vision.multimodal_embedder.": "projector.",
    "embed_vision.": "projector.",
}


class TowerFamily(Protocol):
    """Builds the towers of one architecture: a class of a module in this package."""

    def build(self, config: Fields, weights: Weights) -> Tower:
        """The tower, not yet evaluated.

        Args:
            config: the whole of config.json, with `vision_config` and `text_config`.
            weights: the tensors of the tower, by the names that `tower_name` gives.

        Raises:
            CheckpointError: a tensor is missing or misshapen, or the config makes no sense.
        """
        ...


def tower_name(name: str) -> str | None:
    """A tensor's name as towers have it; None: the tensor belongs to no tower.

    Towers' own tensors begin with `vision.`, those of a projector behind it with `projector.`.
    """
    inner = name.removeprefix("model.")
    for prefix, ours in _PARTS.items():
        if inner.startswith(prefix):
            return ours + inner[len(prefix) :]
    return None


def tower_family(config: Fields) -> TowerFamily | None:
    """Return the function that builds the tower of config.json; None: there is no tower."""
    vision = config.fields("vision_config")
    if vision is None:
        return None
    kind = config.text("model_type", default="")
    if kind == "llava":  # around towers of several kinds
        kind = vision.text("model_type", default="")
    module, name = TOWERS.get(kind, ("", ""))
    if not module:
        return None
    family: TowerFamily = getattr(import_module(f".{module}", __package__), name)
    return family


def tower_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if tower_family(_whole(folder)) is None:
        return {}
    return {name: tensor for name, tensor in tensors.items() if tower_name(name) is not None}


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def tower_bytes(folder: Path) -> int:
    """Bytes of the tower that loads from a folder, from the headers of its files; 0: none does.

    Raises:
        CheckpointError, ModelNotFoundError: see `read_headers`.
    """
    if tower_family(_whole(folder)) is None:
        return 0
    return sum(
        info.end - info.start
        for tensors in read_headers(folder).values()
        for name, info in tensors.items()
        if tower_name(name) is not None
    )


def load_tower(
    folder: Path, tensors: Mapping[str, Tensor], text: Model, *, watch: Watch | None = None
) -> Tower | None:
    """The tower of a checkpoint, evaluated and ready.

    Args:
        tensors: those that `tower_tensors` gave.
        text: the model that reads what the tower sees.
        watch: see `Weights`.

    Returns:
        None: the checkpoint has no tower that is known here.

    Raises:
        CheckpointError: tensors are missing, misshapen or left over, or the config makes no sense.
    """
    config = _whole(folder)
    family = tower_family(config)
    if family is None or not tensors:
        return None
    weights = Weights(
        Checkpoint(tensors, tower_name),
        quantization=text.config.quantization,
        dtype=FLOATS[text.activation_dtype],
        watch=watch,
    )
    try:
        tower = family.build(config, weights)
        weights.finish()
    except CheckpointError as error:
        raise CheckpointError(f"The part that sees pictures: {error}") from error
    weights.evaluate(tower.arrays())
    return tower


def _whole(folder: Path) -> Fields:
    return Fields(read_json(folder / "config.json", infinite=True), "config.json")
