"""The metadata of a GGUF file, read key by key under the name of its architecture."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....errors import UnsupportedModelError
from ....models.jsonfields import Fields


class Facts:
    """The metadata of one architecture, read key by key."""

    def __init__(self, metadata: Mapping[str, Any], label: str) -> None:
        self.all = Fields(metadata, label)
        self.architecture = self.all.text("general.architecture")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; an array of the same one for each layer counts."""
        name = f"{self.architecture}.{key}"
        value = self.all.get(name)
        if isinstance(value, np.ndarray):
            different = np.unique(value).tolist() if value.dtype.kind in "iu" else []
            if len(different) != 1:
                raise UnsupportedModelError(
                    f"{name} in {self.all.where} differs between layers; not supported."
                )
            return Fields({name: different[0]}, self.all.where).integer(name)
        return (
            self.all.integer(name) if default is None else self.all.integer(name, default=default)
        )

    def number(self, key: str, default: float | None = None) -> float | None:
        """A positive number, or the default."""
        name = f"{self.architecture}.{key}"
        return self.all.number(name, above=0.0, default=default)

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        return self.all.get(f"{self.architecture}.{key}") is not None
