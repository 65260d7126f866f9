"""What runs each architecture that mlx-lm defines: `python -m tests.models.zoo_table`.

Builds a small model of each with random weights, runs the check that loading runs, and prints a
Markdown table for docs/models.md. With `generating` it prints the table of transformers' types, for
which it builds nothing.
"""

import sys
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxinfer.errors import MlxinferError
from mlxinfer.models.registry import SUPPORTED
from mlxinfer.models.zoo.choice import Formats, build, choose, quantise
from mlxinfer.models.zoo.compared import verdicts
from mlxinfer.models.zoo.definitions import Definition, architectures, installed, module_of
from mlxinfer.models.zoo.running import AloneModel, FlatModel

from .zoo_configs import small_config

FLOATS = (mx.float32, mx.bfloat16, mx.float16)
LINEAR = ("Linear", "SwitchLinear")  # layers of mlx.nn, and of mlx-lm's
HOW = ("native", "batched", "alone", "refused")
STATUSES = {
    "native": "native",
    "compared": "mlx-lm's definition, compared",
    "impossible": "mlx-lm's definition, could not be compared",
    "refused": "refused",
    "none": "defined neither here nor by mlx-lm",
}
BY_VERDICT = {
    "agrees": "compared",
    "differs": "refused",
    "refused": "refused",
    "impossible": "impossible",
}


@dataclass(frozen=True, slots=True)
class Row:
    """What runs one architecture."""

    name: str
    how: str  # one of HOW
    because: str = ""


def small_model(name: str, *, quantized: bool = False) -> FlatModel | AloneModel:
    """The model of a small config with random weights, checked as a loaded one is.

    A quantised one gives the same bits in any batch.
    """
    module = module_of(name)
    assert module is not None, name
    config, definition = choose(small_config(name, module), {})
    randomise(definition)
    formats: Formats = {}
    if quantized:
        formats = {
            path: {"group_size": 32, "bits": 4, "mode": "affine"}
            for path, layer in definition.model.named_modules()
            if type(layer).__name__ in LINEAR and layer.weight.shape[-1] % 32 == 0
        }
        quantise(definition.model, formats)
    return build(config, definition, formats)


def randomise(definition: Definition) -> None:
    """Give a definition the weights of `random_parameters`."""
    definition.model.update(random_parameters(definition.model))


def random_parameters(model: nn.Module) -> Any:
    """Random numbers for every parameter of a model, which keep activations in range."""
    rng = np.random.default_rng(0)
    found = tree_flatten(model.parameters())
    return tree_unflatten([(n, _random(n, a, rng)) for n, a in found if a.dtype in FLOATS])


def _random(name: str, like: mx.array, rng: np.random.Generator) -> mx.array:
    values = rng.normal(size=like.shape).astype(np.float32)
    if like.ndim > 1:
        return mx.array(values * like.shape[-1] ** -0.5)
    return mx.array(values * 0.3 + (1 if name.endswith("weight") else 0))


def row(name: str) -> Row | None:
    """What runs an architecture; None: the file holds parts only."""
    try:
        if module_of(name) is None:
            return None
        if name in SUPPORTED:
            return Row(name, "native")
        because = small_model(name).config.alone_because
        return Row(name, "alone", because) if because else Row(name, "batched")
    except MlxinferError as error:
        return Row(name, "refused", str(error))


def rows() -> list[Row]:
    """All, native ones first."""
    found = [found for name in architectures() if (found := row(name)) is not None]
    return sorted(found, key=lambda row: HOW.index(row.how))


def table(found: list[Row]) -> str:
    """Markdown: a line for those that need no reason, and one for each of the others."""
    lines = [f"Of mlx-lm {installed()}:", "", "| runs | architecture | why |", "|---|---|---|"]
    for how in HOW[:2]:
        names = [f"`{row.name}`" for row in found if row.how == how]
        lines.append(f"| {how} ({len(names)}) | {', '.join(names)} | |")
    others = [row for row in found if row.how not in HOW[:2]]
    lines += [f"| {row.how} | `{row.name}` | {row.because} |" for row in others]
    return "\n".join(lines)


def generating_table() -> str:
    """Markdown: what runs each type of transformers' lists for text generation."""
    kinds, types = verdicts()["generating"], verdicts()["types"]
    of: dict[str, list[str]] = {status: [] for status in STATUSES}
    for kind in kinds:
        row = types.get(kind, {})
        status = "native" if kind in SUPPORTED else BY_VERDICT.get(row.get("verdict", ""), "none")
        but = f" (not {', '.join(row['wrong'])})" if row.get("wrong") else ""
        of[status].append(f"`{kind}`{but}")
    lines = ["| status | types |", "|---|---|"]
    lines += [f"| {STATUSES[s]} ({len(found)}) | {', '.join(found)} |" for s, found in of.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    names = sys.argv[1:]
    if names == ["generating"]:
        print(generating_table())
    else:
        print(table([row(name) for name in names] if names else rows()))  # type: ignore[misc]
