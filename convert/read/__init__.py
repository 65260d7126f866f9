"""Checkpoints of every common format as one kind of Source: `open_source`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...errors import CheckpointError, ModelNotFoundError
from ...hub import Progress, is_bundled, resolve
from .folder import local_side_files, open_folder
from .gguf.source import open_gguf, part_names
from .hub import fetch_repo
from .source import MLXFormat, Packed, Source, TensorInfo, expert_groups

__all__ = ["MLXFormat", "Packed", "Source", "TensorInfo", "expert_groups", "open_source"]


_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def open_source(
    source: str | Path, *, tokenizer: Path | None = None, progress: Progress = lambda *_: None
) -> Source:
    """Open a checkpoint for reading, tensor by tensor.

    Args:
        source: a folder of safetensors, a GGUF file, a folder with one GGUF file, a bundled model,
            or a hub repository as org/name[@revision] or org/name[@revision]/file.gguf.
        tokenizer: a folder with a tokenizer, taken instead of the source's own.
        progress: called while a repository of the hub is downloaded.

    Raises:
        CheckpointError: a file that is broken, or a pickle.
        DownloadError: the hub could not be reached or refused.
        ModelNotFoundError: nothing is there.
        UnsupportedModelError: a format or an architecture that is not known.
    """
    found = None if tokenizer is None else _tokenizer_of(tokenizer)
    path = resolve(str(source)) if is_bundled(str(source)) else Path(source).expanduser()
    if path.exists():
        return _open(path, found)
    if isinstance(source, Path) or source.startswith(("/", "./", "../", "~")):
        raise ModelNotFoundError(f"There is no {str(source)!r}.")
    return replace(_open(fetch_repo(source, progress), found), label=source)


def _open(path: Path, tokenizer: Mapping[str, bytes | Path] | None) -> Source:
    """Open a folder or a file of this disk."""
    if path.is_dir() and not any(path.glob("*.safetensors")):
        path = _only_gguf(path) or path
    if path.is_dir():
        return open_folder(path, tokenizer)
    if path.suffix == ".gguf" or _is_gguf(path):
        return open_gguf(path, tokenizer)
    raise _unreadable(path)


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder, or the first part of it; None where there is none."""
    names = sorted(path.name for path in folder.glob("*.gguf") if "mmproj" not in path.name)
    models = sorted({part_names(name)[0] for name in names})
    if len(models) > 1:
        raise CheckpointError(f"{folder} has {len(models)} GGUF models; name one: {models[0]}, …")
    return folder / names[0] if models else None


def _is_gguf(path: Path) -> bool:
    """Whether a file of another name begins as GGUF does, such as a blob of Ollama."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _tokenizer_of(folder: Path) -> Mapping[str, bytes | Path]:
    found = local_side_files(folder)
    if "tokenizer.json" not in found and "tokenizer.model" not in found:
        raise ModelNotFoundError(f"The folder for the tokenizer, {folder}, has no tokenizer.json.")
    return found


def _unreadable(path: Path) -> CheckpointError:
    if path.suffix in _PICKLES:
        return CheckpointError(
            f"{path} is a pickle, which can run any code and is never opened; use a safetensors or "
            "GGUF version of this model."
        )
    return CheckpointError(f"{path} is a file; expected a folder, or a .gguf file.")
