"""What shapes the output of a conversion, and what must not change when it is resumed."""

import hashlib
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequestError
from .plan import SHARD_BYTES
from .recipes import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What shapes the output, and how it is checked."""

    recipe: Recipe
    target_bpw: float | None = None
    target_bytes: int | None = None
    searched: bool = True  # scales by squared error; False: as mx.quantize
    calibration: str | None = None  # text; None: squared errors count alike
    check_text: str | None = None  # text; None: a part of the calibration text
    check_tensors: bool = True
    max_kl: float | None = None  # None: limit_for() the bits
    max_memory: int | None = None  # bytes
    shard_bytes: int = SHARD_BYTES
    figures: bool = True  # in the model card

    def __post_init__(self) -> None:
        if self.targeted and self.calibration is None:
            raise InvalidRequestError("A target size needs a text for calibration.")

    @property
    def targeted(self) -> bool:
        """Whether formats follow from a size."""
        return self.target_bpw is not None or self.target_bytes is not None

    def limit_bytes(self, num_weights: int) -> int | None:
        """The target in bytes, if there is one."""
        if self.target_bpw is not None:
            return int(self.target_bpw * num_weights / 8)
        return self.target_bytes


def identity(options: Options, *, comparing: bool) -> dict[str, Any]:
    """What must be the same for an interrupted conversion to go on."""
    recipe = options.recipe
    return {
        "recipe": recipe.name,
        "overrides": [str(override) for override in recipe.overrides],
        "group size": str(recipe.base),
        "dtype": recipe.dtype,
        "keep format": recipe.keep,
        "target": [options.target_bpw, options.target_bytes],
        "scales": "searched" if options.searched else "extremes",
        "texts": [_digest(options.calibration), _digest(options.check_text)],
        "shards": options.shard_bytes,
        "figures": options.figures,
        "check": [options.check_tensors, comparing],
    }


def _digest(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()[:16]
