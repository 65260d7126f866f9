"""Finds the tower of a checkpoint, and builds it from the tensors that the text model leaves out.

A tower's module is imported when it is used. A checkpoint without the tensors of a tower, such as
a conversion of the text alone, has none, whatever its config says.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from ...errors import CheckpointError
from ..decoder import Model
from ..jsonfields import Fields, read_json
from ..weights.files import read_headers
from ..weights.source import Checkpoint
from ..weights.tensors import FLOATS, Tensor
from ..weights.weights import Watch, Weights
from . import Tower

TOWERS: Mapping[str, tuple[str, str]] = {  # model_type of the whole -> module here, function
    "gemma3": ("siglip", "gemma3_tower"),
    "gemma4": ("gemma4", "gemma4_tower"),
    "gemma4_unified": ("gemma4", "gemma4_unified_tower"),
    "inkling2_loop": ("inkling", "inkling_tower"),
    "lfm2_vl": ("siglip", "lfm2_tower"),
    "lfm2-vl": ("siglip", "lfm2_tower"),
    "mistral3": ("pixtral", "mistral3_tower"),
    "pixtral": ("pixtral", "pixtral_tower"),
    "qwen2_vl": ("qwen", "qwen2_vl_tower"),
    "qwen2_5_vl": ("qwen", "qwen2_5_vl_tower"),
    "qwen3_vl": ("qwen", "qwen3_vl_tower"),
    "qwen3_vl_moe": ("qwen", "qwen3_vl_tower"),
    "qwen3_5": ("qwen", "qwen3_5_tower"),
    "qwen3_5_moe": ("qwen", "qwen3_5_tower"),
    "prism_hadamard_qwen35": ("qwen", "qwen3_5_tower"),
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


# Builds the tower of an architecture, not yet evaluated, from the whole of config.json and from its
# tensors by the names that `tower_name` gives. Raises CheckpointError where they do not fit.
TowerBuilder = Callable[[Fields, Weights], Tower]


def tower_name(name: str) -> str | None:
    """A tensor's name as towers have it; None: the tensor belongs to no tower.

    Towers' own tensors begin with `vision.`, those of a projector behind it with `projector.`.
    """
    inner = name.removeprefix("model.")
    for prefix, ours in _PARTS.items():
        if inner.startswith(prefix):
            return ours + inner[len(prefix) :]
    return None


def tower_builder(config: Fields) -> TowerBuilder | None:
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
    builder: TowerBuilder = getattr(import_module(f".{module}", __package__), name)
    return builder


def tower_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if tower_builder(_whole(folder)) is None:
        return {}
    return {name: tensor for name, tensor in tensors.items() if tower_name(name) is not None}


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def tower_bytes(folder: Path) -> int:
    """Bytes of the tower that loads from a folder, from the headers of its files; 0: none does.

    Raises:
        CheckpointError, ModelNotFoundError: see `read_headers`.
    """
    if tower_builder(_whole(folder)) is None:
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
    """
    config = _whole(folder)
    build = tower_builder(config)
    if build is None or not tensors:
        return None
    weights = Weights(
        Checkpoint(tensors, tower_name),
        quantization=text.config.quantization,
        dtype=FLOATS[text.activation_dtype],
        watch=watch,
    )
    try:
        tower = build(config, weights)
        weights.finish()
    except CheckpointError as error:
        raise CheckpointError(f"The part that sees pictures: {error}") from error
    weights.evaluate(tower.arrays())
    return tower


def _whole(folder: Path) -> Fields:
    return Fields(read_json(folder / "config.json", infinite=True), "config.json")
