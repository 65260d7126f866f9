"""One rank that another process of this machine started. Its settings come over stdin."""

import json
import logging
import signal
import sys

from .follower import follow
from .hosts import RankPlace


def main() -> None:
    """Follow rank 0 until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: rank 0 decides
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    given = json.loads(sys.stdin.buffer.read())
    secret = bytes.fromhex(given.pop("secret"))
    follow(RankPlace(**{**given, "control": tuple(given["control"])}), secret, None)


if __name__ == "__main__":
    main()
