"""Models on this disk: names, bundled models, the hub's cache, other programs. No network.

The cache has the documented layout of huggingface_hub: `models--org--name/` with `blobs/`,
`refs/<branch>` holding a commit, and `snapshots/<commit>/` full of links into `blobs/`, where names
are the hashes of what they hold.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ModelNotFoundError, shown
from ..files import other_build
from ..memory import weights_bytes

ASSETS = Path(__file__).parent.parent / "assets"
BUNDLED = ("demo", "demo-vision", "demo-draft")

_PART = r"[A-Za-z0-9_](?:[\w.-]{0,94}[\w])?"
_REPO = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[\w][\w./-]{{0,126}}))?", re.ASCII)


WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_COMMIT = re.compile(r"[\w.-]{1,128}", re.ASCII)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "*.tiktoken")


@dataclass(frozen=True, slots=True)
class RepoName:
    """A repository of the hub, at a branch, tag or commit."""

    repo_id: str  # org/name
    revision: str = "main"

    def __str__(self) -> str:
        return self.repo_id if self.revision == "main" else f"{self.repo_id}@{self.revision}"

    @property
    def folder(self) -> Path:
        """The repository's folder in the hub cache, which may not exist."""
        return cache_folder() / ("models--" + self.repo_id.replace("/", "--"))


def parse_repo_name(name: str) -> RepoName:
    """Read `org/name` or `org/name@revision`.

    Raises:
        ModelNotFoundError: this cannot be the name of a repository.
    """
    match = _REPO.fullmatch(name)
    if match is None or ".." in name or "--" in match["repo"] or match["repo"].endswith(".git"):
        raise ModelNotFoundError(
            f"{shown(name)} is not a model name. Expected "
            f"{' or '.join(repr(bundled) for bundled in BUNDLED)} (bundled), an existing folder, "
            "or a Hugging Face repository as org/name or org/name@revision."
        )
    return RepoName(match["repo"], match["revision"] or "main")


def cache_folder() -> Path:
    """Return the hub cache, found as by huggingface_hub, but from the environment as it is now."""
    for variable, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if value := os.environ.get(variable):
            return Path(os.path.expandvars(value)).expanduser() / below
    return Path.home() / ".cache/huggingface/hub"


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF does, whatever its name: Ollama's blobs have no ending."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def offline() -> bool:
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in {"1", "ON", "YES", "TRUE"}


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this disk, or an interrupted download of one."""

    name: str  # what resolve() takes
    path: Path
    size_bytes: int  # of the weights, as everywhere; of all files that are here, where none are
    files: int
    modified: float  # seconds since 1970
    complete: bool
    source: str  # "bundled", "cache", "lm studio", "ollama" or "folder"
    gguf: bool = False  # a file in the GGUF format, which is to be converted
    problem: str = ""  # why it cannot be loaded, if config.json shows it


def bundled_models() -> Iterator[LocalModel]:
    for name in BUNDLED:
        if (ASSETS / name / "config.json").is_file():
            folder = ASSETS / name
            yield _describe(name, folder, folder.rglob("*"), "bundled", complete=True)


def cached_models() -> Iterator[LocalModel]:
    for repo_folder in sorted(cache_folder().glob("models--*--*")):
        repo_id = repo_folder.name.removeprefix("models--").replace("--", "/", 1)
        if "--" in repo_id or not repo_folder.is_dir():
            continue
        try:
            yield from _models_of(repo_id, repo_folder)
        except OSError as error:  # perhaps another user's; the others are listed
            problem = error.strerror or str(error)
            yield LocalModel(repo_id, repo_folder, 0, 0, 0.0, False, "cache", problem=problem)


def _models_of(repo_id: str, repo_folder: Path) -> Iterator[LocalModel]:
    for repo, snapshot in _snapshots(repo_id, repo_folder):
        blobs = list((repo_folder / "blobs").glob("*"))
        if _is_language_model(snapshot):
            complete, files = not missing_files(snapshot), snapshot.rglob("*")
            yield _describe(str(repo), snapshot, files, "cache", complete=complete)
        elif not snapshot.is_dir() and blobs:
            yield _describe(str(repo), repo_folder, blobs, "cache", complete=False)


def find_snapshot(repo: RepoName) -> Path | None:
    reference = repo.folder / "refs" / repo.revision
    if reference.is_file():
        snapshot = _snapshot_of(reference, repo.folder)
    else:
        snapshot = repo.folder / "snapshots" / repo.revision
    return snapshot if snapshot.is_dir() else None


def missing_files(folder: Path) -> list[str]:
    """Return the files that a model folder lacks to be loaded; weights are those of the index."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    weights = _indexed_weights(folder)
    missing += [name for name in sorted(weights) if not (folder / name).is_file()]
    if not weights and not any(file.is_file() for file in folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if not any(file.is_file() for pattern in TOKENIZERS for file in folder.glob(pattern)):
        missing.append("tokenizer.json")
    return missing


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def disk_bytes(folder: Path) -> int:
    files = (file for file in folder.rglob("*") if not file.is_symlink() and file.is_file())
    return sum(file.stat().st_size for file in files)


def _indexed_weights(folder: Path) -> set[str]:
    """Return the files that the index names; none where the loader takes others.

    It takes one whole file, or the shards of another build, if files of the index are missing.
    """
    if (folder / WHOLE).is_file():
        return set()
    listed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict):
        return set()
    names = {name for name in listed.values() if isinstance(name, str)}
    present = {file.name for file in folder.glob("*.safetensors") if file.is_file()}
    return set() if not names <= present and other_build(names, present) else names


def _snapshots(repo_id: str, repo_folder: Path) -> Iterator[tuple[RepoName, Path]]:
    """Yield each branch or tag with its snapshot; a repository without any as itself."""
    refs = repo_folder / "refs"
    references = sorted(file for file in refs.rglob("*") if file.is_file())
    for reference in references:
        name = RepoName(repo_id, reference.relative_to(refs).as_posix())
        yield name, _snapshot_of(reference, repo_folder)
    if not references:
        yield RepoName(repo_id), _newest_snapshot(repo_folder)


def _snapshot_of(reference: Path, repo_folder: Path) -> Path:
    """Return the folder of the commit that a branch or tag refers to.

    Where its file holds no commit (after a power cut), that is the newest folder.
    """
    commit = reference.read_bytes().decode("ascii", "replace").strip()
    if _COMMIT.fullmatch(commit):
        return repo_folder / "snapshots" / commit
    return _newest_snapshot(repo_folder)


def _newest_snapshot(repo_folder: Path) -> Path:
    snapshots = repo_folder / "snapshots"
    folders = [entry for entry in snapshots.glob("*") if entry.is_dir()]
    return max(folders, key=lambda entry: entry.stat().st_mtime, default=snapshots / "none")


EMBEDDERS = {  # classes of embedding models without sentence-transformers' files
    "BertModel", "RobertaModel", "XLMRobertaModel", "DistilBertModel", "NomicBertModel",
    "ModernBertModel", "Qwen3Model", "Gemma3TextModel",
}  # fmt: skip


def _is_language_model(snapshot: Path) -> bool:
    config = read_json(snapshot / "config.json")
    stated = config.get("architectures")
    architectures = [str(name) for name in stated] if isinstance(stated, list) else []
    heads = ("CausalLM", "ConditionalGeneration", "LMHeadModel", "ForSequenceClassification")
    speaks = not architectures or any(name.endswith(heads) for name in architectures)
    speaks = speaks or (snapshot / "modules.json").is_file()
    speaks = speaks or not EMBEDDERS.isdisjoint(architectures)
    weights = any(snapshot.glob("*.safetensors")) or bool(_indexed_weights(snapshot))
    weights = weights or any(snapshot.parents[1].glob("blobs/*.incomplete"))
    return ("model_type" in config or bool(_problem(snapshot))) and speaks and weights


def _problem(folder: Path) -> str:
    """Why a config.json that is there cannot be read; "": it can."""
    try:
        text = (folder / "config.json").read_text(encoding="utf-8")
        is_object = isinstance(json.loads(text), dict)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"config.json: {error.strerror}"
    except (ValueError, RecursionError):
        is_object = False
    return "" if is_object else "config.json is no JSON object"


def _describe(
    name: str, path: Path, files: Iterable[Path], source: str, *, complete: bool
) -> LocalModel:
    stats = [file.stat() for file in files if file.is_file()]
    return LocalModel(
        name=name,
        path=path,
        size_bytes=weights_bytes(path) or sum(stat.st_size for stat in stats),
        files=len(stats),
        modified=max((stat.st_mtime for stat in stats), default=path.stat().st_mtime),
        complete=complete,
        source=source,
        problem=_problem(path),
    )


# -- models of other programs: LM Studio's, Ollama's, and folders of the user's --------------------
# A folder with config.json and safetensors runs as it is, by its path; GGUF files are converted.

FOLDERS = "MLXINFER_MODELS"  # environment variable: folders of models, separated as in PATH
LM_STUDIO = ("~/.lmstudio/models", "~/.cache/lm-studio/models")
OLLAMA = "~/.ollama/models"
MODEL_LAYER = "application/vnd.ollama.image.model"
_LATER = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")  # a part of a split file, not the first
DEPTH = 3  # levels below a folder of models at which one may lie: publisher/name/file


def models_elsewhere(folders: list[Path]) -> Iterator[LocalModel]:
    """Yield the models of these folders, of MLXINFER_MODELS, of LM Studio and of Ollama."""
    named = [Path(name) for name in os.environ.get(FOLDERS, "").split(os.pathsep) if name]
    places = [(folder, "folder") for folder in [*folders, *named]]
    places += [(Path(place), "lm studio") for place in LM_STUDIO]
    seen: set[Path] = set()
    for place, source in places:
        root = place.expanduser().resolve()
        with suppress(OSError):
            if root not in seen and root.is_dir():
                seen.add(root)
                yield from _models_below(root, source)
    with suppress(OSError):
        yield from _ollama(Path(os.environ.get("OLLAMA_MODELS") or OLLAMA).expanduser())


def _models_below(root: Path, source: str) -> Iterator[LocalModel]:
    for folder in _folders(root, DEPTH):
        with suppress(OSError):
            if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
                files = [path for path in folder.iterdir() if path.is_file()]
                complete = not missing_files(folder)
                yield _describe(str(folder), folder, files, source, complete=complete)
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
    return replace(_describe(name, file, [file], source, complete=True), gguf=True)
