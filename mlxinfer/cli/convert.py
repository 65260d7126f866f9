"""`mlxinfer convert`: any checkpoint into an MLX folder, quantised, checked, perhaps uploaded."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import hub
from ..backend import require_mlx
from ..errors import ConversionError
from ._convert_options import check_usage, checks, convert_options, shape, wrong_usage
from ._convert_view import Downloads, plan_as_dict, progress_bars, show_plan, show_report
from ._options import json_option
from ._output import emit_json, note

if TYPE_CHECKING:
    from ..convert.read import Source
    from ..convert.recipes import ConversionOptions
    from ..convert.run import Conversion


@click.command()
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path))
@convert_options
@json_option
def command(source: str, out: Path, as_json: bool, **given: Any) -> int:
    """Convert a checkpoint to MLX: quantised, and checked.

    SOURCE is a folder, a .gguf file, org/name of the hub, or demo. The folder OUT appears when
    it is complete; until then the work is in OUT.partial, and --resume goes on with it after an
    interruption. The exit status is 1 where a check fails.
    """
    check_usage(given)
    if given["upload"]:
        from ..convert.upload import check_repo

        with wrong_usage():
            check_repo(given["upload"])
    if given["upload_only"]:
        return _upload(out, given, as_json)
    require_mlx()
    options = None if given["check_only"] else shape(given)
    from ..convert.read import open_source
    from ..convert.workplace import downloads_folder

    tokenizer = given["tokenizer"]
    if hub.is_bundled(source):
        source = str(hub.resolve(source))
    local, downloads = Path(source).expanduser(), None
    if not (given["dry_run"] or given["check_only"]):
        downloads = downloads_folder(out, local if local.exists() else None)
    arrived = Downloads()
    opened = open_source(source, tokenizer=tokenizer, downloads=downloads, report=arrived.add)
    try:
        if options is None:
            code = _check(opened, out, as_json)
        else:
            code = _convert(opened, source, out, options, given, arrived, as_json)
    except BaseException:
        if downloads is None:
            opened.close()  # else what is downloaded is kept for --resume
        raise
    opened.close()
    return code


def _convert(
    opened: "Source",
    source: str,
    out: Path,
    options: "ConversionOptions",
    given: dict[str, Any],
    arrived: Downloads,
    as_json: bool,
) -> int:
    from ..convert.read import open_source
    from ..convert.run import Conversion

    full = checks(given) == "full"
    with progress_bars() as progress:
        arrived.watch(progress, sum(info.stored_bytes for info in opened.tensors.values()))
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
    from ..convert.verify import check_folder

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
