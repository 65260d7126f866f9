"""Whether a definition runs batched or alone, and the check that what was chosen is right.

The choice is made on shapes, before any weight is read. The check is made on the weights: logits of
a few sequences, in ragged chunks and steps as the engine would run them, beside those that mlx-lm's
own forward pass gives. A batched model that differs runs alone; one that differs even then, which
would be a fault of the definition's caches, is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ...core import CacheSpec
from ...errors import UnsupportedModelError
from ..registry import SUPPORTED
from .alone import AloneModel, kept_by
from .check import find_cut, narrow_twin, problem_alone, problem_batched, weights_dtype
from .config import ZooConfig, read_config
from .definitions import Definition
from .flat import FlatModel, NotFlatError, trace
from .loading import Formats
from .private_copy import architectures, installed, module_of, one_line


def choose(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[ZooConfig, Definition]:
    """What runs an architecture that has no native family, from its config alone.

    Args:
        raw: the contents of config.json.
        generation: the contents of generation_config.json.

    Raises:
        UnsupportedModelError: nothing does; the message says what is missing.
        CheckpointError: the definition does not take this config.
    """
    model_type = str(raw.get("model_type"))
    module = module_of(model_type)
    if module is None:
        raise _unknown(model_type)
    definition = Definition.of(module, raw)
    specs: Sequence[CacheSpec]
    because = None
    try:
        traced = trace(definition)
        specs, vocab_size = traced.specs, traced.vocab_size
    except NotFlatError as error:
        because = str(error)
        specs, vocab_size = _kept_alone(definition)
    config = read_config(
        raw,
        generation,
        parameters=[name for name, _ in tree_flatten(definition.model.parameters())],
        vocab_size=vocab_size,
        cache_specs=specs,
        alone_because=because,
    )
    return config, definition


def _unknown(model_type: str) -> UnsupportedModelError:
    """Nothing defines it; names that are spelled alike may be what was meant."""
    alike = get_close_matches(model_type, sorted({*SUPPORTED, *architectures()}), n=3)
    runs = f" Alike, and defined: {', '.join(alike)}." if alike else ""
    return UnsupportedModelError(
        f"The architecture {model_type[:60]!r} is defined neither here nor by mlx-lm "
        f"{installed()}; a newer mlx-lm may have it.{runs}"
    )


def _kept_alone(definition: Definition) -> tuple[list[CacheSpec], int]:
    """What a sequence keeps on caches of mlx-lm's, and the size of the vocabulary."""
    try:
        logits = definition(mx.zeros((1, 2), mx.int32), definition.own_caches())
        return [kept_by(definition, mx.float32)], logits.shape[-1]
    except Exception as error:  # the fault boundary of foreign code
        raise _fails(definition, error) from error


def _fails(definition: Definition, error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"mlx-lm's definition of {definition.name} does not run here: "
        f"{one_line(f'{type(error).__name__}: {error}')}"
    )


def build(config: ZooConfig, definition: Definition, formats: Formats) -> FlatModel | AloneModel:
    """The model of a definition that has its weights, checked.

    Args:
        config: as `choose` gave it.
        definition: the same.
        formats: of its quantised layers.

    Raises:
        UnsupportedModelError: not even one sequence after another gives what mlx-lm gives.
    """
    try:
        find_cut(definition)
    except Exception as error:  # the fault boundary of foreign code
        raise _fails(definition, error) from error
    because = config.alone_because
    if because is None:
        because = problem_batched(config, narrow_twin(definition, formats))
        if because is None:
            return FlatModel(config, definition, trace(definition))
    dtype = weights_dtype(definition)
    model = AloneModel(replace(config, alone_because=because), definition, dtype)
    problem = problem_alone(model)
    if problem is not None:
        raise UnsupportedModelError(
            f"mlx-lm's definition of {definition.name} is not used: in chunks and steps it "
            f"{problem}."
        )
    return model
