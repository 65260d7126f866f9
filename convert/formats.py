"""MLX's weight formats by name ("4bit", "6bit-g32", "mxfp4"), and which a tensor may have.

Some tensors are never quantised or have a minimum of bits. Routers decide which experts run;
recurrent layers feed their errors back into their state (at 4 bits the output projection of linear
attention alone can cost more than all else together); norms, biases, convolutions, sinks and decay
rates are small and act on every token.
"""

import re
from fnmatch import fnmatchcase
from typing import Final

from ..errors import InvalidRequestError
from .arrange import OutputTensor
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


ROUTERS = re.compile(
    r"\.(gate|router|router\.(proj|layer)|modality_router|shared_expert_gate|indexer\.weights_proj)$"
)
_FLOORS: tuple[tuple[re.Pattern[str], int], ...] = (
    (ROUTERS, 8),
    (re.compile(r"\.indexer\.(wq_b|wk)$"), 8),  # which tokens are seen is a choice, too
    (re.compile(r"\.(linear_attn|mamba|mixer)\.out_proj$"), 8),
    (re.compile(r"\.(linear_attn|mamba|mixer)\.in_proj\w*$"), 6),
    (re.compile(r"\.shared_experts?\."), 5),
    (re.compile(r"(^mtp\.fc|\.eh_proj)$"), 8),
    (re.compile(r"^mtp\."), 4),
    (re.compile(r"(^|\.)(embed_tokens|lm_head)$"), 4),
)
_FLOAT32 = re.compile(r"(\.A_log|\.dt_bias|\.D|correction_bias)$")  # decay rates, expert biases
_NEVER = re.compile(r"(norm|conv1d|A_log|dt_bias|sinks|bias)$")


def quantisable(output: OutputTensor) -> bool:
    """Whether this is a matrix (or a stack of them) that MLX's layers hold quantised."""
    is_matrix = len(output.shape) >= 2 and output.name.endswith(".weight") and not output.dense
    return is_matrix and not _NEVER.search(output.path) and fits(affine(4, 32), output.shape)


def stays_float32(path: str) -> bool:
    """Whether 16 bits are too few for this tensor, whatever the model computes in."""
    return _FLOAT32.search(path) is not None


def floor_bits(path: str) -> int:
    """The least bits that a layer gets unless the user says otherwise; 0: no limit."""
    return next((bits for pattern, bits in _FLOORS if pattern.search(path)), 0)


def raised(form: MLXFormat, path: str) -> MLXFormat:
    """`form`, or the affine format of the layer's least bits."""
    least = floor_bits(path)
    return form if form.bits >= least else affine(least)


def kept_format(output: OutputTensor) -> MLXFormat | None:
    """The format that keeps a quantised tensor: the source's own, or a close one.

    Formats that MLX does not have (GGUF's K- and IQ-quants with groups of 16 or a codebook, FP8
    with float scales, NVFP4 with a global scale, act-order) are quantised anew, in groups of 32: to
    6 bits where the source has fewer than 4 bits a weight, else to 8. The error of that is small
    beside the one that is in the source already. None: no group fits, so the values stay dense.
    """
    if output.lossless is not None:
        return output.lossless
    if not quantisable(output):
        return None
    near = affine(6 if output.stored_bits < 4 else 8, 32)
    return fitting(raised(near, output.path), output.shape)


def fitting(form: MLXFormat, shape: tuple[int, ...]) -> MLXFormat | None:
    """`form`, or the same bits in smaller groups where these do not fill a row; None: neither."""
    if fits(form, shape):
        return form
    if form.mode != "affine":
        return None
    return next((f for f in (affine(form.bits, g) for g in (64, 32)) if fits(f, shape)), None)


def matches(pattern: str, path: str) -> bool:
    """`lm_head`, `down_proj`, `layers.0`: whole parts of a path; `*.mlp.*`: a shell pattern."""
    if any(character in pattern for character in "*?["):
        return fnmatchcase(path, pattern)
    return f".{pattern}." in f".{path}."
