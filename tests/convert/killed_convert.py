"""A conversion that kills itself: python killed_convert.py SOURCE OUT NUMBER.

It does so before the call of that number that changes the disk.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from convert_cases import convert  # noqa: E402

from mlxinfer.convert import report  # noqa: E402
from mlxinfer.convert import write as writing  # noqa: E402

CALLS = ("pwrite", "fsync", "replace", "rename")
SHARD_BYTES = 20_000


def main() -> None:
    left, (source, out) = int(sys.argv[3]), map(Path, sys.argv[1:3])

    def counted(right: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return right(*given)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    writing.CHECKPOINT_BYTES = 2_000
    report.available = lambda: False
    convert(source, out, shard_bytes=SHARD_BYTES, run={"resume": True})


if __name__ == "__main__":
    main()
