"""A GGUF file becomes a folder of the hub cache: codes are kept and nothing is compared.

The folder is there only when it is complete. Whatever ends an import leaves nothing that is taken
for a model, and the next import of the file clears away what a kill has left.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConversionError
from ..hub import Progress
from ..hub.imported import GGUFModel, ImportedFile, find_imported, imported_file
from .read import SourceModel, open_source
from .recipes import ConversionOptions, make_recipe
from .run import Conversion

_SHARE = 10  # of the bytes to show: reading a file is about this part of the work


def import_gguf(
    path: Path,
    progress: Progress = lambda *_: None,
    *,
    mmproj: Path | None = None,
    exact: bool = False,
) -> Path:
    """Return the folder of a GGUF file, made by the first call.

    Args:
        path: of the file; of a split one, any part.
        mmproj: the file of its tower, in place of that beside it.
        exact: a file of float32 stays float32, at twice the memory.
        progress: called with the bytes that are done and all of them.

    Raises:
        CheckpointError, ModelNotFoundError, UnsupportedModelError: the file cannot be read; nothing
            was written.
        ConversionError: the disk is full or read-only.
    """
    model = GGUFModel.at(path, mmproj, exact=exact)
    if (folder := find_imported(model)) is not None:
        return folder
    total = sum(part.stat().st_size for part in model.files)
    progress(0, total)
    source = open_source(path, mmproj=mmproj)
    if exact and source.exact_dtype is None:  # nothing would be rounded
        return import_gguf(path, progress, mmproj=mmproj)
    conversion = Conversion(source, Path("model"), _options(source, exact))
    file = imported_file(model, lambda done: progress(done // _SHARE, total))
    with _alone(file):
        if not file.folder.is_dir():
            _convert(conversion, file, path, lambda done: progress(done, total), total)
        file.record(model, source.notes)
    return file.folder


def _options(source: SourceModel, exact: bool) -> ConversionOptions:
    """Codes are kept. A float32 file runs in the dtype of its activations, at half the memory."""
    recipe = make_recipe("keep", dtype=None if exact else source.exact_dtype and source.dtype)
    return ConversionOptions(recipe=recipe, searched=False, check_tensors=False)


def _convert(
    conversion: Conversion, file: ImportedFile, path: Path, show: Callable[[int], None], total: int
) -> None:
    def progress(step: str, done: int, count: int) -> None:
        if step == "write":
            show(total // _SHARE + done * (total - total // _SHARE) // max(count, 1))

    file.folder.parent.mkdir(parents=True, exist_ok=True)
    conversion.out, conversion.progress = file.folder, progress
    try:
        conversion.run(restart=True)
    except BaseException as error:  # Ctrl-C too
        shutil.rmtree(file.folder.with_name(f"{file.folder.name}.partial"), ignore_errors=True)
        if isinstance(error, ConversionError):
            raise ConversionError(f"{path} could not be imported. {error}") from error
        raise


@contextmanager
def _alone(file: ImportedFile) -> Iterator[None]:
    """Hold the file's place in the cache; waits for another process that imports the file."""
    file.repo.folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(file.repo.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
        if not (file.repo.folder / "refs").exists():  # nothing was made
            shutil.rmtree(file.repo.folder, ignore_errors=True)
