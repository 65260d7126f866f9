"""Adapters as mlx-lm trains them: `adapters.safetensors` beside an adapter_config.json of its own.

Source: mlx-lm 0.32, `tuner/utils.py` (`linear_to_lora_layers`, `load_adapters`), `tuner/lora.py`.
"""

from pathlib import Path

from ...errors import CheckpointError, UnsupportedModelError
from ..jsonfields import Fields
from ..weights.files import TensorInfo
from .folder import (
    CONFIG,
    AdapterFolder,
    AdapterModule,
    adapter_identity,
    check_rank,
    checked_headers,
    complete,
    in_layer,
    layer_of,
)

_LEAVES = {"lora_a": "a", "lora_b": "b", "m": "magnitude"}


def read_mlx_lm(file: Path, config: Fields) -> AdapterFolder:
    """The adapter of a folder.

    Raises:
        CheckpointError: config and file disagree, or one is broken.
        UnsupportedModelError: it is no adapter of low rank.
    """
    kind = _kind(config)
    stated = config.fields("lora_parameters")
    if stated is None:
        raise CheckpointError(f"{config.where} has no lora_parameters, which say rank and scale.")
    rank = stated.integer("rank", high=2**20)
    scale = stated.number("scale", low=-1e6, high=1e6)
    keys = stated.items("keys")
    num_layers = config.integer("num_layers", low=-1)
    headers, found = checked_headers(file), dict[str, dict[str, str]]()
    for name in headers:
        path, _, leaf = name.rpartition(".")
        if leaf not in _LEAVES or not path:
            raise CheckpointError(
                f"{file} has a tensor {name[:200]!r}; expected lora_a, lora_b and m of modules."
            )
        found.setdefault(path, {})[_LEAVES[leaf]] = name
    modules = [
        _module(path, parts, headers, rank, scale, dora=kind == "dora", file=file)
        for path, parts in found.items()
    ]
    stated_keys = None if keys is None else frozenset(map(str, keys))
    kinds = stated_keys or frozenset(map(in_layer, found))  # what it has in one layer, in all

    def wants(path: str, count: int) -> bool:
        layer = layer_of(path)
        first = count - num_layers if num_layers > 0 else 0
        return in_layer(path) in kinds and (layer is None or layer >= first)

    return AdapterFolder(
        folder=file.parent,
        file=file,
        kind="DoRA" if kind == "dora" else "LoRA",
        base=config.text("model", default=None),
        modules=tuple(modules),
        wants=wants,
        identity=adapter_identity(file),
    )


def _kind(config: Fields) -> str:
    """ "lora" or "dora"."""
    kind = config.text("fine_tune_type", default="lora")
    if kind == "full":
        raise UnsupportedModelError(
            f"fine_tune_type in {config.where} is 'full': whole matrices, not an adapter; "
            "fuse them with mlx_lm.fuse and serve the result."
        )
    if kind not in ("lora", "dora"):
        raise UnsupportedModelError(
            f"fine_tune_type in {config.where} is {kind[:40]!r}; supported are 'lora' and 'dora'."
        )
    return kind


def _module(
    path: str,
    parts: dict[str, str],
    headers: dict[str, TensorInfo],
    rank: int,
    scale: float,
    *,
    dora: bool,
    file: Path,
) -> AdapterModule:
    a, b = complete(parts, path, file)
    shapes = headers[a].shape, headers[b].shape
    stacked = len(shapes[0]) == 3
    if len(shapes[0]) != len(shapes[1]) or len(shapes[0]) not in (2, 3):
        raise CheckpointError(f"The matrices for {path[:200]!r} in {file} are {shapes}.")
    has_rank = shapes[0][1], shapes[1][2 if stacked else 0]
    for each in has_rank:
        check_rank(each, rank, path, file)
    magnitude = parts.get("magnitude")
    if dora != (magnitude is not None):
        raise CheckpointError(
            f"{file} {'lacks' if dora else 'has'} lengths of DoRA (m) for {path[:200]!r}, and "
            f"fine_tune_type in {CONFIG} is {'dora' if dora else 'lora'!r}."
        )
    return AdapterModule(path, rank, scale, a, b, magnitude, "stack" if stacked else "mlx", shapes)
