"""Downloads a hub repository into the hub's cache, if there is room.

huggingface_hub 2.4 writes each download to a file with a new name and deletes that file when the
download fails, so an interrupted file of 20 GB starts anew; it compares sizes, not contents. That
is why weights are fetched here. Its `snapshot_download` fetches small files, and files that only
its xet client may fetch, and makes the cache's links.

A branch moves to the new commit only when every file is there, so the old version stays usable
until then. A file in the cache counts as present when it has the announced size.
"""

import fcntl
import fnmatch
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import DownloadError
from ..memory import human_bytes
from ..threads import run_apart
from .cache import INDEX, WHOLE, RepoName, cache_folder
from .remote import (
    Listing,
    RemoteFile,
    endpoint,
    hub_failures,
    is_transient,
    list_files,
    open_stream,
    source_url,
    wait_s,
)

WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "tokenizer*", "*.tiktoken")
NEVER = ("*.bin", "*.pt", "*.pth", "*.py", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.pkl")
WEIGHTS = (".safetensors", ".gguf")
TEMPLATES = "additional_chat_templates/"
MODULE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")  # of sentence-transformers
SPARE_BYTES = 64 << 20  # what a download leaves free on the disk
WORKERS = 4


Progress = Callable[[int, int], None]  # bytes that are here, of all
Choose = Callable[[Listing], set[str]]  # of the paths of a listing
MAX_FAILURES = 5  # in a row, without one byte in between


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """The files that a download needs, and the room on the disk."""

    listing: Listing  # needed files only
    present: dict[str, int]  # path -> bytes that are already on this disk
    free_bytes: int

    @property
    def files(self) -> tuple[RemoteFile, ...]:
        return self.listing.files

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def missing_bytes(self) -> int:
        return self.total_bytes - sum(self.present.values())

    def check_room(self) -> None:
        if self.missing_bytes and self.missing_bytes + SPARE_BYTES > self.free_bytes:
            raise DownloadError(
                f"{self.listing.repo} needs {human_bytes(self.missing_bytes)} more, and "
                f"{human_bytes(SPARE_BYTES)} must stay free, but "
                f"{cache_folder()} has {human_bytes(self.free_bytes)} free. Make room "
                "(mlxinfer list, mlxinfer rm) or set HF_HOME to a larger disk."
            )


def plan_download(repo: RepoName, choose: Choose | None = None) -> DownloadPlan:
    """Ask the hub for the files of `repo` and compare them with the cache.

    Args:
        choose: gives the paths to fetch; None: safetensors and the texts beside them.

    Raises:
        ModelNotFoundError, DownloadError: as hub_failures() words them; and a DownloadError for a
            repository without safetensors.
    """
    listing = list_files(repo)
    names = (choose or needed)(listing)
    files = tuple(file for file in listing.files if file.path in names)
    listing = replace(listing, files=files)
    present = {file.path: _present_bytes(listing, file) for file in files}
    return DownloadPlan(listing, present, _free_bytes())


def download(
    repo: RepoName, choose: Choose | None = None, *, progress: Progress | None = None
) -> Path:
    """Fetch the missing files of `repo` and return its folder in the cache.

    Args:
        choose: see `plan_download`.
        progress: called with the bytes that are here and all of them, from several threads.

    Raises:
        ModelNotFoundError, DownloadError: with what to do.
    """
    plan = plan_download(repo, choose)
    plan.check_room()
    tally = _Tally(plan, progress)
    with hub_failures(repo):
        _remove_damaged(plan.listing)
        _fetch_weights(plan, tally)
        _complete_snapshot(plan, plan.listing.commit)
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
                self._progress(self._done, self._total)

    def finish(self) -> None:
        self.add(self._total - self._done)


def needed(listing: Listing) -> set[str]:
    """Return the files to fetch: weights and texts at the top level, none that may hold code.

    And those of modules behind an embedding model, in folders of their own.

    Raises:
        DownloadError: there are no safetensors.
    """
    names = [file.path for file in listing.files]
    wanted = {name for name in names if _is_wanted(name)}
    weights = {name for name in wanted if name.endswith(".safetensors") and "/" not in name}
    if not weights:
        raise DownloadError(
            f"{listing.repo} has no .safetensors weights, and no GGUF model. Choose a repository "
            "that has, for example one of mlx-community."
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


def _present_bytes(listing: Listing, file: RemoteFile) -> int:
    if any(_is_whole(path, file) for path in _places(listing, file)):
        return file.size
    if file.sha256 is None:
        return 0
    partial = partial_path(listing.repo.folder / "blobs" / file.sha256)
    return min(partial.stat().st_size, file.size) if partial.is_file() else 0


def _places(listing: Listing, file: RemoteFile) -> list[Path]:
    folder = listing.repo.folder
    places = [folder / "snapshots" / listing.commit / file.path]
    return [*places, folder / "blobs" / file.sha256] if file.sha256 else places


def _is_whole(path: Path, file: RemoteFile) -> bool:
    return path.is_file() and file.size in (0, path.stat().st_size)


def _remove_damaged(listing: Listing) -> None:
    """Delete files of another size than the hub's, which huggingface_hub would keep.

    All snapshots that share such a content need the same bytes, so none loses anything.
    """
    for file in listing.files:
        for path in _places(listing, file):
            if path.is_file() and not _is_whole(path, file):
                content = path.resolve()
                if content.is_relative_to(listing.repo.folder.resolve()):
                    content.unlink()
                path.unlink(missing_ok=True)


def _fetch_weights(plan: DownloadPlan, tally: _Tally) -> None:
    """Fetch the large files in parallel; the first failure or Ctrl-C stops all of them."""
    from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE

    stop, wanted = Stop(), []
    blobs = plan.listing.repo.folder / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    for file in plan.files:
        is_weights = file.sha256 is not None and file.path.endswith(WEIGHTS)
        if is_weights and 0 < file.size <= MAX_HTTP_DOWNLOAD_SIZE:  # the xet client does the rest
            target = blobs / str(file.sha256)
            if not target.is_file():
                wanted.append((source_url(plan.listing, file.path), file, target))

    def fetch_all() -> None:
        with ThreadPoolExecutor(WORKERS) as pool:
            jobs = [pool.submit(fetch, *missing, tally.add, stop) for missing in wanted]
            try:
                for job in as_completed(jobs):
                    job.result()
            finally:
                stop.is_set = True

    try:
        run_apart(fetch_all, "mlxinfer-download")
    finally:
        stop.is_set = True


def _complete_snapshot(plan: DownloadPlan, revision: str) -> Path:
    """Fetch the small files and link all, with huggingface_hub; a branch name moves the branch."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    folder = snapshot_download(
        plan.listing.repo.repo_id,
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


# -- one large file: an interrupted download continues, and the content is checked --------------


@dataclass(slots=True)
class Stop:
    """A flag that ends downloads. No lock is taken, so an interrupt can leave none locked."""

    is_set: bool = False

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.is_set and (left := end - time.monotonic()) > 0:
            time.sleep(min(0.05, left))


def partial_path(target: Path) -> Path:
    return target.with_name(target.name + ".incomplete")


def fetch(
    url: str, wanted: RemoteFile, target: Path, report: Callable[[int], None], stop: Stop
) -> None:
    """Bring a file to `target`, continuing where an earlier call was interrupted.

    Args:
        wanted: its name, and the size and SHA-256 that it must have.
        report: called with the number of bytes that arrived, negative where bytes were dropped.
        stop: when set, fetch() raises CancelledError early and keeps the bytes that arrived.

    Raises:
        DownloadError: another process fetches the same file, or the content is not the announced
            one.
        HTTPError: of huggingface_hub's HTTP library, after several tries.
    """
    partial = partial_path(target)
    with partial.open("ab") as file:
        _lock(file, wanted)
        _receive(url, wanted, file, report, stop)
        file.flush()
        with partial.open("rb") as whole:
            digest = hashlib.file_digest(whole, "sha256").hexdigest()
        if digest != wanted.sha256:
            _drop(file, report)
            raise DownloadError(
                f"{wanted.path} arrived damaged (its SHA-256 is {digest[:12]}…, the hub announced "
                f"{str(wanted.sha256)[:12]}…). Nothing of it was kept; try again."
            )
        os.replace(partial, target)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a file; a missing file has none."""
    try:
        with path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _receive(
    url: str, wanted: RemoteFile, file: BinaryIO, report: Callable[[int], None], stop: Stop
) -> None:
    """Append until `wanted.size` bytes are there."""
    from huggingface_hub.errors import HTTPError

    failures = 0
    while (before := _size(file)) < wanted.size:
        try:
            _append(url, wanted, file, report, stop)
            if _size(file) == before:
                raise DownloadError(f"The hub sends no more of {wanted.path}; try again later.")
        except HTTPError as error:
            failures = 1 if _size(file) > before else failures + 1
            if failures >= MAX_FAILURES or not is_transient(error):
                raise
            stop.wait(wait_s(error, failures))


def _append(
    url: str, wanted: RemoteFile, file: BinaryIO, report: Callable[[int], None], stop: Stop
) -> None:
    """Ask for the bytes that are missing and append what one response brings."""
    from huggingface_hub.utils import hf_raise_for_status

    done = _size(file)
    with open_stream(url, f"{done}-" if done else "") as response:
        hf_raise_for_status(response)
        if response.status_code == 200:  # the server ignores ranges and sends the whole file
            _drop(file, report)
            done = 0
        for chunk in response.iter_raw():
            if stop.is_set:
                raise CancelledError
            done += len(chunk)
            if done > wanted.size:  # the body might never end, and fill the disk
                _drop(file, report)
                raise DownloadError(
                    f"The hub sends more of {wanted.path} than the {wanted.size} bytes that it "
                    "announced. Nothing of it was kept; try again."
                )
            file.write(chunk)
            report(len(chunk))


def _size(file: BinaryIO) -> int:
    return file.seek(0, os.SEEK_END)


def _drop(file: BinaryIO, report: Callable[[int], None]) -> None:
    report(-_size(file))
    file.truncate(0)


def _lock(file: BinaryIO, wanted: RemoteFile) -> None:
    """Lock the file against other downloads; the lock ends with the process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DownloadError(
            f"Another process is downloading {wanted.path}; wait for it, then try again."
        ) from None
