"""Architectures without a native family: mlx-lm's definitions, run by this engine.

    private_copy.py  mlx-lm's modules, in a package of our own
    definitions.py   a config to a model of theirs
    flat.py          batched: their model over a flat list of tokens, our caches in place of theirs
    alone.py         one sequence after another, on their own caches
    choice.py        which of the two it is
    check.py         whether what was chosen gives the logits of mlx-lm's own run
    loading.py       a checkpoint's tensors into a definition

mlx-lm is found where it is installed (`pip install "mlxinfer[zoo]"`) and is not imported: its
package takes seconds and lowers the number of files that the process may open.
"""

import logging
from pathlib import Path

from ..jsonfields import read_json
from .alone import AloneModel
from .choice import build, choose
from .config import ZooConfig
from .flat import FlatModel
from .loading import lazy_arrays, load_weights

__all__ = ["ZooConfig", "load", "load_config"]

log = logging.getLogger("mlxinfer.models")


def load(folder: Path, *, dtype: str = "auto") -> FlatModel | AloneModel:
    """The model in a checkpoint folder, of an architecture without native family.

    Raises:
        UnsupportedModelError, CheckpointError, ModelNotFoundError: as of `models.load`.
    """
    config, definition = choose(*_read(folder))
    formats = load_weights(definition, lazy_arrays(folder), config.quantization, dtype)
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
    """What would run the checkpoint in a folder, without its weights; errors as of `load`."""
    return choose(*_read(folder))[0]


def _read(folder: Path) -> tuple[dict[str, object], dict[str, object]]:
    """config.json and generation_config.json, which may be missing."""
    generation = folder / "generation_config.json"
    return read_json(folder / "config.json"), read_json(generation) if generation.is_file() else {}
