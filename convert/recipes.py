"""Options of a conversion: recipe, exceptions by pattern, target size, checks.

4bit, 8bit, 6bit-g32, mxfp4 …   one format everywhere, with the minimum bits of formats.py
mixed                           4.5 bits a weight, chosen by what each costs: --target-bpw 4.5
bf16, fp16, fp32                nothing quantised
dense                           nothing quantised, each number in the dtype that it has
keep                            what is quantised stays so, bit for bit, or where MLX has no such
                                format in one that is close (formats.py); the rest as it is
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Any, Final

from ..errors import InvalidRequestError
from .arrange import OutputTensor
from .formats import (
    BITS,
    DENSE,
    FLOATS,
    GROUP,
    GROUPS,
    affine,
    kept_format,
    matches,
    parse_format,
    quantisable,
    raised,
)
from .read import MLXFormat

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

    def choose(self, output: OutputTensor) -> MLXFormat | None:
        """The format of one tensor; None: not quantised."""
        given = self.given(output)
        if given is not None:
            return given.form
        if self.keep and output.quantised:
            return kept_format(output)
        if self.base is None or not quantisable(output):
            return None
        return raised(self.base, output.path)

    def fixes(self, output: OutputTensor) -> bool:
        """Whether a target size leaves the format of this tensor alone."""
        return self.given(output) is not None or (self.keep and output.quantised)

    def given(self, output: OutputTensor) -> Override | None:
        """The last exception that names this tensor."""
        if len(output.shape) < 2 or not output.name.endswith(".weight"):
            return None
        found = [o for o in self.overrides if matches(o.pattern, output.path)]
        return found[-1] if found else None


def make_recipe(
    name: str,
    *,
    group_size: int | None = None,
    dtype: str | None = None,
    overrides: tuple[str, ...] = (),
    keep_format: bool = False,
) -> Recipe:
    """A recipe by name.

    Args:
        name: as above.
        group_size: of affine formats that do not state one.
        dtype: of what is not quantised: bfloat16, float16, float32; None: as it is.
        overrides: "PATTERN=FORMAT"; of several that match, the last counts.
        keep_format: keep what the source has quantised, as `keep` does; the rest as `name` says.

    Raises:
        InvalidRequestError: an unknown recipe, format or dtype, or a group size for nothing.
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
    """What shapes the output, and how it is checked."""

    recipe: Recipe
    target_bpw: float | None = None
    target_bytes: int | None = None
    searched: bool = True  # scales by squared error; False: as mx.quantize
    calibration: str | None = None  # text; None: squared errors count alike
    error_feedback: bool = True  # where there is a text for calibration (feedback.py)
    learn_minutes: float | None = None  # for scales and biases (learn.py); None: they stay
    check_text: str | None = None  # text; None: a part of the calibration text
    check_tensors: bool = True
    max_kl: float | None = None  # None: limit_for() the bits
    max_memory: int | None = None  # bytes
    shard_bytes: int = SHARD_BYTES
    figures: bool = True  # in the model card
    split_experts: bool = False  # what of an expert lies side by side (split_experts.py)

    def __post_init__(self) -> None:
        if self.targeted and self.calibration is None:
            what = f"The recipe {self.recipe.name}" if self.recipe.target_bpw else "A target size"
            raise InvalidRequestError(
                f"{what} needs a text for calibration: formats are chosen by what each costs."
            )

        if self.learn_minutes is not None and self.calibration is None:
            raise InvalidRequestError("Learning needs a text for calibration.", param="learn")

    @property
    def feeds_back(self) -> bool:
        """Whether weights are rounded with error feedback."""
        return self.error_feedback and self.calibration is not None

    @property
    def targeted(self) -> bool:
        """Whether formats follow from a size."""
        return self.goal_bpw is not None or self.target_bytes is not None

    @property
    def goal_bpw(self) -> float | None:
        """The target in bits per weight: as stated, or that of the recipe."""
        if self.target_bpw is None and self.target_bytes is None:
            return self.recipe.target_bpw
        return self.target_bpw

    def limit_bytes(self, num_weights: int) -> int | None:
        """The target in bytes, if there is one."""
        if self.goal_bpw is not None:
            return int(self.goal_bpw * num_weights / 8)
        return self.target_bytes


def identity(options: ConversionOptions, *, comparing: bool) -> dict[str, Any]:
    """What must be the same for an interrupted conversion to go on."""
    recipe = options.recipe
    return {
        "recipe": recipe.name,
        "overrides": [str(override) for override in recipe.overrides],
        "group size": str(recipe.base),
        "dtype": recipe.dtype,
        "keep format": recipe.keep,
        "target": [options.goal_bpw, options.target_bytes],
        "scales": "searched" if options.searched else "extremes",
        "texts": [_digest(options.calibration), _digest(options.check_text)],
        "learning": options.learn_minutes,
        "shards": options.shard_bytes,
        "figures": options.figures,
        "split experts": options.split_experts,
        "check": [options.check_tensors, comparing],
    }


def _digest(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()[:16]
