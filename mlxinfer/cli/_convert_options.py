"""Options of `mlxinfer convert`, and what they mean together. Converts nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InvalidRequestError
from ..memory import parse_bytes

if TYPE_CHECKING:
    from ..convert.options import Options

FORMAT_OPTIONS = (
    click.option("--recipe", metavar="NAME", help="4bit, 8bit, 6bit-g32, mixed, mxfp4, mxfp8, "
                 "nvfp4, bf16, fp16, keep.  [default: 4bit]"),
    click.option("--bits", type=int, help="Short for --recipe Nbit."),
    click.option("--group-size", type=int, help="Weights that share a scale: 32, 64 or 128."),
    click.option("--set", "overrides", multiple=True, metavar="PATTERN=FORMAT",
                 help="An exception, such as lm_head=8bit or 'layers.0=dense'; repeatable."),
    click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]),
                 help="Of what is not quantised.  [default: as it is]"),
    click.option("--keep-format", is_flag=True, help="What the source has quantised stays so."),
    click.option("--target-bpw", type=float, metavar="X", help="Bits per weight to stay below: "
                 "formats are chosen by what each costs, as measured."),
    click.option("--target-size", metavar="SIZE", help="The same as bytes, such as 4GB."),
    click.option("--scales", type=click.Choice(["searched", "minmax"]),
                 help="By squared error, or by each group's extremes.  [default: searched]"),
    click.option("--calibration", metavar="FILE", help="Text that shows which weights matter; "
                 "'none': all alike.  [default: one that comes along]"),
)  # fmt: skip
CHECK_OPTIONS = (
    click.option("--check", type=click.Choice(["full", "tensors", "none"]),
                 help="Compare tensors with the source, and logits.  [default: full]"),
    click.option("--check-text", type=click.Path(path_type=Path), metavar="FILE",
                 help="What logits are compared on.  [default: a part of the calibration text]"),
    click.option("--max-kl", type=float, metavar="X",
                 help="Fail above this mean KL divergence.  [default: by bits per weight]"),
    click.option("--fast", is_flag=True,
                 help="Same as --scales minmax --calibration none --check none; no figures."),
)  # fmt: skip
RUN_OPTIONS = (
    click.option(
        "--tokenizer",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="For a .gguf file: whose tokenizer to take instead of its own.",
    ),
    click.option("--max-memory", metavar="SIZE", help="Such as 2GB.  [default: what is useful]"),
    click.option("--shard-size", default="5GB", show_default=True, metavar="SIZE"),
    click.option("--resume", is_flag=True, help="Go on with what was interrupted."),
    click.option("--restart", is_flag=True, help="Throw away what was interrupted."),
    click.option("--dry-run", is_flag=True, help="Only say what would be done."),
    click.option("--check-only", is_flag=True, help="Compare OUT, which exists, with SOURCE."),
    click.option("--upload", metavar="REPO", help="Put the result onto the hub, as org/name."),
    click.option("--upload-only", is_flag=True, help="Upload OUT, which exists."),
    click.option("--private", is_flag=True, help="With --upload: make the repository private."),
)


def convert_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add them all."""
    for option in reversed((*FORMAT_OPTIONS, *CHECK_OPTIONS, *RUN_OPTIONS)):
        function = option(function)
    return function


def shape(given: dict[str, Any]) -> "Options":
    """What was given on the command line."""
    from ..convert.options import Options
    from ..convert.recipes import make_recipe
    from ..convert.texts import read_text

    fast = given["fast"]
    given["check"] = given["check"] or ("none" if fast else "full")
    scales = given["scales"] or ("minmax" if fast else "searched")
    calibration = given["calibration"] or ("none" if fast else None)
    text = None if calibration == "none" else read_text(Path(calibration) if calibration else None)
    check_text = None
    if given["check_text"] is not None or (text is None and given["check"] == "full"):
        check_text = read_text(given["check_text"])
    recipe = make_recipe(
        given["recipe"] or f"{given['bits'] or 4}bit",
        group_size=given["group_size"],
        dtype=given["dtype"],
        overrides=given["overrides"],
        keep_format=given["keep_format"],
    )
    size, memory = given["target_size"], given["max_memory"]
    return Options(
        recipe=recipe,
        target_bpw=given["target_bpw"],
        target_bytes=None if size is None else parse_bytes(size, param="target_size"),
        searched=scales == "searched",
        calibration=text,
        check_text=check_text,
        check_tensors=given["check"] != "none",
        max_kl=given["max_kl"],
        max_memory=None if memory is None else parse_bytes(memory),
        figures=not fast,
        shard_bytes=parse_bytes(given["shard_size"], param="shard_size"),
    )


def check_usage(given: dict[str, Any]) -> None:
    """Options that contradict each other are wrong usage."""
    pairs = (
        ("recipe", "bits"),
        ("target_bpw", "target_size"),
        ("resume", "restart"),
        ("check_only", "upload_only"),
        ("check_only", "dry_run"),
    )
    for one, other in pairs:
        if given[one] and given[other]:
            raise click.UsageError(f"--{one} and --{other} exclude each other.".replace("_", "-"))
    targeted = given["target_bpw"] is not None or given["target_size"] is not None
    if targeted and (given["fast"] or given["calibration"] == "none"):
        raise click.UsageError("A target needs calibration: leave out --fast, --calibration none.")
    if targeted and (given["recipe"] or given["bits"]):
        raise click.UsageError("A target chooses the formats: leave out --recipe and --bits.")
    if given["upload_only"] and not given["upload"]:
        raise click.UsageError("--upload-only needs --upload REPO.")
    if given["private"] and not given["upload"]:
        raise click.UsageError("--private goes with --upload.")
    if given["target_bpw"] is not None and not 1 < given["target_bpw"] <= 32:
        raise InvalidRequestError("--target-bpw is out of range; expected 1 to 32.")
