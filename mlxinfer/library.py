"""Models on this disk, from Python: download, list, convert. What the commands do, with bars."""

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from . import hub
from .backend import require_mlx
from .display.tracebacks import shorten_errors
from .errors import InvalidRequestError, check_switch
from .hub.cache import is_gguf
from .hub.imported import notes_of
from .memory import human_bytes, parse_bytes
from .progress import StepWatch, progress_bar, progress_bars

if TYPE_CHECKING:
    from .convert.recipes import ConversionOptions
    from .convert.report import ConversionReport

logger = logging.getLogger(__name__)
FASTER = "{name} is a GGUF file; an MLX format may be faster: mlxinfer convert {name} OUT"


class LocalModels(list[hub.LocalModel]):
    """Models on this disk; notebooks show them as a table."""

    def _repr_html_(self) -> str:
        from .display.cards import card, html_table, shown_value

        rows = [
            [
                shown_value(m.name),
                human_bytes(m.size_bytes),
                "ready" if m.complete else "incomplete",
            ]
            for m in self
        ]
        return card(html_table(rows, header=("model", "size", "state")))


def resolve(
    name: str,
    show: StepWatch,
    *,
    download: bool = True,
    mmproj: str | Path | None = None,
    dtype: str = "auto",
) -> Path:
    """Return the folder of a model, downloaded or imported if need be.

    Args:
        name: see `hub.locate`; or a GGUF file of this disk.
        download: fetch a repository that is not here.
        show: called with what is done ("import x.gguf"), how far, and of how much.
        mmproj: of a GGUF file the file of its tower, in place of that beside it.
        dtype: that the model will run in: float32 of a GGUF file stays so in float32.

    Raises: those of `hub.locate`, and of `convert.imports.import_gguf`; and InvalidRequestError:
        `mmproj` for a folder.
    """
    path = Path(name).expanduser()
    if not is_gguf(path):
        path = hub.locate(name, download=download, progress=partial(show, f"download {name}"))
    if path.is_dir():
        if mmproj is not None:
            raise InvalidRequestError.of("mmproj", f"goes with a GGUF file; {name} is a folder.")
        return path
    from .convert.imports import import_gguf

    folder = import_gguf(
        path,
        partial(show, f"import {path.name}"),
        mmproj=None if mmproj is None else Path(mmproj).expanduser(),
        exact=dtype == "float32",
    )
    for note in [*notes_of(folder), FASTER.format(name=name)]:
        logger.warning("%s", note)
    return folder


def list_models() -> LocalModels:
    """The bundled models and those in the hub's cache, complete or not."""
    return LocalModels(hub.list_models())


def pull(name: str, *, progress: bool | None = None) -> Path:
    """Download a model of the hub, or bring it up to date, and return its folder.

    Args:
        name: org/name or org/name@revision.
        progress: whether a bar shows it; None: in a notebook and where stderr is a terminal.

    Raises:
        ModelNotFoundError: there is no model of this name.
        DownloadError: the hub could not be reached or refused, or the disk is full.
        InvalidRequestError: `progress` is no bool.
    """
    shorten_errors()
    with progress_bar(f"download {name}", wanted=_switch(progress)) as show:
        return hub.pull(name, progress=show)


def convert_model(
    source: str | Path,
    out: str | Path,
    *,
    recipe: str = "4bit",
    target_bpw: float | None = None,
    group_size: int | None = None,
    calibration: str | None = "default",
    check: bool = True,
    max_memory: str | int | None = None,
    resume: bool = False,
    progress: bool | None = None,
) -> "ConversionReport":
    """Convert a checkpoint to MLX: quantised, and compared with its source.

    The report that it returns is that in report.json; `passed` says whether the checks did.

    Args:
        source: a folder, a GGUF file, or a repository of the hub as org/name.
        out: the folder, which appears when it is complete.
        recipe: such as "4bit", "8bit", "mixed", "mxfp4", "bf16"; see docs/conversion.md.
        target_bpw: bits a weight on average: formats are chosen by what each costs.
        group_size: numbers that share a scale.
        calibration: text by which rounding is chosen; "default": that of the library, None: none.
        check: compare the logits of the result with those of the source.
        max_memory: such as "24GB".
        resume: go on with a conversion that was interrupted.
        progress: whether bars show it; None: in a notebook and where stderr is a terminal.

    Raises:
        ConversionError, ModelError: the target, the disk or the source is not as it should be.
        InvalidRequestError: options that do not go together.
    """
    shorten_errors()
    require_mlx()
    from .convert.read import open_source
    from .convert.run import Conversion
    from .convert.workplace import check_output
    from .convert.zoo import whole_because, without_layers

    check_output(Path(out))
    options = _conversion_options(recipe, target_bpw, group_size, calibration, max_memory)
    with progress_bars(unit="it", wanted=_switch(progress)) as show:
        show("open", 0, 1)
        opened = open_source(str(source), progress=partial(show, "download"))
        show("open", 1, 1)
        if calibration == "default":
            options = without_layers(opened, options)
        compares = check and whole_because(opened) is None
        return Conversion(opened, Path(out), options, compares, show).run(resume=resume)


def _conversion_options(
    recipe: str,
    target_bpw: float | None,
    group_size: int | None,
    calibration: str | None,
    max_memory: str | int | None,
) -> "ConversionOptions":
    from .convert.calibration.texts import read_text
    from .convert.recipes import ConversionOptions, make_recipe

    return ConversionOptions(
        recipe=make_recipe(recipe, group_size=group_size),
        target_bpw=target_bpw,
        calibration=read_text(None) if calibration == "default" else calibration,
        max_memory=None if max_memory is None else parse_bytes(max_memory),
    )


def _switch(progress: bool | None) -> bool | None:
    if progress is not None:
        check_switch("progress", progress)
    return progress
