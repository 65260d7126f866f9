"""What an attention layer may ask of the KV cache. Knows no pages, no scheduler."""

from typing import Protocol

import mlx.core as mx

from ..metal_kernels.heads import Heads


class LayerKV(Protocol):
    """The KV cache of one layer during one step.

    The step is a flat list of T tokens of several sequences; which token belongs to which sequence,
    and what each may see (causality, sliding window), is known here and not in the model.
    """

    heads: Heads | None  # what `attend_heads` does to the projection; None: the layer does it

    def attend_heads(
        self, qkv: mx.array, *, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        """`attend`, from the fused projection (T, (num_heads + 2 * num_kv_heads) * head_dim)."""
        ...

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Store this step's keys and values, then attend over all that each token may see.

        Args:
            queries: (T, num_heads, key_dim), position-encoded.
            keys: (T, num_kv_heads, key_dim), position-encoded.
            values: (T, num_kv_heads, value_dim).
            scale: multiplies the scores.
            sinks: (num_heads,) learned logits that take part in each softmax and carry no value.

        Returns:
            (T, num_heads * value_dim), the heads side by side.
        """
        ...
