"""MLX's weight formats by name and by size: "4bit", "6bit-g32", "mxfp4". Knows no tensors."""

import re
from typing import Final

from ..errors import InvalidRequestError
from .read import MLXFormat

BITS: Final = (2, 3, 4, 5, 6, 8)
GROUPS: Final = (32, 64, 128)
GROUP: Final = 64  # where nothing else was asked for
FLOATS: Final = {
    "mxfp4": MLXFormat(32, 4, "mxfp4"),
    "mxfp8": MLXFormat(32, 8, "mxfp8"),
    "nvfp4": MLXFormat(16, 4, "nvfp4"),
}
DENSE: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ITEM_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}

_AFFINE = re.compile(r"(?P<bits>[2-8])bit(?:-g(?P<group>\d+))?")


def parse_format(text: str, *, group_size: int = GROUP) -> MLXFormat | None:
    """The format that `text` names; None for "dense".

    Raises:
        InvalidRequestError: there is no such format.
    """
    if text == "dense":
        return None
    if text in FLOATS:
        return FLOATS[text]
    match = _AFFINE.fullmatch(text)
    if match is not None:
        return affine(int(match["bits"]), int(match["group"] or group_size))
    raise InvalidRequestError(
        f"{text[:60]!r} is no format; expected dense, {', '.join(FLOATS)}, or bits and perhaps a "
        "group size, such as 4bit or 6bit-g32."
    )


def affine(bits: int, group_size: int = GROUP) -> MLXFormat:
    """`bits` bits in groups that share a scale and a bias.

    Raises:
        InvalidRequestError: MLX has no such format.
    """
    if bits not in BITS or group_size not in GROUPS:
        raise InvalidRequestError(
            f"{bits} bits in groups of {group_size}: MLX has {', '.join(map(str, BITS))} bits in "
            f"groups of {', '.join(map(str, GROUPS))}."
        )
    return MLXFormat(group_size, bits)


def name_of(form: MLXFormat | None) -> str:
    """`4bit-g64`, `mxfp4`; `dense` where nothing is quantised."""
    if form is None:
        return "dense"
    return f"{form.bits}bit-g{form.group_size}" if form.mode == "affine" else form.mode


def fits(form: MLXFormat, shape: tuple[int, ...]) -> bool:
    """Whether whole groups fill a row."""
    return len(shape) >= 2 and shape[-1] % form.group_size == 0
