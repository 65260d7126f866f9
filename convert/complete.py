"""Whether the output's tensors are those that its architecture asks for. Knows shapes, no values.

The decoder is built as it will be when the result is loaded, but out of arrays of one number each;
so what would be missing, misshapen or left over then is said before hours of work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from ..errors import CheckpointError
from ..models.config import ModelConfig
from ..models.registry import family
from ..models.weights import Weights


def check_complete(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], label: str) -> None:
    """Raise CheckpointError unless a model of `config` has just these tensors."""
    module = family(config.model_type)
    small = {name: mx.zeros([1] * len(shape)) for name, shape in shapes.items()}
    weights = _Shapes(small, dtype="float32", rename=module.rename)
    weights.shapes = {module.rename(name): shape for name, shape in shapes.items()}
    weights.label = label
    module.build(replace(config, quantization=None), weights)


class _Shapes(Weights):
    """Weights that stand for larger ones."""

    shapes: Mapping[str | None, tuple[int, ...]]  # by the decoder's names
    label: str

    def raw(self, name: str, shape: Sequence[int], *, dtype: mx.Dtype | None = None) -> mx.array:
        """One number, if the tensor it stands for is there and has this shape."""
        if name not in self:
            raise CheckpointError(f"{self.label} has no tensor {name!r}, {tuple(shape)}.")
        if self.shapes[name] != tuple(shape):
            raise CheckpointError(
                f"Tensor {name!r} of {self.label} has shape {self.shapes[name]}; expected "
                f"{tuple(shape)}."
            )
        return super().raw(name, [1] * len(shape), dtype=dtype)
