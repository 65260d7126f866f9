"""Options of a conversion: formats by name, recipe, exceptions by pattern, target size, checks.

Recipes:
4bit, 8bit, 6bit-g32, mxfp4 …   one format everywhere, with the minimum bits below
mixed                           4.5 bits a weight, chosen by what each costs: --target-bpw 4.5
bf16, fp16, fp32                nothing quantised
dense                           nothing quantised, each number in the dtype that it has
keep                            quantised tensors stay, bit for bit, or in a close format if MLX
                                does not have theirs; other tensors stay as they are

The tower of a model that sees pictures keeps its dtype, unless a width is given for it
(--quantize-tower).

Some tensors are never quantised or have a minimum of bits. Routers decide which experts run.
Recurrent layers feed their errors back into their state: at 4 bits the output projection of linear
attention alone can cost more than everything else together. Norms, biases, convolutions, sinks and
decay rates are small and act on every token.
"""

import hashlib
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from ..errors import InvalidRequestError
from .arrange import OutputTensor
from .read import MLXFormat
from .read.schemes.floats import MXFP4, MXFP8, NVFP4

BITS: Final = (2, 3, 4, 5, 6, 8)
GROUPS: Final = (32, 64, 128)
GROUP: Final = 64  # where nothing else was asked for
FLOATS: Final = {form.mode: form for form in (MXFP4, MXFP8, NVFP4)}
DENSE: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ITEM_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}

_AFFINE = re.compile(r"(?P<bits>[2-8])bit(?:-g(?P<group>\d+))?")


def parse_format(text: str, *, group_size: int = GROUP) -> MLXFormat | None:
    """The format that `text` names; None for "dense"."""
    if text == "dense":
        return None
    if text in FLOATS:
        return FLOATS[text]
    match = _AFFINE.fullmatch(text)
    if match is not None:
        return affine(int(match["bits"]), int(match["group"] or group_size))
    raise InvalidRequestError(
        f"{text[:60]!r} is no format; expected dense, {', '.join(FLOATS)}, or bits with or "
        "without a group size, such as 4bit or 6bit-g32."
    )


def affine(bits: int, group_size: int = GROUP) -> MLXFormat:
    """`bits` bits in groups that share a scale and a bias."""
    if bits not in BITS or group_size not in GROUPS:
        raise InvalidRequestError(
            f"MLX has no format of {bits} bits in groups of {group_size}; expected "
            f"{', '.join(map(str, BITS))} bits in groups of {', '.join(map(str, GROUPS))}."
        )
    return MLXFormat(group_size, bits)


def name_of(form: MLXFormat | None) -> str:
    """`4bit-g64`, `mxfp4`; `dense` where nothing is quantised."""
    if form is None:
        return "dense"
    return f"{form.bits}bit-g{form.group_size}" if form.mode == "affine" else form.mode


def fits(form: MLXFormat, shape: tuple[int, ...]) -> bool:
    return len(shape) >= 2 and shape[-1] % form.group_size == 0


ROUTERS = re.compile(
    r"\.(gate|router|router\.(proj|layer)|modality_router|shared_expert_gate|indexer\.weights_proj)$"
)
_FLOORS: tuple[tuple[re.Pattern[str], int], ...] = (
    (ROUTERS, 8),
    # which tokens are seen is a choice, too
    (re.compile(r"\.indexer\.(wq_b|wk|index_qk_proj)$"), 8),
    (re.compile(r"\.(linear_attn|mamba|mixer)\.out_proj$"), 8),
    (re.compile(r"\.(linear_attn|mamba|mixer)\.in_proj\w*$"), 6),
    (re.compile(r"\.shared_experts?\."), 5),
    (re.compile(r"(^mtp\.fc(_embedding|_hidden)?|^mtp_linear_proj\.0|\.eh_proj)$"), 8),
    (re.compile(r"^mtp[._]"), 4),
    (re.compile(r"(^|\.)(embed_tokens|lm_head)$"), 4),
)
_FLOAT32 = re.compile(r"(\.A_log|\.dt_bias|\.D|correction_bias)$")  # decay rates, expert biases
_NEVER = re.compile(r"(norm|conv|conv1d|A_log|dt_bias|sinks|bias)$")


def is_matrix(output: OutputTensor) -> bool:
    """Whether this is a matrix (or a stack of them), and not the kernel of a convolution."""
    is_weight = len(output.shape) >= 2 and output.name.endswith(".weight")
    return is_weight and not _NEVER.search(output.path)


def quantisable(output: OutputTensor) -> bool:
    """Whether this is a matrix (or a stack of them) that MLX's layers hold quantised."""
    return is_matrix(output) and not output.dense and fits(affine(4, 32), output.shape)


def stays_float32(path: str) -> bool:
    """Whether 16 bits are too few for this tensor, in any model."""
    return _FLOAT32.search(path) is not None


def floor_bits(path: str) -> int:
    """The least bits that a layer gets unless the user says otherwise; 0: no limit."""
    return next((bits for pattern, bits in _FLOORS if pattern.search(path)), 0)


def raised(form: MLXFormat, path: str, least_bits: int = 0) -> MLXFormat:
    """`form`, or the affine format of the layer's least bits."""
    least = max(floor_bits(path), least_bits)
    return form if form.bits >= least else affine(least)


def kept_format(output: OutputTensor) -> MLXFormat | None:
    """The format that keeps a quantised tensor: the source's own, or a close one.

    MLX does not have some formats: GGUF's K- and IQ-quants with groups of 16 or a codebook, FP8
    with float scales, NVFP4 with a global scale, act-order. These are quantised anew in groups of
    32, to 6 bits if the source has fewer than 4 bits a weight, else to 8. This adds little to the
    error that the source already has. None: no group fits, so the values stay dense.
    """
    if output.lossless is not None:
        return output.lossless
    if not quantisable(output):
        return None
    near = affine(6 if output.stored_bits < 4 else 8, 32)
    return fitting(raised(near, output.path), output.shape)


def fitting(form: MLXFormat, shape: tuple[int, ...]) -> MLXFormat | None:
    """`form`, or the same bits in smaller groups if its groups do not fill a row; None: neither."""
    if fits(form, shape):
        return form
    if form.mode != "affine":
        return None
    return next((f for f in (affine(form.bits, g) for g in (64, 32)) if fits(f, shape)), None)


def matches(pattern: str, path: str) -> bool:
    """`lm_head`, `down_proj`, `layers.0`: whole parts of a path; `layers.2.*`: a shell pattern.

    Both may begin at any part: `layers.0` is `model.layers.0`.
    """
    if any(character in pattern for character in "*?["):
        return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")
    return f".{pattern}." in f".{path}."


SHARD_BYTES = 5 * 10**9  # as mlx-lm
TARGETS: Final = {"mixed": 4.5}  # bits per weight of recipes that are targets
_BITS = re.compile(r"\dbit")


@dataclass(frozen=True, slots=True)
class Override:
    """`--set PATTERN=FORMAT`."""

    pattern: str
    form: MLXFormat | None  # None: not quantised
    exact: bool = False  # its group size was stated: no other will do


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How every tensor is to be stored."""

    name: str
    base: MLXFormat | None  # None: nothing is quantised
    target_bpw: float | None = None  # formats follow from measuring; `base` until then
    keep: bool = False  # formats that the source already has stay
    dtype: str | None = None  # of what is not quantised; None: as it is
    overrides: tuple[Override, ...] = ()
    tower: MLXFormat | None = None  # of matrices of what sees pictures; None: not quantised

    def choose(self, output: OutputTensor) -> MLXFormat | None:
        """The format of one tensor; None: not quantised."""
        given = self.given(output)
        if given is not None:
            return given.form
        if self.keep and output.quantised:
            return kept_format(output)
        if output.seeing:
            return self.tower if quantisable(output) else None
        if self.base is None or not quantisable(output):
            return None
        return raised(self.base, output.path, output.least_bits)

    @property
    def is_exact(self) -> bool:
        return self.base is None and self.dtype is None

    def fixes(self, output: OutputTensor) -> bool:
        """Whether a target size leaves the format of this tensor alone."""
        keeps_format = self.keep and output.quantised
        return output.seeing or keeps_format or self.given(output) is not None

    def given(self, output: OutputTensor) -> Override | None:
        if not is_matrix(output):
            return None
        matching = [o for o in self.overrides if matches(o.pattern, output.path)]
        return matching[-1] if matching else None


def make_recipe(
    name: str,
    *,
    group_size: int | None = None,
    dtype: str | None = None,
    overrides: tuple[str, ...] = (),
    keep_format: bool = False,
    tower_bits: int | None = None,
) -> Recipe:
    """A recipe by name.

    Args:
        group_size: of affine formats that do not state one.
        dtype: of what is not quantised: bfloat16, float16, float32; None: as it is.
        overrides: "PATTERN=FORMAT"; of several that match, the last counts.
        keep_format: keep what the source has quantised, as `keep` does; the rest as `name` says.
        tower_bits: of the part that sees pictures; None: it is not quantised.
    """
    group = group_size or GROUP
    if dtype is not None and dtype not in DENSE.values():
        raise InvalidRequestError(
            f"dtype is {dtype!r}; expected {', '.join(DENSE.values())}.", param="dtype"
        )
    _check_group(group_size, [name, *(text.partition("=")[2] for text in overrides)])
    base: MLXFormat | None = None
    if name in DENSE:
        if dtype not in (None, DENSE[name]):
            raise InvalidRequestError(f"The recipe {name} and dtype {dtype} disagree.")
        dtype = DENSE[name]
    elif name in TARGETS:
        base = affine(4)
    elif name != "keep":
        base = _base(name, group)
    return Recipe(
        name=name,
        base=base,
        target_bpw=TARGETS.get(name),
        keep=keep_format or name == "keep",
        dtype=dtype,
        overrides=tuple(_override(text, group) for text in overrides),
        tower=None if tower_bits is None else affine(tower_bits, group),
    )


def _check_group(group_size: int | None, forms: list[str]) -> None:
    if group_size is not None and not any(_BITS.fullmatch(form) for form in forms):
        raise InvalidRequestError(
            f"group_size is {group_size}, but {forms[0]} has groups of its own, or none.",
            param="group_size",
        )


def _base(name: str, group: int) -> MLXFormat | None:
    try:
        return parse_format(name, group_size=group)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"There is no recipe {name[:60]!r}. Expected {', '.join(f'{n}bit' for n in BITS)} "
            f"(perhaps with a group size of {', '.join(map(str, GROUPS))}, such as 4bit-g32), "
            f"{', '.join([*TARGETS, *FLOATS, *DENSE])}, dense or keep.",
            param="recipe",
        ) from error


def _override(text: str, group: int) -> Override:
    pattern, equals, form = text.partition("=")
    if not pattern or not equals:
        raise InvalidRequestError(
            f"{text[:80]!r} is no exception; expected PATTERN=FORMAT, such as lm_head=8bit or "
            "'*.mlp.*=dense'.",
            param="set",
        )
    return Override(pattern, parse_format(form, group_size=group), "-g" in form)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOptions:
    """How the output is made, and how it is checked."""

    recipe: Recipe
    target_bpw: float | None = None
    target_bytes: int | None = None
    searched: bool = True  # scales by squared error; False: as mx.quantize
    calibration: str | None = None  # text; None: squared errors count alike
    check_text: str | None = None  # text; None: a part of the calibration text
    check_tensors: bool = True
    max_memory: int | None = None  # bytes
    shard_bytes: int = SHARD_BYTES
    split_experts: bool = False  # what of an expert lies side by side (split_experts.py)

    def __post_init__(self) -> None:
        bpw = self.target_bpw
        if bpw is not None and not 1 < bpw <= 32:  # nan is refused too
            raise InvalidRequestError(
                f"target_bpw is {bpw}; expected a number above 1, at most 32.", param="target_bpw"
            )
        if self.targeted and self.calibration is None:
            what = f"The recipe {self.recipe.name}" if self.recipe.target_bpw else "A target size"
            raise InvalidRequestError(
                f"{what} needs a text for calibration: formats are chosen by what each costs."
            )

    @property
    def feeds_back(self) -> bool:
        """Whether rounding errors go to what is not rounded yet (feedback.py)."""
        return self.calibration is not None

    @property
    def targeted(self) -> bool:
        return self.goal_bpw is not None or self.target_bytes is not None

    @property
    def goal_bpw(self) -> float | None:
        if self.target_bpw is None and self.target_bytes is None:
            return self.recipe.target_bpw
        return self.target_bpw


def identity(options: ConversionOptions, *, comparing: bool) -> dict[str, Any]:
    recipe = options.recipe
    return {
        "recipe": recipe.name,
        "overrides": [str(override) for override in recipe.overrides],
        "group size": str(recipe.base),
        "dtype": recipe.dtype,
        "keep format": recipe.keep,
        "tower": str(recipe.tower),
        "target": [options.goal_bpw, options.target_bytes],
        "scales": "searched" if options.searched else "extremes",
        "texts": [_digest(options.calibration), _digest(options.check_text)],
        "shards": options.shard_bytes,
        "split experts": options.split_experts,
        "check": [options.check_tensors, comparing],
    }


def _digest(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()[:16]
