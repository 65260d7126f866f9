"""Which experts, stored one by one, make up which of MLX's switch layers. Knows names only."""

import re
from collections.abc import Iterable

from ...errors import CheckpointError

_EXPERT = re.compile(r"(?P<block>.+)\.experts\.(?P<index>0|[1-9]\d{0,4})\.(?P<part>.+)")
_RENAMED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral's names


def expert_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Stacked name -> its experts in order.

    `model.layers.0.mlp.switch_mlp.up_proj.weight` -> [`model.layers.0.mlp.experts.0.up_proj...`].

    Raises:
        CheckpointError: an expert is missing.
    """
    found: dict[str, dict[int, str]] = {}
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            found.setdefault(_stacked_name(match), {})[int(match["index"])] = name
    return {stacked: _in_order(stacked, experts) for stacked, experts in found.items()}


def _stacked_name(match: re.Match[str]) -> str:
    layer, dot, leaf = match["part"].rpartition(".")
    return f"{match['block']}.switch_mlp.{_RENAMED.get(layer, layer)}{dot}{leaf}"


def _in_order(stacked: str, experts: dict[int, str]) -> list[str]:
    missing = set(range(len(experts))) - experts.keys()
    if missing:
        raise CheckpointError(
            f"{stacked} would have {len(experts)} experts, but expert {min(missing)} is missing."
        )
    return [experts[index] for index in range(len(experts))]
