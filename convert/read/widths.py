"""How many inputs a matrix has, as the config and its name tell. Knows names only."""

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ModelError
from ...models.config import normalise

Widths = Callable[[str], int | None]
"""The inputs of the matrix at a path; None: nobody knows."""


def widths_of(config: Mapping[str, Any]) -> Widths:
    """For the matrices of a model; `config` says nothing of quantisation.

    Where it makes no sense, whoever arranges the tensors says so: here no width is known.
    """
    try:
        model = normalise(config)
    except ModelError:
        return lambda path: None
    experts = model.moe_intermediate_size

    def width(path: str) -> int:
        leaf = path.rpartition(".")[2]
        if leaf == "o_proj":
            return model.num_heads * model.head_dim
        if leaf == "down_proj":
            of_experts = ".experts." in path or ".switch_mlp." in path
            return experts if of_experts else model.intermediate_size
        return model.hidden_size

    return width
