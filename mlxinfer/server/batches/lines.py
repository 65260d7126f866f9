"""Lines of a batch: requests in, answers out, as OpenAI writes them. Knows files, runs nothing.

The files of the answers are the record of what was done: a line is written whole or cut off, and
what is cut off is dropped when they are opened again. So a run that was killed goes on where it
was: no line is answered twice in them, and none is lost.
"""

import codecs
import fcntl
import os
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from ...errors import InvalidRequestError
from ..background import in_background

MAX_ROWS = 50_000
MAX_LINE_BYTES = 32 << 20
MAX_ID_CHARS = 512
MAX_PROBLEMS = 100  # that are listed
START = b'{"id":"'  # of every line of answers
SYNC_S = 1.0  # what was answered before is on the disk even if the machine loses power


class BatchLine(msgspec.Struct, kw_only=True):
    """A line of the input."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class Done(msgspec.Struct):
    """What is read of a line of the output; lines of the input have no `id`."""

    id: str
    custom_id: str


class RowResponse(msgspec.Struct, kw_only=True):
    """The HTTP answer to a row."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class RowError(msgspec.Struct, kw_only=True):
    """Why a row has no answer."""

    code: str
    message: str


class ResultLine(msgspec.Struct, kw_only=True):
    """A line of the output or of the errors."""

    id: str
    custom_id: str
    response: RowResponse | None = None
    error: RowError | None = None

    @property
    def failed(self) -> bool:
        """Whether it goes to the errors."""
        return self.response is None or self.response.status_code != 200


class Problem(msgspec.Struct, kw_only=True):
    """What is wrong with a line of the input."""

    code: str
    message: str
    line: int  # from 1
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a batch."""

    line: int  # from 1
    custom_id: str
    url: str
    body: bytes


def rows_of(path: Path) -> Iterator[Row]:
    """The requests of a file that was checked, in order; lines without text are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(_without_mark(file), start=1):
            if line.strip():
                found = msgspec.json.decode(line, type=BatchLine)
                yield Row(number, found.custom_id, found.url, bytes(found.body))


def check_rows(
    path: Path, urls: Collection[str], most: int | None = MAX_ROWS
) -> tuple[int, list[Problem]]:
    """How many requests a file holds, and what is wrong with its lines. Takes a while.

    Args:
        path: of the file.
        urls: that requests may have.
        most: requests; None: any number.
    """
    known: set[str] = set()
    problems: list[Problem] = []
    with path.open("rb") as file:
        for number, line in enumerate(_without_mark(_bounded_lines(file)), start=1):
            if len(problems) >= MAX_PROBLEMS or (most is not None and len(known) > most):
                break
            if line.strip():
                problems += _problems(number, line, urls, known)
    if not known and not problems:
        problems.append(Problem(code="empty_file", message="The file has no requests.", line=1))
    if most is not None and len(known) > most:
        message = f"The file has more than {most} requests, which is the most accepted."
        problems.append(Problem(code="too_many_requests", message=message, line=most + 1))
    return len(known), problems


def _without_mark(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The same lines, less the mark of UTF-8 that editors of Windows put before the first."""
    for number, line in enumerate(lines):
        yield line if number else line.removeprefix(codecs.BOM_UTF8)


def _bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; of one that is too long so much that this shows."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line
        if len(line) > MAX_LINE_BYTES:
            return


def _problems(number: int, line: bytes, urls: Collection[str], known: set[str]) -> list[Problem]:
    """What is wrong with one line; `known` gets its id."""

    def problem(code: str, message: str, param: str | None = None) -> list[Problem]:
        return [Problem(code=code, message=message, line=number, param=param)]

    if len(line) > MAX_LINE_BYTES:
        return problem("line_too_long", f"The line is longer than {MAX_LINE_BYTES} bytes.")
    try:
        line.decode()
        found = msgspec.json.decode(line, type=BatchLine)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return problem("invalid_json_line", f"The line is no request of a batch: {error}.")
    if not 0 < len(found.custom_id) <= MAX_ID_CHARS:
        message = f"custom_id has {len(found.custom_id)} characters; expected 1 to {MAX_ID_CHARS}."
        return problem("invalid_custom_id", message, "custom_id")
    if found.custom_id in known:
        message = f"The custom_id {found.custom_id!r} is there twice; give each line its own."
        return problem("duplicate_custom_id", message, "custom_id")
    known.add(found.custom_id)
    if found.method != "POST":
        return problem("invalid_method", f"method is {found.method!r}; expected 'POST'.", "method")
    if found.url not in urls:
        message = f"url is {found.url[:100]!r}; expected {' or '.join(urls)}."
        return problem("invalid_url", message, "url")
    return []


class ResultFiles:
    """The answers of one batch: a file of those that succeeded, and one of the others.

    Args:
        output: written line by line; what is there already is kept.
        errors: the same; made when the first request fails.

    Attributes:
        done: the ids of the requests with answers that are there.
        num_failed: of these, in `errors`.

    Raises:
        InvalidRequestError: a file is there that was not written by a batch, or is a device or a
            pipe; another process writes it; both are one; or a folder is missing.
        OSError: one cannot be written.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        if output.resolve() == errors.resolve():
            raise InvalidRequestError(
                f"Answers and errors would both go to {output}; name two files.", param="errors"
            )
        self._paths = {False: output, True: errors}
        self._files: dict[bool, BinaryIO] = {}
        self._synced_s = time.monotonic()
        self._syncing: Future[None] | None = None
        try:
            self.done = _repair(output, self._file(failed=False))
            failed = _repair(errors, self._file(failed=True)) if errors.exists() else set()
        except BaseException:  # no file stays locked
            self.close()
            raise
        self.num_failed = len(failed - self.done)
        self.done |= failed

    @property
    def num_bytes(self) -> int:
        """Of both files."""
        return sum(file.tell() for file in list(self._files.values()))  # a thread may add one

    def write(self, line: ResultLine) -> None:
        """Add the answer to a request, once.

        Raises:
            OSError: it cannot be written, or earlier ones could not.
        """
        if line.custom_id in self.done:
            return
        file = self._file(failed=line.failed)
        with _naming(self._paths[line.failed]):
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
        self.done.add(line.custom_id)
        self.num_failed += line.failed
        if time.monotonic() - self._synced_s > SYNC_S:
            self._begin_sync()

    def close(self) -> None:
        """Write all to the disk; no file stays open or locked, also where that fails."""
        files = self._open_files()
        try:
            if self._syncing is not None:
                self._syncing.result()
            for path, file in files:
                with _naming(path):
                    file.flush()
            _sync(files)
        finally:
            self._files = {}
            with ExitStack() as closing:
                for path, file in files:
                    closing.enter_context(_naming(path))
                    closing.callback(file.close)

    def _file(self, *, failed: bool) -> BinaryIO:
        if failed not in self._files:
            self._files[failed] = _opened(self._paths[failed])
        return self._files[failed]

    def _open_files(self) -> list[tuple[Path, BinaryIO]]:
        return [(self._paths[failed], file) for failed, file in self._files.items()]

    def _begin_sync(self) -> None:
        """In a thread of its own: a disk may take seconds, and an event loop writes here."""
        if self._syncing is not None:
            if not self._syncing.done():
                return
            self._syncing.result()
        files = self._open_files()
        self._syncing = in_background(lambda: _sync(files), "mlxinfer-batch-sync")
        self._synced_s = time.monotonic()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let errors of a file that is open say which it is: the system does not."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _sync(files: Iterable[tuple[Path, BinaryIO]]) -> None:
    """Wait until what was flushed is on the disk."""
    for path, file in files:
        with _naming(path):
            os.fsync(file.fileno())


def _opened(path: Path) -> BinaryIO:
    """A file to be read, and written at its end, by this process alone."""
    if not path.parent.is_dir():
        raise InvalidRequestError(
            f"There is no folder {path.parent} for {path.name}; make it, or name another file.",
            param="output",
        )
    if path.exists() and not path.is_file():  # a pipe or a device has no end, and is read
        raise InvalidRequestError(f"{path} is no file; name one.", param="output")
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, or the process ends
    except BlockingIOError:
        file.close()
        raise InvalidRequestError(
            f"Another run writes answers to {path}; wait for its end, or name another file.",
            param="output",
        ) from None
    return file


def _repair(path: Path, file: BinaryIO) -> set[str]:
    """The ids of the whole lines of a file of answers; what follows the last one is cut off."""
    done: set[str] = set()
    end = 0
    file.seek(0)
    for line in file:
        custom_id = _id_of(line)
        if custom_id is None:
            break
        done.add(custom_id)
        end += len(line)
    else:
        return done
    if not end and (line.endswith(b"\n") or line[: len(START)] != START[: len(line)]):
        raise InvalidRequestError(
            f"{path} is there, and holds no answers of a batch; name another file.",
            param="output",
        )
    file.truncate(end)
    file.seek(end)
    return done


def _id_of(line: bytes) -> str | None:
    """The custom_id of a whole line."""
    if not line.endswith(b"\n"):
        return None
    try:
        return msgspec.json.decode(line, type=Done).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
