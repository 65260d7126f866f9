"""Small files that are there whole or not at all."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file in one step, also where the machine crashes. Only its user can read it.

    Raises:
        OSError: it cannot be written, such as on a full disk; what was there stays.
    """
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0o600
    try:
        with open(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:  # Ctrl-C too: no half of a file stays
        os.unlink(name)
        raise
