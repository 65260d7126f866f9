"""`mlxinfer convert`: any checkpoint into an MLX folder, quantised, checked, perhaps uploaded."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..backend import require_mlx
from ..errors import ConversionError, InvalidRequestError
from ..memory import parse_bytes
from ._convert_view import plan_as_dict, progress_bars, show_plan, show_report
from ._options import json_option
from ._output import emit_json, note

if TYPE_CHECKING:
    from ..convert.options import Options
    from ..convert.read import Source
    from ..convert.run import Conversion

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
                 help="Same as --scales minmax --calibration none --check none."),
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


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed((*FORMAT_OPTIONS, *CHECK_OPTIONS, *RUN_OPTIONS)):
        function = option(function)
    return function


@click.command()
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path))
@_options
@json_option
def command(source: str, out: Path, as_json: bool, **given: Any) -> int:
    """Convert SOURCE (a folder, a .gguf file, or org/name of the hub) to the MLX folder OUT.

    OUT appears when it is complete; until then the work is in OUT.partial, and --resume goes on
    with it after an interruption. The exit status is 1 where a check fails.
    """
    _check_usage(given)
    if given["upload"]:
        from ..convert.upload import check_repo

        check_repo(given["upload"])
    if given["upload_only"]:
        return _upload(out, given, as_json)
    require_mlx()
    from ..convert.read import open_source
    from ..convert.workplace import downloads_folder

    tokenizer = given["tokenizer"]
    downloads = downloads_folder(out) if not (given["dry_run"] or given["check_only"]) else None
    opened = open_source(source, tokenizer=tokenizer, downloads=downloads)
    try:
        if given["check_only"]:
            return _check(opened, out, as_json)
        return _convert(opened, source, out, given, as_json)
    finally:
        opened.close()


def _convert(opened: "Source", source: str, out: Path, given: dict[str, Any], as_json: bool) -> int:
    from ..convert.read import open_source
    from ..convert.run import Conversion

    options = _shape(given)
    full = given["check"] == "full"
    with progress_bars() as progress:
        conversion = Conversion(
            opened, out, options, open_logits if full else None, progress,
            (lambda: open_source(source).fingerprint) if Path(source).exists() else None,
        )  # fmt: skip
        if given["dry_run"]:
            _dry_run(conversion, given, as_json)
            return 0
        try:
            report = conversion.run(resume=given["resume"], restart=given["restart"])
        except KeyboardInterrupt:
            note("interrupted; the same command with --resume goes on")
            raise
    if as_json:
        emit_json(report.as_dict())
    else:
        show_report(report, str(out))
    if not report.passed:
        raise ConversionError(
            f"{out} is further from the source than it should be: see the divergence in "
            f"{out / 'report.json'}."
        )
    return _upload(out, given, as_json) if given["upload"] else 0


def _dry_run(conversion: "Conversion", given: dict[str, Any], as_json: bool) -> None:
    plan = plan_as_dict(
        conversion.plan(),
        peak_bytes=conversion.peak_bytes(),
        disk_bytes=conversion.disk_bytes(),
        measured=conversion.options.targeted,
    )
    emit_json(plan) if as_json else show_plan(plan)


def _check(opened: "Source", out: Path, as_json: bool) -> int:
    from ..convert.arrange import arrange
    from ..convert.check import check_folder

    with progress_bars() as progress:
        found = check_folder(arrange(opened), out, progress)
    if as_json:
        emit_json({"tensors": found})
    else:
        click.echo(f"{out}: {len(found)} tensors are as report.json says")
    return 0


def _upload(out: Path, given: dict[str, Any], as_json: bool) -> int:
    from ..convert.upload import upload

    bars = sys.stderr.isatty() and not as_json
    url = upload(out, given["upload"], private=given["private"], bars=bars)
    if not as_json:
        click.echo(f"{out} is at {url}")
    return 0


@contextmanager
def open_logits(folder: Path) -> Iterator[Callable[[list[int]], Any]]:
    """The converted model, run as any other."""
    from ..llm import LLM

    with LLM(str(folder), max_batch=1) as llm:
        yield llm.logits


def _shape(given: dict[str, Any]) -> "Options":
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
        shard_bytes=parse_bytes(given["shard_size"], param="shard_size"),
    )


def _check_usage(given: dict[str, Any]) -> None:
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
