"""Sampling as Metal gets it: one kernel for all rows. Here one operation stands for it.

What it chooses means nothing; what the host does for it is what it does on a Mac, but for MLX's
call of the kernel. Penalties are MLX's operations there, too.
"""

from collections.abc import Sequence

import mlx.core as mx

from ..metal_kernels.launch import Launch
from ..metal_kernels.sample import KERNEL
from ..metal_kernels.variants import Variant


class OneOperation:
    """A device on which the sampling kernel is the quickest choice there is."""

    def run(self, launch: Launch, inputs: Sequence[mx.array]) -> list[mx.array]:
        """A token for each row, lazy."""
        assert launch.kernel is KERNEL, launch.kernel
        logits, settings, _ = inputs
        return [mx.argmax(mx.depends([logits], [settings])[0], axis=-1).view(mx.int32)]


def only_sampling(variants: Sequence[Variant]) -> frozenset[Variant]:
    """Chooses the sampling kernel, and no other."""
    return frozenset(variant for variant in variants if variant.kind == "sample")
