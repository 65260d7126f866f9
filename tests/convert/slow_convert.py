"""A conversion to be killed: python slow_convert.py SOURCE OUT [WRITES].

It kills itself before the write of that number; without a number its writes take their time.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from convert_cases import convert  # noqa: E402

from mlxinfer.convert import report  # noqa: E402
from mlxinfer.convert import write as writing  # noqa: E402
from mlxinfer.convert.files import ShardFile  # noqa: E402

DELAY_S = 0.004
SHARD_BYTES = 20_000


def main() -> None:
    right, calls = ShardFile.write, 0
    source, out = map(Path, sys.argv[1:3])
    last = int(sys.argv[3]) if len(sys.argv) > 3 else None

    def write(self, name, offset, data):
        nonlocal calls
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
        if last is None:
            time.sleep(DELAY_S)
        return right(self, name, offset, data)

    ShardFile.write = write
    writing.CHECKPOINT_BYTES = 2_000
    report.available = lambda: False
    print("started", flush=True)
    convert(source, out, shard_bytes=SHARD_BYTES, run={"resume": True})


if __name__ == "__main__":
    main()
