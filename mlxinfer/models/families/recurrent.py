"""Parts of families with recurrent layers: their states, and convolutions of the checkpoint."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import mlx.core as mx

from ...cache_specs import StateSpec
from ...layers.recurrent import CausalConv
from ..config import ModelConfig
from ..family import Family


def with_states(config: ModelConfig, state: StateSpec, recurs: Iterable[bool]) -> ModelConfig:
    return replace(config, states=tuple(state if one else None for one in recurs))


def causal_conv(
    family: Family,
    path: str,
    state: StateSpec,
    *,
    bias: bool = False,
    parts: Sequence[int] | None = None,
) -> CausalConv:
    """The convolution at `path`; its state is the first of `state`.

    `parts`: channels of each kind that stand side by side; None: they are of one kind.
    """
    weights, (before, channels) = family.weights, state.shapes[0][0]
    name, length = f"{path}.weight", before + 1
    if weights.has_shape(name, (channels, length, 1)):  # as MLX checkpoints have it
        weight = weights.take(name, (channels, length, 1), parts=parts)
    else:
        weight = weights.take(name, (channels, 1, length), parts=parts)[:, 0, :, None]
    return CausalConv(
        weight, weights.take(f"{path}.bias", (channels,), parts=parts) if bias else None
    )


def joint_conv(family: Family, path: str, state: StateSpec, widths: Sequence[int]) -> CausalConv:
    """The convolutions of queries, keys and values, `widths` channels each, as one."""
    (before, _), dtype = state.shapes[0]
    parts = [
        causal_conv(family, f"{path}.{name}_conv1d", StateSpec((((before, width), dtype),))).weight
        for name, width in zip("qkv", widths, strict=True)
    ]
    return CausalConv(mx.concatenate(parts))
