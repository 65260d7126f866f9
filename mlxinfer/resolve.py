"""A model's name, folder or GGUF file -> the folder that is loaded."""

from functools import partial
from pathlib import Path

from . import hub
from .hub.cache import is_gguf
from .progress import StepWatch


def resolve(name: str, show: StepWatch, *, download: bool = True) -> Path:
    """Return the folder of a model, downloaded or imported if need be.

    Args:
        name: see `hub.resolve`; or a GGUF file.
        download: fetch a repository that is not here.
        show: called with what is done ("import x.gguf"), how far, and of how much.

    Raises: those of `hub.resolve`, and of `convert.imports.import_gguf`.
    """
    path = Path(name).expanduser()
    if not is_gguf(path):
        return hub.resolve(name, download=download, progress=partial(show, f"download {name}"))
    from .convert.imports import import_gguf

    return import_gguf(path, partial(show, f"import {path.name}"))
