"""One large file over HTTP: resumed, retried, and checked by its SHA-256.

Failures of the hub become this package's errors. huggingface_hub's own download begins each file
anew after the process ended (since 1.0), and compares sizes, not contents.
"""

import errno
import fcntl
import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ..errors import DownloadError, MlxinferError, ModelNotFoundError
from ..threads import Reply, start
from .cache import RepoName, cache_folder

LOGIN = "hf auth login (or set HF_TOKEN)"


CHUNK_BYTES = 1 << 20  # read at once from the disk
MAX_FAILURES = 5  # in a row, without one byte in between
RETRY_WAIT_S = 1.0  # doubled with each failure
MAX_WAIT_S = 60.0
TRANSIENT = (408, 429, 500, 502, 503, 504)
Found = TypeVar("Found")


class Stop:
    """A flag that ends downloads. Setting it takes no lock that an interrupt could leave taken."""

    def __init__(self) -> None:
        self._is_set = False
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Set it and wake what waits."""
        self._is_set = True
        self._woken.put(None)

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def wait(self, seconds: float) -> None:
        """Return when it is set, or after so many seconds."""
        try:
            self._woken.get(timeout=seconds)
        except queue.Empty:
            return
        self._woken.put(None)  # for others that wait


def run_until_stopped(function: Callable[[], None], stop: Stop) -> None:
    """Call a function on a thread of its own; an interrupt sets `stop` and waits for its end.

    The function may then use whatever takes locks in Python (`threads.py`).
    """
    reply: Reply[None] = Reply()
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def work() -> None:
        reply.of(function)
        ended.put(None)

    def failed(error: BaseException) -> None:
        reply.fail(error)
        ended.put(None)

    thread = threading.Thread(target=work, name="mlxinfer-download", daemon=True)
    is_started = False  # as far as is known: where `start` is interrupted, there may be no end
    try:
        start(thread, failed)
        is_started = True
        reply.wait()
    except KeyboardInterrupt:
        stop.set()
        raise
    finally:
        if is_started:
            ended.get()


@contextmanager
def hub_failures(repo: RepoName) -> Iterator[None]:
    """Turn failures inside into ModelNotFoundError or DownloadError.

    Those are errors of the network, the hub and the disk: OSErrors and the HTTP library's. Other
    exceptions pass through.
    """
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        yield
    except MlxinferError:
        raise
    except (HTTPError, OSError, HFValidationError) as error:
        raise translate(error, repo) from error


def translate(error: BaseException, repo: RepoName) -> MlxinferError:
    """Return the error of this package for an exception of huggingface_hub or of the disk."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        return translate(error.__cause__, repo)
    if isinstance(error, GatedRepoError):
        return DownloadError(
            f"{repo.repo_id} is gated: ask for access at https://huggingface.co/{repo.repo_id}, "
            f"then {LOGIN}."
        )
    if isinstance(error, RepositoryNotFoundError):
        return _unknown(repo)
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFoundError(f"{repo.repo_id} has no revision {repo.revision!r}.")
    if isinstance(error, EntryNotFoundError):
        return DownloadError(f"The hub lists a file of {repo} that it does not have; try again.")
    if isinstance(error, HfHubHTTPError):
        return _answered(error.response.status_code, repo)
    if isinstance(error, HTTPError):
        return DownloadError(
            f"The hub cannot be reached ({_first_line(error)}), and there is no folder "
            f"{repo.repo_id!r} here. Check the network; `mlxinfer list` shows the models that are "
            "already here."
        )
    return _disk(error, repo)


def _unknown(repo: RepoName) -> MlxinferError:
    return ModelNotFoundError(
        f"The hub has no {repo.repo_id}, or it is private. Check the spelling; "
        f"for a private model: {LOGIN}."
    )


def _answered(status: int, repo: RepoName) -> MlxinferError:
    if status == 401:
        return DownloadError(f"The hub did not accept your token for {repo.repo_id}: {LOGIN}.")
    if status == 403:
        return DownloadError(
            f"The hub does not let you read {repo.repo_id}: ask for access at "
            f"https://huggingface.co/{repo.repo_id}, then {LOGIN}."
        )
    if status == 404:
        return _unknown(repo)
    if status == 429:
        return DownloadError(
            f"The hub limits how often you may ask: wait a while; more is allowed after {LOGIN}."
        )
    return DownloadError(f"The hub answered {status} for {repo}; try again later.")


def _disk(error: BaseException, repo: RepoName) -> MlxinferError:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(
            f"The disk is full while downloading {repo}; what has arrived is kept. Make room, then "
            "run the same command again."
        )
    if number == errno.ENOENT:
        return DownloadError(
            f"Somebody deleted files of {repo} in {cache_folder()} during the download; run the "
            "same command again."
        )
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DownloadError(
            f"{cache_folder()} cannot be written ({_first_line(error)}). Set HF_HOME to a folder "
            "of yours."
        )
    return DownloadError(f"Downloading {repo} failed: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True, slots=True)
class Source:
    """The address of a file and the content that it must have."""

    url: str
    size: int
    sha256: str
    label: str  # for messages


def partial_path(target: Path) -> Path:
    """Return where the beginning of `target` is kept: huggingface_hub's name for a partial file."""
    return target.with_name(target.name + ".incomplete")


def fetch(source: Source, target: Path, report: Callable[[int], None], stop: Stop) -> None:
    """Bring `source` to `target`, continuing where an earlier call was interrupted.

    Args:
        source: the file.
        target: its path on the disk.
        report: called with the number of bytes that arrived, negative where bytes were dropped.
        stop: when set, fetch() raises CancelledError early and keeps what has arrived.

    Raises:
        DownloadError: another process fetches the same file, or the content is not the announced
            one.
        HTTPError: of huggingface_hub's HTTP library, after several tries.
    """
    partial = partial_path(target)
    with partial.open("ab") as file:
        _lock(file, source)
        digest = _receive(source, file, partial, report, stop)
        if digest != source.sha256:
            file.truncate(0)
            report(-source.size)
            raise DownloadError(
                f"{source.label} arrived damaged (its SHA-256 is {digest[:12]}…, the hub announced "
                f"{source.sha256[:12]}…). Nothing of it was kept; try again."
            )
        os.replace(partial, target)


def patiently(ask: Callable[[], Found]) -> Found:
    """Call `ask` until it succeeds, with waits while the hub is busy; raise the last failure."""
    from huggingface_hub.errors import HTTPError

    failures = 0
    while True:
        try:
            return ask()
        except HTTPError as error:
            failures += 1
            if failures > 2 or not _worth_another_try(error):
                raise
            time.sleep(_wait_s(error, failures))


def _receive(
    source: Source,
    file: BinaryIO,
    partial: Path,
    report: Callable[[int], None],
    stop: Stop,
) -> str:
    """Append until `source.size` bytes are there. Returns the SHA-256 of all of them."""
    from huggingface_hub.errors import HTTPError

    digest, done = _digest_of(partial)
    failures = 0
    while done < source.size:
        if stop.is_set():
            raise CancelledError
        before = done
        try:
            for restarted, chunk in _stream(source, done):
                if stop.is_set():
                    raise CancelledError
                if restarted:
                    file.truncate(0)
                    report(-done)
                    digest, done = hashlib.sha256(), 0
                    before = 0
                if done + len(chunk) > source.size:  # it might never end, and fill the disk
                    file.truncate(0)
                    report(-done)
                    raise _too_long(source)
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                report(len(chunk))
        except HTTPError as error:
            failures = 1 if done > before else failures + 1
            if failures >= MAX_FAILURES or not _worth_another_try(error):
                raise
            stop.wait(_wait_s(error, failures))
        else:
            failures = 1 if done > before else failures + 1
            if failures >= MAX_FAILURES:
                raise DownloadError(f"The hub sends no more of {source.label}; try again later.")
    file.flush()
    return str(digest.hexdigest())


def _stream(source: Source, start: int) -> Iterator[tuple[bool, bytes]]:
    """Yield (restarted, chunk) from byte `start` on; restarted: the server began at byte 0."""
    from huggingface_hub import get_session
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    headers = build_hf_headers(library_name="mlxinfer") | {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with get_session().stream(
        "GET", source.url, headers=headers, timeout=HF_HUB_DOWNLOAD_TIMEOUT
    ) as response:
        hf_raise_for_status(response)
        restarted = start > 0 and response.status_code == 200
        for chunk in response.iter_raw():
            yield restarted, chunk
            restarted = False


def _too_long(source: Source) -> DownloadError:
    return DownloadError(
        f"The hub sends more of {source.label} than the {source.size} bytes that it announced. "
        "Nothing of it was kept; try again."
    )


def _digest_of(path: Path) -> tuple[Any, int]:
    """Return a running SHA-256 over the content of `path`, and its number of bytes."""
    digest, count = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            count += len(chunk)
    return digest, count


def _lock(file: BinaryIO, source: Source) -> None:
    """Lock the file against other processes; the lock ends with the process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DownloadError(
            f"Another process is downloading {source.label}; wait for it, then try again."
        ) from None


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


def _worth_another_try(error: Exception) -> bool:
    from huggingface_hub.errors import HfHubHTTPError

    return not isinstance(error, HfHubHTTPError) or error.response.status_code in TRANSIENT


def _wait_s(error: Exception, failures: int) -> float:
    from huggingface_hub.errors import HfHubHTTPError

    wait_s = RETRY_WAIT_S * 2 ** (failures - 1)
    if isinstance(error, HfHubHTTPError):
        asked = error.response.headers.get("Retry-After", "")
        wait_s = max(wait_s, float(asked)) if asked.isdecimal() else wait_s
    return min(wait_s, MAX_WAIT_S)
