"""A conversion whose writes take their time, to be killed: python slow_convert.py SOURCE OUT."""

import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from convert_cases import convert  # noqa: E402
from mlxinfer.convert import card, shards  # noqa: E402
from mlxinfer.convert.files import ShardFile  # noqa: E402

DELAY_S = 0.004
SHARD_BYTES = 20_000


def main() -> None:
    right = ShardFile.write

    def slow(self, name, offset, data):
        time.sleep(DELAY_S)
        return right(self, name, offset, data)

    ShardFile.write = slow
    shards.CHECKPOINT_BYTES = 2_000
    card.available = lambda: False
    source, out = map(Path, sys.argv[1:])
    print("started", flush=True)
    convert(source, out, shard_bytes=SHARD_BYTES, run={"resume": True})


if __name__ == "__main__":
    main()
