"""Which tensors are quantised, and how few bits some of them bear. Knows names and shapes only.

Routers decide which experts run, and few numbers do; linear attention feeds its errors back into
its state (at 4 bits its output projection alone can cost more than all else together); norms,
biases, convolutions, sinks and decay rates are small and touch every token.
"""

import re
from fnmatch import fnmatchcase

from .arrange import Output
from .formats import affine, fits
from .read import MLXFormat

ROUTERS = re.compile(r"\.(gate|router|shared_expert_gate)$")
_FLOORS: tuple[tuple[re.Pattern[str], int], ...] = (
    (ROUTERS, 8),
    (re.compile(r"\.linear_attn\.out_proj$"), 8),
    (re.compile(r"\.linear_attn\.in_proj\w*$"), 6),
    (re.compile(r"\.shared_experts?\."), 5),
    (re.compile(r"(^|\.)(embed_tokens|lm_head)$"), 4),
)
_FLOAT32 = re.compile(r"(\.A_log|\.dt_bias|\.D|correction_bias)$")  # decay rates, expert biases
_NEVER = re.compile(r"(norm|conv1d|A_log|dt_bias|sinks|bias)$")


def quantisable(output: Output) -> bool:
    """Whether this is a matrix (or a stack of them) that MLX's layers hold quantised."""
    is_matrix = len(output.shape) >= 2 and output.name.endswith(".weight")
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
