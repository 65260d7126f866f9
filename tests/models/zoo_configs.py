"""Small configs of every architecture that mlx-lm defines, derived from its ModelArgs.

A field gets the small value that its name has in `zoo.yml`; fields without one keep their defaults.
What these do not settle, such as lists with an entry for each layer, stands there as overrides.
"""

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

_TABLES = yaml.load(Path(__file__).with_name("zoo.yml").read_text(), yaml.CSafeLoader)
SIZES: dict[str, Any] = {name: value for value, names in _TABLES["sizes"] for name in names}
OVERRIDES: dict[str, dict[str, Any]] = _TABLES["overrides"]
SLIDING: list[str] = _TABLES["bases"]["sliding"]


def small_config(name: str, module: ModuleType) -> dict[str, Any]:
    """A config.json of the architecture that `module` defines, of a few thousand parameters."""
    fields = dataclasses.fields(module.ModelArgs)
    sizes = {field.name: SIZES[field.name] for field in fields if field.name in SIZES}
    return {**sizes, "model_type": name, **OVERRIDES.get(name, {})}
