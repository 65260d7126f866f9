"""Tiny configurations of every native family, as the hub spells them. No mlx, no torch.

They stand in `cases.yml`. Chosen to tell right from nearly right: kv heads != heads, head_dim !=
hidden / heads, windows shorter than the text, contexts that cross
`original_max_position_embeddings`, at least two periods of each layer pattern, tied and untied, the
spellings of transformers 4 ("v4") and 5 ("v5").
"""

from pathlib import Path
from typing import Any

import yaml

_TABLES = yaml.load(Path(__file__).with_name("cases.yml").read_text(), yaml.CSafeLoader)


def _typed(table: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {"model_type": name.rpartition("-")[0], **case} for name, case in table.items()}


RECORDED_CASES = _typed(_TABLES["recorded"])
CASES = RECORDED_CASES | _typed(_TABLES["computed"])


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    """A config less some of its fields."""
    return {name: value for name, value in config.items() if name not in names}
