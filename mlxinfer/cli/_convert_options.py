"""Options of `mlxinfer convert`, and how they become ConversionOptions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..errors import InvalidRequestError
from ..memory import parse_bytes
from ._options import Size

if TYPE_CHECKING:
    from ..convert.recipes import ConversionOptions

BITS = ("2", "3", "4", "5", "6", "8")  # as convert/formats.py has them, which is slow to import
GROUPS = ("32", "64", "128")


class Above(click.FloatRange):
    """A number above `low`, at most `high`; no NaN."""

    def __init__(self, low: float, high: float | None = None) -> None:
        super().__init__(low, high, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        if str(value).strip().lower() == "nan":
            self.fail(f"{value!r} is no number.", param, ctx)
        return super().convert(value, param, ctx)


FORMAT_OPTIONS = (
    click.option("--recipe", metavar="NAME", help="4bit, 8bit, 6bit-g32, mixed, mxfp4, mxfp8, "
                 "nvfp4, bf16, fp16, keep.  [default: 4bit]"),
    click.option("--bits", type=click.Choice(BITS), help="Short for --recipe Nbit."),
    click.option("--group-size", type=click.Choice(GROUPS),
                 help="Weights that share a scale.  [default: 64]"),
    click.option("--set", "overrides", multiple=True, metavar="PATTERN=FORMAT",
                 help="An exception, such as lm_head=8bit or 'layers.0=dense'; repeatable."),
    click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]),
                 help="Of what is not quantised.  [default: as it is]"),
    click.option("--keep-format", is_flag=True, help="What the source has quantised stays so, or "
                 "close to it; the rest as --recipe says.  [default then: keep]"),
    click.option("--target-bpw", type=Above(1, 32), metavar="X",
                 help="Bits per weight to stay below: formats are chosen by what each costs, as "
                 "measured."),
    click.option("--target-size", type=Size(), metavar="SIZE",
                 help="The same as bytes, such as 4GB."),
    click.option("--scales", type=click.Choice(["searched", "minmax"]),
                 help="By squared error, or by each group's extremes.  [default: searched]"),
    click.option("--rounding", type=click.Choice(["gptq", "nearest"]),
                 help="With error feedback, which needs calibration, or to the nearest code.  "
                 "[default: gptq]"),
    click.option("--learn", type=Above(0), metavar="MINUTES",
                 help="Then fit scales and biases, layer by layer, for so long."),
    click.option("--calibration", metavar="FILE", help="Text that shows which weights matter; "
                 "'none': all alike.  [default: one that comes along]"),
)  # fmt: skip
CHECK_OPTIONS = (
    click.option("--check", type=click.Choice(["full", "tensors", "none"]),
                 help="Compare tensors with the source, and logits.  [default: full]"),
    click.option("--check-text", type=click.Path(path_type=Path), metavar="FILE",
                 help="What logits are compared on.  [default: a part of the calibration text]"),
    click.option("--max-kl", type=Above(0), metavar="X",
                 help="Fail above this mean KL divergence.  [default: by bits per weight]"),
    click.option("--fast", is_flag=True,
                 help="Same as --scales minmax --calibration none --check none; no figures."),
)  # fmt: skip
RUN_OPTIONS = (
    click.option(
        "--tokenizer",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="Whose tokenizer to take instead of the source's own.",
    ),
    click.option(
        "--max-memory", type=Size(), metavar="SIZE", help="Such as 2GB.  [default: what is useful]"
    ),
    click.option(
        "--shard-size",
        type=Size(),
        default="5GB",
        show_default=True,
        metavar="SIZE",
        help="Of a file of weights, at most.",
    ),
    click.option(
        "--split-experts",
        is_flag=True,
        help="What of an expert lies side by side in a file, for --expert-memory.",
    ),
    click.option("--resume", is_flag=True, help="Go on with what was interrupted."),
    click.option("--restart", is_flag=True, help="Throw away what was interrupted."),
    click.option("--dry-run", is_flag=True, help="Only say what would be done."),
    click.option(
        "--explore",
        is_flag=True,
        help="Only say what sizes cost in divergence; with matplotlib, draw OUT.svg.",
    ),
    click.option("--check-only", is_flag=True, help="Compare OUT, which exists, with SOURCE."),
    click.option("--upload", metavar="REPO", help="Put the result onto the hub, as org/name."),
    click.option("--upload-only", is_flag=True, help="Upload OUT, which exists."),
    click.option("--private", is_flag=True, help="With --upload: make the repository private."),
)


def convert_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add all options."""
    for option in reversed((*FORMAT_OPTIONS, *CHECK_OPTIONS, *RUN_OPTIONS)):
        function = option(function)
    return function


def shape(given: dict[str, Any]) -> "ConversionOptions":
    """Return what was given on the command line; an invalid combination is wrong usage."""
    with wrong_usage():
        return _shape(given)


def _shape(given: dict[str, Any]) -> "ConversionOptions":
    from ..convert.recipes import ConversionOptions, make_recipe

    text, check_text = _texts(given)
    group, size, memory = given["group_size"], given["target_size"], given["max_memory"]
    recipe = make_recipe(
        _recipe_name(given),
        group_size=None if group is None else int(group),
        dtype=given["dtype"],
        overrides=given["overrides"],
        keep_format=given["keep_format"],
    )
    return ConversionOptions(
        recipe=recipe,
        target_bpw=given["target_bpw"],
        target_bytes=None if size is None else parse_bytes(size),
        searched=(given["scales"] or ("minmax" if given["fast"] else "searched")) == "searched",
        calibration=text,
        error_feedback=given["rounding"] != "nearest",
        learn_minutes=given["learn"],
        check_text=check_text,
        check_tensors=checks(given) != "none",
        max_kl=given["max_kl"],
        max_memory=None if memory is None else parse_bytes(memory),
        figures=not given["fast"],
        shard_bytes=parse_bytes(given["shard_size"]),
        split_experts=given["split_experts"],
    )


def _recipe_name(given: dict[str, Any]) -> str:
    """The recipe that was asked for; --keep-format alone quantises nothing that is not."""
    if given["recipe"] or given["bits"]:
        return str(given["recipe"] or f"{given['bits']}bit")
    return "keep" if given["keep_format"] else "4bit"


def _texts(given: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return texts for calibration, and a separate part of them for comparing logits; or None."""
    from ..convert.calibration.texts import read_text

    name = given["calibration"] or ("none" if given["fast"] else None)
    text = None if name == "none" else read_text(Path(name) if name else None)
    if given["check_text"] is not None or (text is None and checks(given) == "full"):
        return text, read_text(given["check_text"])
    return text, None


def checks(given: dict[str, Any]) -> str:
    """Return what is checked: "full", "tensors" or "none"."""
    return str(given["check"] or ("none" if given["fast"] else "full"))


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Turn an InvalidRequestError about options into wrong usage, status 2."""
    try:
        yield
    except InvalidRequestError as error:
        raise click.UsageError(str(error)) from error


_EXCLUSIVE = (
    ("recipe", "bits"),
    ("target_bpw", "target_size"),
    ("resume", "restart"),
    ("check_only", "upload_only"),
    ("explore", "dry_run"),
)
_ENOUGH = {  # what these go with
    "check_only": {"as_json"},
    "explore": {
        *("as_json", "tokenizer", "calibration", "check_text", "max_memory"),
        *("overrides", "dtype", "keep_format", "scales", "rounding"),
    },
    "upload_only": {"upload", "private", "as_json"},
}


def check_usage(given: dict[str, Any]) -> None:
    """Refuse options that contradict each other or would be ignored, as wrong usage."""
    for one, other in _EXCLUSIVE:
        if given[one] and given[other]:
            raise click.UsageError(f"{_flag(one)} and {_flag(other)} exclude each other.")
    for alone, company in _ENOUGH.items():
        for name in sorted(_stated(given) - company - {alone}) if given[alone] else ():
            raise click.UsageError(f"{_flag(alone)} converts nothing: leave out {_flag(name)}.")
    targeted = given["target_bpw"] is not None or given["target_size"] is not None
    if targeted and (given["fast"] or given["calibration"] == "none"):
        raise click.UsageError("A target needs calibration: leave out --fast, --calibration none.")
    uncalibrated = given["fast"] or given["calibration"] == "none"
    if given["learn"] and uncalibrated:
        raise click.UsageError("--learn needs calibration: leave out --fast, --calibration none.")
    if given["rounding"] == "gptq" and uncalibrated:
        raise click.UsageError(
            "--rounding gptq needs calibration: leave out --fast, --calibration none."
        )
    for name in ("recipe", "bits", "group_size") if targeted else ():
        if given[name]:
            raise click.UsageError(f"A target chooses the formats: leave out {_flag(name)}.")
    if given["upload_only"] and not given["upload"]:
        raise click.UsageError("--upload-only needs --upload REPO.")
    if given["private"] and not given["upload"]:
        raise click.UsageError("--private goes with --upload.")
    for name in ("check_text", "max_kl"):
        if given[name] is not None and checks(given) != "full":
            raise click.UsageError(f"{_flag(name)} is for comparing logits: give --check full.")


def _stated(given: dict[str, Any]) -> set[str]:
    """Return the options that the user wrote."""
    source = click.get_current_context().get_parameter_source
    return {name for name in given if source(name) is ParameterSource.COMMANDLINE}


def _flag(name: str) -> str:
    return "--set" if name == "overrides" else f"--{name.replace('_', '-')}"
