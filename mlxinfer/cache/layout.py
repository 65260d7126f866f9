"""What each layer keeps of the KV cache under the user's options. Decides; holds nothing."""

from collections.abc import Sequence
from dataclasses import replace

from ..config import KVOptions
from ..core import KVSpec
from ..errors import InvalidRequestError
from .formats import rotatable
from .pool import Bits

PLAIN: Bits = (None, None)


def lay_out(
    specs: Sequence[KVSpec], options: KVOptions, *, key_bias: bool
) -> tuple[list[KVSpec], list[Bits]]:
    """Specs and stored bits of every layer.

    Args:
        specs: what the model asks for.
        options: what the user asks for.
        key_bias: whether the model adds biases to its keys.

    Raises:
        InvalidRequestError: the options do not suit the model.
    """
    windowed = [_windowed(spec, options) for spec in specs]
    if options.bits == PLAIN:
        return windowed, [PLAIN] * len(specs)
    _check_bits(specs, options.bits, key_bias)
    ends = {0, len(specs) - 1} if options.plain_ends else set()
    bits = [
        PLAIN if i in ends or (options.plain_windows and spec.window is not None) else options.bits
        for i, spec in enumerate(specs)
    ]
    return windowed, bits


def _windowed(spec: KVSpec, options: KVOptions) -> KVSpec:
    """A layer's own window stands where it is the smaller one."""
    if options.window is None or (spec.window is not None and spec.window <= options.window):
        return spec
    return replace(spec, window=options.window, sinks=options.sinks)


def _check_bits(specs: Sequence[KVSpec], bits: Bits, key_bias: bool) -> None:
    if bits[0] == 4 and key_bias:
        raise InvalidRequestError(
            "kv_bits=4 stores keys in 4 bits, and this model adds large biases to its keys, which "
            "4 bits cannot hold beside the rest; use kv_bits=8 or kv_bits=(8, 4).",
            param="kv_bits",
        )
    for spec in specs:
        if spec.key_dim % 8 or spec.value_dim % 8:
            raise InvalidRequestError(
                f"kv_bits needs head dims that are multiples of 8; this model has {spec.key_dim} "
                f"and {spec.value_dim}. Leave kv_bits out.",
                param="kv_bits",
            )
        if bits[0] == 4 and not rotatable(spec.key_dim):
            raise InvalidRequestError(
                f"kv_bits=4 rotates keys, which a head dim of {spec.key_dim} does not allow; use "
                "kv_bits=8 or kv_bits=(8, 4).",
                param="kv_bits",
            )
