"""The folder in which a conversion works, so that a kill at any moment loses little.

    OUT.partial/lock           held while a process works here
    OUT.partial/journal.jsonl  what is done: tensors and files that are on the disk
    OUT.partial/model/         renamed to OUT at the end

OUT exists only when it is complete. Nothing else in OUT.partial is ever deleted.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConversionError, InvalidRequestError, shown
from ..files import sync_folder
from ..memory import human_bytes

SPARE_BYTES = 64 << 20  # left free on the disk
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_LOGITS = [(f"short.{kind}", f"long.{kind}") for kind in ("logits", "nearest", "output")]
_MADE = ("model", *(name for names in _LOGITS for name in names))
_OURS = (*_MADE, *(f"{name}.partial" for name in _MADE), "journal.jsonl", "lock")  # lock goes last
_MARKS = tuple(
    name for name in _OURS if not name.startswith("model")
)  # "model" alone proves nothing
_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".onnx")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Workplace:
    """The folders of one conversion."""

    out: Path

    @property
    def root(self) -> Path:
        """Beside the output, so that moving it is one rename."""
        if not self.out.name:
            raise ConversionError(f"{str(self.out)!r} has no name; give the name of a new folder.")
        return self.out.with_name(self.out.name + ".partial")

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def journal(self) -> Path:
        return self.root / "journal.jsonl"

    @property
    def references(self) -> tuple[Path, Path]:
        short, long = _LOGITS[0]
        return self.root / short, self.root / long

    @property
    def nearest(self) -> tuple[Path, Path]:
        short, long = _LOGITS[1]
        return self.root / short, self.root / long

    @property
    def outputs(self) -> tuple[Path, Path]:
        short, long = _LOGITS[2]
        return self.root / short, self.root / long

    def publish(self) -> None:
        if self.out.exists():
            raise ConversionError(f"{self.out} was made by another program during the conversion.")
        sync_folder(self.model)
        os.rename(self.model, self.out)
        sync_folder(self.out.parent)
        self.tidy_up()

    def tidy_up(self) -> None:
        """Delete the files of a conversion; the folder stays if it holds others."""
        for name in _OURS:
            _delete(self.root / name)
        with suppress(OSError):  # not empty, or another process has made its lock
            self.root.rmdir()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_place(place: Workplace, source: Path | None) -> None:
    """Check that `place` may be used: its contents are deleted in the end."""
    if source is not None:
        _check_apart(place, source)
    kind = "link" if place.root.is_symlink() else "file"
    if place.root.is_symlink() or (place.root.exists() and not place.root.is_dir()):
        raise ConversionError(
            f"This conversion needs the folder {place.root}, but that is a {kind}. Move it or "
            "choose another name for the output; nothing was changed."
        )
    names = [path.name for path in place.root.iterdir()] if place.root.is_dir() else []
    if names and not any(name in _MARKS for name in names):
        raise ConversionError(
            f"This conversion needs the folder {place.root}, but that holds other files, such as "
            f"{shown(min(names))}. Move it or choose another name for the output; nothing was "
            "changed."
        )


def _check_apart(place: Workplace, source: Path) -> None:
    root, theirs = place.root.resolve(), source.resolve()
    if root.is_relative_to(theirs) or theirs.is_relative_to(root):
        where = "is" if root == theirs else "is inside" if root in theirs.parents else "holds"
        raise ConversionError(
            f"The source {source} {where} {place.root}. This conversion would work in that folder "
            "and delete it; choose another name for the output. Nothing was changed."
        )


def check_target(place: Workplace, source: Path | None, needed_bytes: int) -> None:
    """Check that the output and the working folder can be written."""
    out = place.out
    if source is not None and out.resolve().is_relative_to(source.resolve()):
        raise ConversionError(
            f"{out} is {'' if out.resolve() == source.resolve() else 'inside '}the source; choose "
            "a folder elsewhere."
        )
    check_place(place, source)
    check_output(out)
    free = shutil.disk_usage(out.absolute().parent).free
    if needed_bytes + SPARE_BYTES > free:
        raise ConversionError(
            f"{out} needs {human_bytes(needed_bytes)} more, and {human_bytes(SPARE_BYTES)} must "
            f"stay free, but the disk has {human_bytes(free)} free. Make room or choose another "
            "disk."
        )


def check_output(out: Path) -> None:
    """Raise if no source could be converted to `out`: before one is opened, or downloaded."""
    check_name(out)
    if out.exists() or out.is_symlink():
        raise ConversionError(
            f"{out} exists already. Delete it or choose another name; nothing was changed."
        )
    parent = out.absolute().parent
    if not parent.is_dir():
        raise ConversionError(f"There is no folder {parent} to put {out.name} into.")
    if not os.access(parent, os.W_OK):
        raise ConversionError(f"{parent} cannot be written.")


def check_name(out: Path) -> None:
    """Raise InvalidRequestError for an output that is named as one file of weights is.

    Such a folder would be taken for that file later.
    """
    if out.suffix.lower() in _FILES:
        raise InvalidRequestError(
            f"{out} names a file, and a conversion writes a folder of safetensors (GGUF files are "
            f"read, not written): choose a name without {out.suffix}, such as "
            f"{out.with_suffix('')}.",
            param="out",
        )


@contextmanager
def working(place: Workplace, *, resume: bool, restart: bool) -> Iterator[None]:
    """Hold the workplace, made if need be."""
    with disk_failures(place):
        interrupted = place.journal.exists()
        place.root.mkdir(exist_ok=True)
        lock = os.open(place.root / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(lock, place)
        except ConversionError:
            os.close(lock)
            raise
        try:
            if interrupted and not (resume or restart):
                raise ConversionError(
                    f"{place.root} holds an unfinished conversion: --resume continues it, "
                    "--restart begins again."
                )
            if restart or not interrupted:
                _clear(place)
            place.model.mkdir(exist_ok=True)
            yield
        finally:
            os.close(lock)
            if not place.journal.exists():  # nothing was begun
                place.tidy_up()


@contextmanager
def disk_failures(place: Workplace) -> Iterator[None]:
    """Turn errors of the disk into a ConversionError; other OSErrors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise ConversionError(
                f"The disk is full; what is written is kept in {place.root}. Make room, then run "
                "the same command with --resume."
            ) from error
        if error.errno in _READ_ONLY:
            raise ConversionError(
                f"{place.out.absolute().parent} cannot be written ({error.strerror})."
            ) from error
        raise


def _lock(lock: int, place: Workplace) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConversionError(
            f"Another process is converting to {place.out}; wait for it, or choose another name."
        ) from None


def _clear(place: Workplace) -> None:
    """Delete what an earlier conversion left, except the lock that this process holds."""
    for name in _OURS:
        if name != "lock":
            _delete(place.root / name)
