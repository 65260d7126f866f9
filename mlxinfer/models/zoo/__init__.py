"""Architectures without a native family: mlx-lm's definitions, run by this engine.

    definitions.py   mlx-lm's modules as a private copy, and models of theirs built from a config
    running.py       these models as the engine runs them: batched, or one sequence after another
    spelling.py      configs and tensors as mlx-lm's definitions read them
    compared.py      what comparing the definitions with transformers has shown
    choice.py        which of the two it is, its weights, and the check of its logits

mlx-lm is found where it is installed (`pip install -e ".[zoo]"`) and is not imported: its
package takes seconds and lowers the number of files that the process may open.
"""

import logging
from pathlib import Path

from ..jsonfields import read_json
from .choice import build, choose, lazy_arrays, load_weights
from .running import AloneModel, FlatModel, ZooConfig
from .spelling import tensors_respelled

log = logging.getLogger("mlxinfer.models")


def load(folder: Path, *, dtype: str = "auto") -> FlatModel | AloneModel:
    """The model in a checkpoint folder, of an architecture without native family.

    Raises:
        UnsupportedModelError, CheckpointError, ModelNotFoundError: see `models.load`.
    """
    config, definition = choose(*read(folder))
    tensors = tensors_respelled(config.model_type, lazy_arrays(folder))
    formats = load_weights(definition, tensors, config.quantization, dtype)
    model = build(config, definition, formats)
    because = model.config.alone_because
    if because is not None:
        log.warning(
            "%s runs one sequence after another, without a prefix cache: %s",
            config.model_type,
            because,
        )
    return model


def load_config(folder: Path) -> ZooConfig:
    """The config of the model in a folder. Reads no weights; raises as `load`."""
    return choose(*read(folder))[0]


def read(folder: Path) -> tuple[dict[str, object], dict[str, object]]:
    """The contents of config.json and generation_config.json, which may be missing."""
    generation = folder / "generation_config.json"
    return read_json(folder / "config.json"), read_json(generation) if generation.is_file() else {}
