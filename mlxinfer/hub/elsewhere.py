"""Models that other programs keep on this disk: LM Studio's, Ollama's, and folders of the user's.

A folder with config.json and safetensors runs as it is, by its path; GGUF files are converted.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from .cache import LocalModel, missing_files, read_json

FOLDERS = "MLXINFER_MODELS"  # environment variable: folders of models, separated as in PATH
LM_STUDIO = ("~/.lmstudio/models", "~/.cache/lm-studio/models")
OLLAMA = "~/.ollama/models"
MODEL_LAYER = "application/vnd.ollama.image.model"
_LATER = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")  # a part of a split file, not the first
DEPTH = 3  # levels below a folder of models at which one may lie: publisher/name/file


def models_elsewhere(folders: list[Path]) -> Iterator[LocalModel]:
    """Yield the models of these folders, of MLXINFER_MODELS, of LM Studio and of Ollama."""
    named = [Path(each) for each in os.environ.get(FOLDERS, "").split(os.pathsep) if each]
    places = [(folder, "folder") for folder in [*folders, *named]]
    places += [(Path(place), "lm studio") for place in LM_STUDIO]
    seen: set[Path] = set()
    for place, source in places:
        root = place.expanduser().resolve()
        if root in seen or not root.is_dir():
            continue
        seen.add(root)
        yield from _models_below(root, source)
    yield from _ollama(Path(os.environ.get("OLLAMA_MODELS") or OLLAMA).expanduser())


def _models_below(root: Path, source: str) -> Iterator[LocalModel]:
    for folder in _folders(root, DEPTH):
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            files = [path for path in folder.iterdir() if path.is_file()]
            yield LocalModel(
                name=str(folder),
                path=folder,
                size_bytes=sum(path.stat().st_size for path in files),
                files=len(files),
                modified=max(path.stat().st_mtime for path in files),
                complete=not missing_files(folder),
                source=source,
            )
        for path in sorted(folder.glob("*.gguf")):
            if path.is_file() and "mmproj" not in path.name and not _LATER.search(path.name):
                yield _gguf(str(path.relative_to(root)), path, source)


def _folders(root: Path, depth: int) -> Iterator[Path]:
    """The folder and those below it, by name; what may not be read is passed over."""
    yield root
    if not depth:
        return
    try:
        below = sorted(path for path in root.iterdir() if path.is_dir())
    except OSError:
        return
    for folder in below:
        yield from _folders(folder, depth - 1)


def _ollama(root: Path) -> Iterator[LocalModel]:
    """Ollama's manifests name the blob with the weights: manifests/HOST/OWNER/NAME/TAG."""
    for manifest in sorted((root / "manifests").glob("*/*/*/*")):
        layers = read_json(manifest).get("layers")
        for layer in layers if isinstance(layers, list) else []:
            if not isinstance(layer, dict) or layer.get("mediaType") != MODEL_LAYER:
                continue
            blob = root / "blobs" / str(layer.get("digest", "")).replace(":", "-")
            if blob.is_file():
                yield _gguf(f"{manifest.parent.name}:{manifest.name}", blob, "ollama")


def _gguf(name: str, file: Path, source: str) -> LocalModel:
    found = file.stat()
    return LocalModel(name, file, found.st_size, 1, found.st_mtime, True, source, gguf=True)
