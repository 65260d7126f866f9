"""The tensors of a folder of safetensors, and the dtype that a model computes in.

MLX sees a file only after its header was checked (safetensors.py).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx

from ..errors import CheckpointError, InvalidRequestError, shown
from .safetensors import read_headers

_OF_PACKED = (".scales", ".biases")
FLOATS = {mx.float32: "float32", mx.bfloat16: "bfloat16", mx.float16: "float16"}
_DTYPES = {name: dtype for dtype, name in FLOATS.items()}


def load_tensors(folder: Path) -> dict[str, mx.array]:
    """Every tensor of a checkpoint, by name. Data is read when an array is first evaluated.

    Raises:
        CheckpointError: a file that is broken.
        ModelNotFoundError: there is none.
    """
    tensors: dict[str, mx.array] = {}
    for path, header in read_headers(folder).items():
        try:
            loaded = mx.load(str(path))
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be loaded: {error}") from error
        assert isinstance(loaded, dict), path
        assert loaded.keys() == header.keys(), path
        tensors.update(loaded)
    return tensors


def choose_dtype(
    tensors: Mapping[str, mx.array], dtype: str, *, fits_float16: bool = True
) -> mx.Dtype:
    """The dtype of activations: as requested, or the checkpoint's own; float32 on the CPU.

    The checkpoint's own is that of most tensors but scales and biases of quantised matrices, which
    may be narrower than what they were made from. Vectors in float32 alone make no model wide.

    Args:
        tensors: by name.
        dtype: "auto", or one of MLX's.
        fits_float16: whether activations stay below 65,504; else "auto" takes bfloat16 instead.
    """
    if dtype != "auto":
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise InvalidRequestError(
                f"dtype is {shown(dtype)}; expected auto, {', '.join(_DTYPES)}.", param="dtype"
            )
        return _DTYPES[dtype]
    if not mx.metal.is_available():
        return mx.float32
    floats = {name: t for name, t in tensors.items() if t.dtype in FLOATS}
    packed = [t.dtype for name, t in floats.items() if name.endswith(_OF_PACKED)]
    own = [t for name, t in floats.items() if not name.endswith(_OF_PACKED)]
    chosen = _most([t.dtype for t in own] or packed)
    if chosen == mx.float32 and packed and all(t.ndim < 2 for t in own):
        chosen = _most(packed)
    return mx.bfloat16 if chosen == mx.float16 and not fits_float16 else chosen


def _most(dtypes: Sequence[mx.Dtype]) -> mx.Dtype:
    return Counter(dtypes).most_common(1)[0][0] if dtypes else mx.float32
