"""SmolLM3: Llama in which every fourth layer has no positions."""

from collections.abc import Sequence
from typing import ClassVar

from ...errors import CheckpointError
from ...layers.rope import RopeSpec
from ..family import Family
from ..jsonfields import Fields
from ..rope_config import FULL, SLIDING, read_layer_types


class SmolLM3(Family):
    """NoPE layers (arXiv 2501.18795); windows only where `use_sliding_window` says so."""

    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 4,
        "rope_theta": 2_000_000.0,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
    }

    @classmethod
    def layer_types(cls, fields: Fields, num_layers: int) -> list[str]:
        """As stated; else layers without positions have the window."""
        if not fields.boolean("use_sliding_window", default=False):
            return [FULL] * num_layers
        if fields.items("layer_types") is not None or fields.get("sliding_window") is None:
            return read_layer_types(fields, num_layers)
        return [FULL if turns else SLIDING for turns in turning(fields, num_layers)]

    @classmethod
    def rope_specs(
        cls, fields: Fields, layer_types: Sequence[str], head_dim: int
    ) -> tuple[RopeSpec | None, ...]:
        """None where `no_rope_layers` has a 0."""
        specs = super().rope_specs(fields, layer_types, head_dim)
        pairs = zip(specs, turning(fields, len(specs)), strict=True)
        return tuple(spec if turns else None for spec, turns in pairs)


def turning(fields: Fields, num_layers: int) -> list[bool]:
    """Whether each layer has positions."""
    stated = fields.items("no_rope_layers")
    if stated is None:
        interval = fields.integer("no_rope_layer_interval")
        return [bool((i + 1) % interval) for i in range(num_layers)]
    if len(stated) != num_layers or not all(value in (0, 1) for value in stated):
        raise CheckpointError(
            f"no_rope_layers in {fields.where} must be {num_layers} times 0 or 1."
        )
    return [bool(value) for value in stated]
