"""What a model's makers say about sampling it. Knows generation_config.json, no requests."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...text.tokenizer_files import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Used where a request says nothing. Without generation_config.json: as OpenAI, temperature 1.

    vLLM and SGLang take the model's own values too: models are published with what they were
    evaluated at, and most chat models are poor at temperature 1.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_defaults(folder: Path) -> SamplingDefaults:
    """The sampling values of a checkpoint's generation_config.json; unusable ones are left out.

    `"do_sample": false` makes the default greedy.

    Raises:
        CheckpointError: the file is broken.
    """
    given = read_json(folder / "generation_config.json")
    usable: dict[str, Any] = {
        name: given[name]
        for name, (low, high) in _RANGES.items()
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
    return SamplingDefaults(**usable)


_RANGES = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (0, 1_000_000),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
}


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
