"""Model names on the command line to folders, with a progress bar, and what their files say."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ModelError
from ..library import resolve
from ..progress import progress_bars

if TYPE_CHECKING:
    from ..pooling.config import PoolingConfig


def fetch(name: str, *, download: bool = True, **how: Any) -> Path:
    """resolve() with a progress bar."""
    with progress_bars() as show:
        return resolve(name, show, download=download, **how)


def has_chat_template(folder: Path | str) -> bool:
    """Whether the tokenizer comes with a template for conversations."""
    from ..text.tokenizer_files import read_tokenizer_files

    return bool(read_tokenizer_files(Path(folder)).templates)


def pooling_of(folder: Path, name: str, task: str = "auto") -> "PoolingConfig | None":
    """Return how a model pools; None if it generates, or if files are wrong, as loading says."""
    from ..pooling.config import read_pooling

    try:
        return read_pooling(folder, name, task)
    except ModelError:
        return None


def say_how_to_try(name: str, folder: Path) -> None:
    """Print a command that has a model answer; those for vectors and scores have none."""
    if pooling_of(folder, name) is None:
        click.echo(f'try it: mlxinfer run -m {shlex.quote(name)} "Hello"')
