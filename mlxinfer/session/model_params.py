"""The sampling values that a checkpoint states: how its conversations are answered by default."""

import math
from pathlib import Path
from typing import Any

from ..core import SamplingParams
from ..files import read_json

RANGES = {  # of a generation_config.json
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (0, 1_000_000),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
}


def read_sampling(folder: Path) -> dict[str, Any]:
    """The sampling values of a checkpoint, by their names in SamplingParams; {} if it has none.

    Unusable values are left out. `"do_sample": false` makes the temperature 0.

    Raises:
        CheckpointError: the file is broken.
    """
    given = read_json(folder / "generation_config.json")
    usable: dict[str, Any] = {
        name: given[name]
        for name, (low, high) in RANGES.items()
        if _is_number(given.get(name)) and low <= given[name] <= high
    }
    if "top_k" in usable:
        usable["top_k"] = int(usable["top_k"])
    if usable.get("top_p") == 0:
        del usable["top_p"]
    if usable.get("repetition_penalty") == 0:
        del usable["repetition_penalty"]
    if given.get("do_sample") is False:
        usable["temperature"] = 0.0
    return usable


def chat_params(folder: Path) -> SamplingParams:
    """The default values of conversations: those of the model."""
    values = read_sampling(folder)
    samples = {"top_p", "top_k", "min_p"}.intersection(values)
    temperature = 1.0 if samples else 0.0
    return SamplingParams(**{"max_tokens": None, "temperature": temperature, **values})


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
