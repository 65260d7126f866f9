"""Checkpoints of every common format as one kind of Source: `open_source`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...errors import CheckpointError, ModelNotFoundError
from ...hub import Progress, is_bundled, locate
from ...hub.cache import is_gguf
from ...hub.imported import is_projector, part_names
from .folder import local_side_files, open_folder
from .gguf.source import open_gguf
from .source import MLXFormat, Packed, SourceModel, SourceTensor, expert_groups

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def open_source(
    source: str | Path,
    *,
    tokenizer: Path | None = None,
    mmproj: Path | None = None,
    progress: Progress = lambda *_: None,
    reading: Progress = lambda *_: None,
) -> SourceModel:
    """Open a checkpoint for reading, tensor by tensor.

    Args:
        source: a folder of safetensors, a GGUF file, a folder with one GGUF file, a bundled model,
            or a hub repository as org/name[@revision], with :QUANT or /file.gguf behind it.
        tokenizer: a folder with a tokenizer, taken instead of the source's own.
        mmproj: of a GGUF file the file of its tower, in place of that beside it.
        progress: called while a repository of the hub is downloaded.
        reading: called while the header of a GGUF file is read.

    Raises:
        CheckpointError: a file that is broken, or a pickle.
        DownloadError: the hub could not be reached or refused.
        ModelNotFoundError: nothing is there.
        UnsupportedModelError: a format or an architecture that is not known.
    """
    files = None if tokenizer is None else _tokenizer_of(tokenizer)
    path = locate(str(source)) if is_bundled(str(source)) else Path(source).expanduser()
    if path.exists():
        return _open(path, files, reading, mmproj)
    if isinstance(source, Path) or source.startswith(("/", "./", "../", "~")):
        raise ModelNotFoundError(f"There is no {str(source)!r}.")
    return replace(_open(locate(source, progress=progress), files, reading, mmproj), label=source)


def _open(
    path: Path, tokenizer: Mapping[str, bytes | Path] | None, reading: Progress, mmproj: Path | None
) -> SourceModel:
    if path.is_dir() and not any(path.glob("*.safetensors")):
        path = _only_gguf(path) or path
    if path.is_dir():
        return open_folder(path, tokenizer)
    if path.suffix == ".gguf" or is_gguf(path):
        return open_gguf(path, tokenizer, reading, mmproj)
    raise _unreadable(path)


def _only_gguf(folder: Path) -> Path | None:
    names = sorted(path.name for path in folder.glob("*.gguf") if not is_projector(path.name))
    models = sorted({part_names(name)[0] for name in names})
    if len(models) > 1:
        raise CheckpointError(f"{folder} has {len(models)} GGUF models; name one: {models[0]}, …")
    return folder / names[0] if models else None


def _tokenizer_of(folder: Path) -> Mapping[str, bytes | Path]:
    files = local_side_files(folder)
    if "tokenizer.json" not in files and "tokenizer.model" not in files:
        raise ModelNotFoundError(f"The folder for the tokenizer, {folder}, has no tokenizer.json.")
    return files


def _unreadable(path: Path) -> CheckpointError:
    if path.suffix in _PICKLES:
        return CheckpointError(
            f"{path} is a pickle, which can run any code and is never opened; use a safetensors or "
            "GGUF version of this model."
        )
    return CheckpointError(f"{path} is a file; expected a folder, or a .gguf file.")
