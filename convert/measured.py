"""What measuring found, kept on the disk so that an interrupted conversion need not do it again."""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from .arrange import Arranged, Output, by_name
from .candidates import MeasuredUnit
from .files import damaged, partial_path
from .formats import name_of, parse_format
from .measure import Measured
from .read import MLXFormat

_UNITS = "units"
_BROKEN = (ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile, zlib.error)


def save(path: Path, found: Measured) -> None:
    """All of it in one .npz file, which is there whole or not at all."""
    units = [
        {
            "names": [output.name for output in unit.outputs],
            "layer": unit.layer,
            "probe": name_of(unit.probe),
            "kl": unit.kl,
            "errors": {name_of(form): error for form, error in unit.errors.items()},
        }
        for unit in found.units
    ]
    partial = partial_path(path)
    with partial.open("wb") as file:
        arrays = {f"importance:{path}": values for path, values in found.importance.items()}
        np.savez(file, **arrays, **{_UNITS: np.array(json.dumps(units))})  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load(path: Path, arranged: Arranged) -> Measured:
    """What save() kept.

    Raises:
        ConversionError: it is damaged.
    """
    try:
        return _load(path, by_name(arranged.outputs))
    except _BROKEN as error:
        raise damaged(path) from error


def _load(path: Path, outputs: Mapping[str, Output]) -> Measured:
    with path.open("rb") as raw, np.load(raw) as file:  # np.load would not close a broken one
        importance = {
            key.removeprefix("importance:"): file[key] for key in file.files if key != _UNITS
        }
        units = json.loads(str(file[_UNITS]))
    return Measured(
        importance,
        [
            MeasuredUnit(
                tuple(outputs[name] for name in unit["names"]),
                unit["layer"],
                _form(unit["probe"]),
                unit["kl"],
                {_form(name): error for name, error in unit["errors"].items()},
            )
            for unit in units
        ],
    )


def _form(name: str) -> MLXFormat:
    form = parse_format(name)
    if form is None:
        raise ValueError(f"{name} is no format of MLX")
    return form
