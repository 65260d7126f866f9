"""A path or the name of a repository -> a Source, whatever format it has. Knows no contents."""

from pathlib import Path

from ...errors import CheckpointError, ModelNotFoundError
from .folder import open_folder
from .source import Source

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def open_source(source: str | Path) -> Source:
    """Open a checkpoint for reading, tensor by tensor.

    Raises:
        CheckpointError: a file that is broken, or a pickle.
        ModelNotFoundError: nothing is there.
        UnsupportedModelError: a format or an architecture that is not known.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return _open_file(path)
    if path.is_dir():
        return open_folder(path)
    raise ModelNotFoundError(f"There is no {str(source)!r}.")


def _open_file(path: Path) -> Source:
    if path.suffix in _PICKLES:
        raise CheckpointError(
            f"{path} is a pickle, which can run any code and is never opened; use a safetensors or "
            "GGUF version of this model."
        )
    raise CheckpointError(f"{path} is a file; expected a folder.")
