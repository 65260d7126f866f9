"""The quantisation that config.json states: which weights are quantised, and in which format.

MLX checkpoints state one format for all layers and exceptions by path:
`{"group_size": 64, "bits": 4, "mode": "affine", "lm_head": false, "a.b": {"bits": 8, ...}}`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import CheckpointError, UnsupportedModelError
from .jsonfields import Fields

_GROUPS = {"affine": (32, 64, 128), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}
_BITS = {"affine": (1, 2, 3, 4, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}
_DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """How numbers are packed: `group_size` weights of `bits` bits share a scale."""

    group_size: int
    bits: int
    mode: str = "affine"  # "affine" | "mxfp4" | "mxfp8" | "nvfp4"


MXFP4 = QuantFormat(32, 4, "mxfp4")
MXFP8 = QuantFormat(32, 8, "mxfp8")
NVFP4 = QuantFormat(16, 4, "nvfp4")


@dataclass(frozen=True, slots=True)
class Quantization:
    """The format of a checkpoint's quantised layers, and the layers that differ.

    Attributes:
        blocks: the decoder's path of a matrix -> how many inputs are rotated together, see
            `layers.linear.Rotation`; 0, or no entry: they are not.
    """

    default: QuantFormat
    by_path: Mapping[str, QuantFormat] = field(default_factory=dict)
    blocks: Mapping[str, int] = field(default_factory=dict)

    def of(self, path: str, fitting: QuantFormat | None = None) -> QuantFormat:
        """The format of the layer at `path`, as the checkpoint names it.

        Args:
            fitting: what its tensors look like, where that is a format; some checkpoints leave out
                exceptions, and mlx-lm reads them so.
        """
        return self.by_path.get(path, fitting or self.default)


def format_of_shapes(
    in_dims: int, num_words: int, num_groups: int, *, integer_scales: bool
) -> QuantFormat | None:
    """The only format of rows of `num_words` uint32 and `num_groups` scales; None: there is none.

    Args:
        in_dims: numbers in a row.
        integer_scales: scales are uint8, as in the formats that are not affine.
    """
    if not num_groups or in_dims % num_groups or num_words * 32 % in_dims:
        return None
    group_size, bits = in_dims // num_groups, num_words * 32 // in_dims
    modes = [m for m in _GROUPS if group_size in _GROUPS[m] and bits in _BITS[m]]
    mode = next((m for m in modes if (m != "affine") == integer_scales), None)
    return None if mode is None else QuantFormat(group_size, bits, mode)


def read_quantization(config: Fields) -> Quantization | None:
    """The quantisation that config.json states; None: nothing is quantised."""
    stated = config.fields("quantization", "quantization_config")
    if stated is None:
        return None
    method = stated.get("quant_method")
    if method == "mxfp4":
        return Quantization(MXFP4)
    if method is not None or stated.get("group_size", "bits", "mode") is None:
        raise UnsupportedModelError(
            f"{stated.where} says quant_method {str(method)[:40]!r}, which cannot be loaded as it "
            "is; use the original checkpoint, or convert it."
        )
    by_path = {
        path: _read_format(Fields(value, f"{path} in {stated.where}"))
        for path, value in stated.values.items()
        if isinstance(value, dict)
    }
    return Quantization(_read_format(stated), by_path)


def _read_format(fields: Fields) -> QuantFormat:
    mode = fields.text("mode", default="affine")
    if mode not in _GROUPS:
        raise CheckpointError(f"mode in {fields.where} is {mode!r}; expected one of {[*_GROUPS]}.")
    group_size = fields.integer("group_size", default=_DEFAULTS[mode][0])
    bits = fields.integer("bits", default=_DEFAULTS[mode][1])
    if group_size not in _GROUPS[mode] or bits not in _BITS[mode]:
        raise CheckpointError(
            f"{fields.where} says {bits} bits in groups of {group_size}; {mode} has "
            f"{_BITS[mode]} bits in groups of {_GROUPS[mode]}."
        )
    return QuantFormat(group_size, bits, mode)
