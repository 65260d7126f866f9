"""Checkpoints for `bench prefix`: one of middle size, one with sliding windows."""

from dataclasses import dataclass

from .checkpoints import Dense


@dataclass(frozen=True, slots=True, kw_only=True)
class Windowed(Dense):
    """A Mistral whose layers alternate: all positions, then a sliding window."""

    window: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """As a dense decoder, without norms on queries and keys."""
        every = Dense.shapes(self)
        return {
            name: shape
            for name, shape in every.items()
            if "self_attn.q_norm" not in name and "self_attn.k_norm" not in name
        }

    def config(self) -> dict[str, object]:
        """With a type for every layer, as both engines read it."""
        kinds = ["full_attention", "sliding_attention"]
        return {
            **Dense.config(self),
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": self.window,
            "layer_types": [kinds[i % 2] for i in range(self.layers)],
        }


MIDDLE = Dense(hidden=384, inner=1152, layers=8, heads=6, kv_heads=3, head_dim=64, vocab=2048)
FLEET = Dense(hidden=128, inner=384, layers=4, heads=2, kv_heads=1, head_dim=64, vocab=512)
WINDOWED = Windowed(
    hidden=128, inner=384, layers=4, heads=4, kv_heads=2, head_dim=32, vocab=512, window=64
)
TINY_WINDOWED = Windowed(
    hidden=32, inner=64, layers=2, heads=2, kv_heads=1, head_dim=16, vocab=512, window=64
)
