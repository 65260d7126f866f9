"""States before the tokens of a step, as a recurrent mixer reads them in plain MLX."""

from dataclasses import dataclass

import mlx.core as mx

from mlxinfer.layers.step import Arrays


@dataclass(frozen=True)
class Before:
    """As of `StatesBefore`, without a plan for kernels."""

    states: Arrays
    lengths: mx.array | None

    def read(self) -> Arrays:
        return self.states
