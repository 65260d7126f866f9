"""What each layer of a model keeps, in which format: from specs and options to layers of the cache.

A spec names its class in `LAYERS`; nothing else tells kinds of layers apart.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..config import KVOptions
from ..core import CacheSpec, KVSpec, LatentSpec, OwnCacheSpec, StateSpec
from ..metal_kernels.stored import FORMATS, PLAIN
from .keys_values import KeyValueLayer
from .latent import LatentLayer
from .own import OwnLayer
from .paged import Formats
from .state import StateLayer

LayerCache = KeyValueLayer | LatentLayer | StateLayer | OwnLayer

LAYERS: dict[type, Any] = {
    KVSpec: KeyValueLayer,
    LatentSpec: LatentLayer,
    StateSpec: StateLayer,
    OwnCacheSpec: OwnLayer,
}
NOT_QUANTISED: Formats = (PLAIN, PLAIN)


def lay_out(
    specs: Sequence[CacheSpec], options: KVOptions, *, dtype: mx.Dtype, key_bias: bool
) -> list[LayerCache]:
    """The layers of a cache, without arrays.

    Args:
        specs: what the model asks for.
        options: what the user asks for.
        dtype: of activations.
        key_bias: whether the model adds biases to its keys, also in layers that do not say which.

    Raises:
        InvalidRequestError: the options do not suit the model.
    """
    kinds = [LAYERS[type(spec)] for spec in specs]
    formats: Formats = (FORMATS[options.bits[0]], FORMATS[options.bits[1]])
    windowed = [kind.windowed(spec, options) for kind, spec in zip(kinds, specs, strict=True)]
    paged = [i for i, kind in enumerate(kinds) if kind.is_paged]
    plain = {paged[0], paged[-1]} if options.plain_ends and paged else set()
    if options.plain_windows:
        plain |= {i for i in paged if specs[i].window is not None}  # type: ignore[union-attr]
    if formats != NOT_QUANTISED:
        for kind, spec in zip(kinds, specs, strict=True):
            kind.check(spec, formats, key_bias=key_bias)
    return [
        kind.of(spec, NOT_QUANTISED if i in plain else formats, dtype)
        for i, (kind, spec) in enumerate(zip(kinds, windowed, strict=True))
    ]
