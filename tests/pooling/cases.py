"""Tiny configurations of models that pool, as the hub spells them, and how they pool. No mlx.

Chosen to tell right from nearly right: windows shorter than the texts, positions that do not begin
at 0, several modes side by side, projections of another width, every kind of classification head.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from models.names import expanded
from models.random_weights import random_tensor

Change = Callable[[Any, str], Any]  # of values, by their name
LENGTHS = (3, 17, 9, 9, 1, 30)  # tokens of the rows of a case

_TABLES = yaml.load(Path(__file__).with_name("cases.yml").read_text(), yaml.CSafeLoader)
# name -> config.json; modes and modules behind them; which task
CASES: dict[str, dict[str, Any]] = _TABLES["cases"]


def as_is(values: Any, name: str) -> Any:
    return values


def tensors(case: str, table: dict[str, Any], change: Change = as_is) -> dict[str, Any]:
    """Every tensor of a case by its name on the hub; `table`: of tensors.json."""
    less_one = CASES[case]["config"]["model_type"].startswith("gemma3")
    made = {}
    for name, shape in expanded(table[case]).items():
        values = random_tensor(name, shape, 0, less_one=less_one)
        if name.endswith(NORMS):
            values = 1 + values / 2
        if name.endswith(SCORERS):
            values = 5 * values
        made[name] = change(values, name)
    return made


NORMS = ("LayerNorm.weight", "layer_norm.weight", "emb_ln.weight", "norm1.weight", "norm2.weight")
SCORERS = ("classifier.weight", "classifier.out_proj.weight", "score.weight")


def dense_weights(case: str, index: int, change: Change = as_is) -> dict[str, Any]:
    """Weight and perhaps bias of a projection behind pooling."""
    in_dims, out_dims, bias, _ = CASES[case]["dense"][index]
    made = {
        "linear.weight": random_tensor(f"{case}.{index}.w", (out_dims, in_dims), 0, less_one=False)
    }
    if bias:
        made["linear.bias"] = random_tensor(f"{case}.{index}.b", (out_dims,), 0, less_one=False)
    return {name: change(values, name) for name, values in made.items()}
