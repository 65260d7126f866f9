"""Downloads a hub repository into the hub's cache, if there is room.

Weights are fetched by `fetch.py`, which resumes after an interruption and checks the SHA-256 that
the hub announces; huggingface_hub does the small files and the cache's links. A branch is moved to
the new commit only once every file is there, so the old version stays usable until then. A file in
the cache counts as present when it has the announced size.
"""

import fnmatch
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DownloadError
from ..memory import human_bytes
from .cache import INDEX, WHOLE, RepoName, cache_folder
from .fetch import Source, Stop, fetch, hub_failures, partial_path, run_until_stopped
from .remote import Listing, RemoteFile, endpoint, list_files

WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "tokenizer*", "*.tiktoken")
NEVER = ("*.bin", "*.pt", "*.pth", "*.py", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.pkl")
TEMPLATES = "additional_chat_templates/"
MODULE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")  # of sentence-transformers
SPARE_BYTES = 64 << 20  # what a download leaves free on the disk
WORKERS = 4


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """Bytes of a download that are here, and all of them."""

    done_bytes: int
    total_bytes: int


Progress = Callable[[DownloadProgress], None]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file of a repository that is needed."""

    path: str
    size: int
    sha256: str | None  # None: small enough to be kept in git
    present_bytes: int  # already on this disk, whole or in part


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """The files that a download needs, and the room on the disk."""

    repo: RepoName
    commit: str
    files: tuple[PlannedFile, ...]
    free_bytes: int

    @property
    def total_bytes(self) -> int:
        """Size of the model on the disk."""
        return sum(file.size for file in self.files)

    @property
    def missing_bytes(self) -> int:
        """Bytes still to be fetched."""
        return sum(file.size - file.present_bytes for file in self.files)

    def check_room(self) -> None:
        """Raise DownloadError if the disk is too full."""
        if self.missing_bytes and self.missing_bytes + SPARE_BYTES > self.free_bytes:
            raise DownloadError(
                f"{self.repo} needs {human_bytes(self.missing_bytes)} more, and "
                f"{human_bytes(SPARE_BYTES)} are to stay free, but "
                f"{cache_folder()} has {human_bytes(self.free_bytes)} free. Make room "
                "(mlxinfer list, mlxinfer rm) or set HF_HOME to a larger disk."
            )


def plan_download(repo: RepoName) -> DownloadPlan:
    """Ask the hub for the files of `repo` and compare them with the cache.

    Raises:
        ModelNotFoundError, DownloadError: as hub_failures() words them; and a DownloadError for a
            repository without safetensors.
    """
    listing = list_files(repo)
    names = _needed([file.path for file in listing.files], repo)
    files = [_planned(listing, file) for file in listing.files if file.path in names]
    return DownloadPlan(repo, listing.commit, tuple(files), _free_bytes())


def download(repo: RepoName, *, progress: Progress | None = None) -> Path:
    """Fetch the missing files of `repo` and return its folder in the cache.

    Raises:
        ModelNotFoundError, DownloadError: with what to do.
    """
    plan = plan_download(repo)
    plan.check_room()
    tally = _Tally(plan, progress)
    with hub_failures(repo):
        _remove_damaged(plan)
        _fetch_weights(plan, tally)
        _complete_snapshot(plan, plan.commit)
        folder = _complete_snapshot(plan, repo.revision)
    tally.finish()
    return folder


class _Tally:
    """Counts the bytes of several threads and reports the sum."""

    def __init__(self, plan: DownloadPlan, progress: Progress | None) -> None:
        self._total = plan.total_bytes
        self._done = self._total - plan.missing_bytes
        self._progress = progress
        self._lock = threading.Lock()
        self.add(0)

    def add(self, count: int) -> None:
        """Count bytes that arrived; negative for bytes that turned out useless."""
        with self._lock:
            self._done += count
            if self._progress:
                self._progress(DownloadProgress(self._done, self._total))

    def finish(self) -> None:
        self.add(self._total - self._done)


def _needed(names: list[str], repo: RepoName) -> set[str]:
    """Return the files to fetch: weights and texts at the top level, none that may hold code.

    And those of modules behind an embedding model, in folders of their own.
    """
    wanted = {name for name in names if _is_wanted(name)}
    weights = {name for name in wanted if name.endswith(".safetensors") and "/" not in name}
    if not weights:
        what = " (it has GGUF files)" if any(n.endswith(".gguf") for n in names) else ""
        raise DownloadError(
            f"{repo} has no .safetensors weights{what}. Choose a repository with safetensors, "
            "for example one of mlx-community."
        )
    if any(name.startswith("model") for name in weights):  # then these are the same weights again
        wanted -= {name for name in weights if name.startswith("consolidated")}
    if WHOLE in weights:  # the loader then ignores an index, left by an upload in shards
        wanted.discard(INDEX)
    return wanted


def _is_wanted(name: str) -> bool:
    if MODULE.fullmatch(name):
        return True
    if "/" in name.removeprefix(TEMPLATES) or "\\" in name or ".." in name:
        return False
    lower = name.lower()
    matches = any(fnmatch.fnmatchcase(lower, pattern) for pattern in WANTED)
    return matches and not any(fnmatch.fnmatchcase(lower, pattern) for pattern in NEVER)


def _planned(listing: Listing, file: RemoteFile) -> PlannedFile:
    present = 0
    if any(_is_whole(path, file) for path in _places(listing, file)):
        present = file.size
    elif file.sha256:
        partial = partial_path(listing.repo.folder / "blobs" / file.sha256)
        present = partial.stat().st_size if partial.is_file() else 0
    return PlannedFile(file.path, file.size, file.sha256, min(present, file.size))


def _places(source: Listing | DownloadPlan, file: RemoteFile | PlannedFile) -> list[Path]:
    """Return where the cache keeps a file: its name in the snapshot, and its content."""
    folder = source.repo.folder
    places = [folder / "snapshots" / source.commit / file.path]
    return [*places, folder / "blobs" / file.sha256] if file.sha256 else places


def _is_whole(path: Path, file: RemoteFile | PlannedFile) -> bool:
    """Whether a file has the size that the hub announced, if it announced one."""
    return path.is_file() and file.size in (0, path.stat().st_size)


def _remove_damaged(plan: DownloadPlan) -> None:
    """Delete files of another size than the hub's, which huggingface_hub would keep.

    All snapshots that share such a content need the same bytes, so none loses anything.
    """
    for file in plan.files:
        for path in _places(plan, file):
            if path.is_file() and not _is_whole(path, file):
                content = path.resolve()
                if content.is_relative_to(plan.repo.folder.resolve()):
                    content.unlink()
                path.unlink(missing_ok=True)


def _fetch_weights(plan: DownloadPlan, tally: _Tally) -> None:
    """Fetch the large files in parallel; the first failure or Ctrl-C stops all of them."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE

    stop, wanted = Stop(), []
    blobs = plan.repo.folder / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    for file in plan.files:
        is_weights = file.path.endswith(".safetensors")
        if file.sha256 is None or not is_weights or file.size > MAX_HTTP_DOWNLOAD_SIZE:
            continue  # left to huggingface_hub
        if (blobs / file.sha256).is_file() or file.present_bytes == file.size == 0:
            continue
        url = hf_hub_url(plan.repo.repo_id, file.path, revision=plan.commit, endpoint=endpoint())
        wanted.append((Source(url, file.size, file.sha256, file.path), blobs / file.sha256))

    def fetch_all() -> None:
        with ThreadPoolExecutor(WORKERS) as pool:
            jobs = [pool.submit(fetch, *each, tally.add, stop) for each in wanted]
            try:
                for job in as_completed(jobs):
                    job.result()
            finally:
                stop.set()

    run_until_stopped(fetch_all, stop)


def _complete_snapshot(plan: DownloadPlan, revision: str) -> Path:
    """Fetch the small files and link all, with huggingface_hub; a branch name moves the branch."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    folder = snapshot_download(
        plan.repo.repo_id,
        revision=revision,
        cache_dir=cache_folder(),
        endpoint=endpoint(),
        allow_patterns=[file.path.replace("[", "[[]") for file in plan.files],
        library_name="mlxinfer",
        max_workers=WORKERS,
        tqdm_class=Silent,
    )
    return Path(folder)


def _free_bytes() -> int:
    folder = cache_folder()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
