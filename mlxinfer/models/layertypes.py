"""Which layers see everything and which a sliding window, however a config says it. No mlx."""

from ..errors import CheckpointError
from .jsonfields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"


def read_layer_types(fields: Fields, num_layers: int) -> list[str]:
    """FULL or SLIDING for each layer, whether a list, a period or a first layer is stated."""
    if fields.get("sliding_window") is None or not _windows_used(fields):
        return [FULL] * num_layers
    stated = fields.items("layer_types")
    if stated is not None:
        if len(stated) != num_layers or not all(kind in (FULL, SLIDING) for kind in stated):
            raise CheckpointError(
                f"layer_types in {fields.where} must be {num_layers} times {FULL!r} or {SLIDING!r}."
            )
        return stated
    if fields.get("sliding_window_pattern") is not None:
        period = fields.integer("_sliding_window_pattern", "sliding_window_pattern", high=2**20)
        return [SLIDING if (i + 1) % period else FULL for i in range(num_layers)]
    first = 0
    if fields.text("model_type") in ("qwen2", "qwen3"):
        first = fields.integer("max_window_layers", low=0, default=28)
    return [SLIDING if i >= first else FULL for i in range(num_layers)]


def _windows_used(fields: Fields) -> bool:
    model_type = fields.text("model_type")
    if model_type.startswith("qwen"):
        return fields.boolean("use_sliding_window", default=False)
    return model_type != "llama"
