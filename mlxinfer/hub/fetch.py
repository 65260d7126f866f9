"""One large file over HTTP: an interrupted download continues, and the content is checked.

huggingface_hub 2.4 writes each download to a file with a new name and deletes that file when the
download fails, so an interrupted file of 20 GB starts anew; it compares sizes, not contents. That
is why weights are fetched here. `snapshot_download` does all the rest.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import DownloadError
from .failures import is_transient, wait_s

MAX_FAILURES = 5  # in a row, without one byte in between


@dataclass(slots=True)
class Stop:
    """A flag that ends downloads. No lock is taken, so an interrupt can leave none locked."""

    is_set: bool = False

    def wait(self, seconds: float) -> None:
        """Return after so many seconds, or soon after the flag is set."""
        end = time.monotonic() + seconds
        while not self.is_set and (left := end - time.monotonic()) > 0:
            time.sleep(min(0.05, left))


@dataclass(frozen=True, slots=True)
class Source:
    """The address of a file and the content that it must have."""

    url: str
    size: int  # bytes
    sha256: str
    label: str  # for messages


def partial_path(target: Path) -> Path:
    """Return the path that holds the beginning of `target` until all of it is there."""
    return target.with_name(target.name + ".incomplete")


def fetch(source: Source, target: Path, report: Callable[[int], None], stop: Stop) -> None:
    """Bring `source` to `target`, continuing where an earlier call was interrupted.

    Args:
        source: the file.
        target: its path on the disk.
        report: called with the number of bytes that arrived, negative where bytes were dropped.
        stop: when set, fetch() raises CancelledError early and keeps the bytes that arrived.

    Raises:
        DownloadError: another process fetches the same file, or the content is not the announced
            one.
        HTTPError: of huggingface_hub's HTTP library, after several tries.
    """
    partial = partial_path(target)
    with partial.open("ab") as file:
        _lock(file, source)
        _receive(source, file, report, stop)
        file.flush()
        with partial.open("rb") as whole:
            digest = hashlib.file_digest(whole, "sha256").hexdigest()
        if digest != source.sha256:
            _drop(file, report)
            raise DownloadError(
                f"{source.label} arrived damaged (its SHA-256 is {digest[:12]}…, the hub announced "
                f"{source.sha256[:12]}…). Nothing of it was kept; try again."
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


def request_headers(byte_range: str = "") -> dict[str, str]:
    """Return the headers of a request for a file, or for a range of its bytes: "0-99", "100-"."""
    from huggingface_hub.utils import build_hf_headers

    headers: dict[str, str] = build_hf_headers(library_name="mlxinfer")
    headers["Accept-Encoding"] = "identity"
    return headers | ({"Range": f"bytes={byte_range}"} if byte_range else {})


def open_stream(url: str, byte_range: str = "") -> Any:
    """Return the context manager of a response whose body is read in pieces."""
    from huggingface_hub import get_session
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT

    return get_session().stream(
        "GET", url, headers=request_headers(byte_range), timeout=HF_HUB_DOWNLOAD_TIMEOUT
    )


def _receive(source: Source, file: BinaryIO, report: Callable[[int], None], stop: Stop) -> None:
    """Append until `source.size` bytes are there."""
    from huggingface_hub.errors import HTTPError

    failures = 0
    while (before := _size(file)) < source.size:
        try:
            _append(source, file, report, stop)
            if _size(file) == before:
                raise DownloadError(f"The hub sends no more of {source.label}; try again later.")
        except HTTPError as error:
            failures = 1 if _size(file) > before else failures + 1
            if failures >= MAX_FAILURES or not is_transient(error):
                raise
            stop.wait(wait_s(error, failures))


def _append(source: Source, file: BinaryIO, report: Callable[[int], None], stop: Stop) -> None:
    """Ask for the bytes that are missing and append what one response brings."""
    from huggingface_hub.utils import hf_raise_for_status

    done = _size(file)
    with open_stream(source.url, f"{done}-" if done else "") as response:
        hf_raise_for_status(response)
        if response.status_code == 200:  # the server ignores ranges and sends the whole file
            _drop(file, report)
            done = 0
        for chunk in response.iter_raw():
            if stop.is_set:
                raise CancelledError
            done += len(chunk)
            if done > source.size:  # the body might never end, and fill the disk
                _drop(file, report)
                raise DownloadError(
                    f"The hub sends more of {source.label} than the {source.size} bytes that it "
                    "announced. Nothing of it was kept; try again."
                )
            file.write(chunk)
            report(len(chunk))


def _size(file: BinaryIO) -> int:
    """Return the number of bytes that a file opened for appending holds."""
    return file.seek(0, os.SEEK_END)


def _drop(file: BinaryIO, report: Callable[[int], None]) -> None:
    report(-_size(file))
    file.truncate(0)


def _lock(file: BinaryIO, source: Source) -> None:
    """Lock the file against other downloads; the lock ends with the process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DownloadError(
            f"Another process is downloading {source.label}; wait for it, then try again."
        ) from None
