"""Sizes of published models, one or more of each native family, from their config.json. No mlx.

Parameters are the text model's, as model cards count them, in billions. `kv` is bytes a token that
attention keeps in 16 bits where every layer sees everything, `state` bytes a sequence of recurrent
layers (float32, as kept here). `published.yml` has the models; its `sizes` are those of `_SIZES`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Published:
    """One model.

    Args:
        config: config.json, as far as it states sizes.
        billions: parameters.
        kv: bytes a token in 16 bits.
        state: bytes a sequence.
        gb_at_4_bits: gigabytes of its conversion to 4 bits in groups of 64, where one is known.
    """

    config: dict[str, Any]
    billions: float
    kv: int
    state: int = 0
    gb_at_4_bits: float | None = None


_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_OWN = ("billions", "kv", "state", "gb_at_4_bits")


def _model(entry: dict[str, Any]) -> Published:
    config = dict(zip(_SIZES, entry["sizes"], strict=True))
    config |= {key: value for key, value in entry.items() if key not in ("sizes", *_OWN)}
    return Published(config, **{key: entry[key] for key in _OWN if key in entry})


_MODELS = yaml.load(Path(__file__).with_name("published.yml").read_text(), yaml.CSafeLoader)
PUBLISHED = {name: _model(entry) for name, entry in _MODELS["models"].items()}
