"""Ranks on the command line: which process follows, and how a group starts again."""

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ..session.options import EngineOptions
from ._options import RANK_NAMES, wrong_usage

LISTENERS = "MLXINFER_LISTENERS"  # environment variable: sockets that a process left to itself
MAX_FILES = 1024  # numbers of open files below this one
ANSWER_S = 2.0  # that clients get to take their errors before the process starts again
log = logging.getLogger("mlxinfer.ranks")


def follow_if_asked(
    options: dict[str, Any], models: Sequence[str], find: Callable[[], Path]
) -> bool:
    """Return whether the model is spread over ranks; in a process that is not rank 0, follow it.

    A process is in one group only, so it starts itself again for the next. `find` gives the folder
    of the one model, opened with the options that rank 0 opens it with.
    """
    given = {name: options[name] for name in RANK_NAMES if options.get(name) is not None}
    with wrong_usage():
        spread = EngineOptions(**given).spread
        place = spread.elsewhere
    if spread.is_alone:
        return False
    if len(models) != 1:
        raise click.UsageError(
            f"Ranks share one model, and there are {', '.join(models)}; say one with -m."
        )
    if place is None or place.rank == 0:
        return True
    from ..ranks.follower import follow
    from ..ranks.hosts import shared_secret
    from ..ranks.join import WAIT_S

    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    secret = shared_secret()
    log.info("rank %d of %d waits for rank 0 at %s port %d", place.rank, place.size, *place.control)
    again = spread.hostfile is not None  # else a launcher started it, and ends the group

    def ended() -> None:
        if again:
            start_again()
        os._exit(0)

    follow(place, secret, lambda name: find(), wait_s=WAIT_S, ended=ended)
    raise SystemExit(0)


def start_again(listeners: Sequence[socket.socket] = ()) -> None:
    """Replace this process by itself; sockets stay open, and clients that connect meanwhile wait.

    MLX forms one group in the life of a process, and a collective operation that was cut off may
    never return: nothing less gets rid of it.
    """
    inherited = {0, 1, 2, *(listener.fileno() for listener in listeners)}
    for number in range(MAX_FILES):  # MLX's sockets too, or each start would leave some open
        with contextlib.suppress(OSError):
            os.set_inheritable(number, number in inherited)
    os.environ[LISTENERS] = ",".join(str(listener.fileno()) for listener in listeners)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def inherited_listeners() -> list[socket.socket]:
    """The sockets that this process left to itself when it started again; none at first."""
    left = os.environ.pop(LISTENERS, "")
    return [socket.socket(fileno=int(number)) for number in left.split(",") if number]


def restart_when_failed(refuse: Callable[[], None], listeners: Sequence[socket.socket]) -> None:
    """Let the process start again a moment after its group fails; `refuse` is called before."""
    from ..ranks.group import when_failed

    def again() -> None:
        time.sleep(ANSWER_S)  # errors are on their way to clients
        log.warning("the group of ranks starts again")
        start_again(listeners)

    def failed() -> None:
        refuse()
        threading.Thread(target=again, name="mlxinfer-again").start()

    when_failed(failed)
