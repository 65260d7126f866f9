"""A checkpoint's tensors into a definition, quantised as the checkpoint is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import CheckpointError
from ...memory import raise_file_limit
from ..quantization import Quantization, format_of_shapes
from ..weights.files import read_headers
from ..weights.tensors import FLOATS, choose_dtype
from .definitions import Definition
from .private_copy import one_line

Formats = dict[str, dict[str, Any]]  # path of a layer -> arguments of its quantised form


def lazy_arrays(folder: Path) -> dict[str, mx.array]:
    """Every tensor of a checkpoint, by name, read when a definition has joined them.

    Raises:
        CheckpointError: a file that is broken.
        ModelNotFoundError: there is none.
    """
    tensors: dict[str, mx.array] = {}
    headers = read_headers(folder)
    raise_file_limit(len(headers))
    for path, header in headers.items():
        try:
            found = mx.load(str(path))
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be loaded: {error}") from error
        assert isinstance(found, dict), path
        assert found.keys() == header.keys(), path
        tensors.update(found)
    return tensors


def load_weights(
    definition: Definition,
    tensors: dict[str, mx.array],
    quantization: Quantization | None,
    dtype: str,
) -> Formats:
    """Put the tensors of a checkpoint into a definition, and evaluate them.

    Args:
        definition: hollow.
        tensors: by the checkpoint's names, which the definition turns into its own.
        quantization: as config.json states it.
        dtype: as of `models.load`.

    Returns:
        The layers that are quantised.

    Raises:
        CheckpointError: a tensor is missing, misshapen or left over.
    """
    model = definition.model
    target = choose_dtype(tensors, dtype)
    try:
        sanitize = getattr(model, "sanitize", None)
        found = tensors if sanitize is None else sanitize(tensors)
        formats = _formats(model, found, quantization)
        quantise(model, formats)
        if dtype != "auto" or target == mx.float32:
            found = {n: _cast(n, t, target, definition) for n, t in found.items()}
        model.load_weights(list(found.items()), strict=True)
        mx.eval(model.parameters())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"The tensors of this checkpoint do not fit mlx-lm's definition of {definition.name}: "
            f"{one_line(str(error), 400)}"
        ) from error
    return formats


def quantise(model: nn.Module, formats: Formats) -> None:
    """Replace layers by their quantised forms, with weights of no meaning."""
    if formats:
        nn.quantize(model, class_predicate=lambda path, module: formats.get(path, False))


def _formats(
    model: nn.Module, tensors: Mapping[str, mx.array], quantization: Quantization | None
) -> Formats:
    """The format of every layer that has scales."""
    formats: Formats = {}
    for path, module in model.named_modules():
        scales, words = tensors.get(f"{path}.scales"), tensors.get(f"{path}.weight")
        if scales is None or words is None or getattr(module, "to_quantized", None) is None:
            continue
        if quantization is None:
            raise CheckpointError(
                f"Tensor {path + '.scales'!r} belongs to a quantised layer, but config.json has no "
                "quantization."
            )
        fitting = format_of_shapes(
            module.weight.shape[-1],
            words.shape[-1],
            scales.shape[-1],
            integer_scales=scales.dtype == mx.uint8,
        )
        form = quantization.of(path, fitting)
        formats[path] = {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}
    return formats


def _cast(name: str, tensor: mx.array, dtype: mx.Dtype, definition: Definition) -> mx.array:
    """A tensor in the activations' dtype, unless the definition wants it to stay wide."""
    if tensor.dtype not in FLOATS:
        return tensor
    predicate = getattr(definition.model, "cast_predicate", None)
    if predicate is not None and dtype != mx.float32 and not predicate(name):
        return tensor
    return tensor.astype(dtype)
