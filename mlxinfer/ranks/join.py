"""Gathers ranks, joins MLX's `distributed`, once in the life of a process, and leaves it."""

import contextlib
import faulthandler
import json
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version as installed

import mlx.core as mx

from ..errors import RanksFailedError
from .control import Connection, Hello, gather, listen
from .hosts import Place, require_free
from .local import LocalRanks

FORM_S = 120.0  # that processes of this machine may take to come
WAIT_S = 3600.0  # ... and machines, which may be starting
JOIN_S = 60.0  # that MLX may take to join them: it tries a connection for half of it
log = logging.getLogger("mlxinfer.ranks")


def version() -> str:
    """Of what all ranks must have the same."""
    return f"mlxinfer {installed('mlxinfer')}, MLX {installed('mlx')}"


def hello_of(place: Place) -> Hello:
    """What this process says of itself to other ranks."""
    return Hello(place.rank, place.size, version(), os.getpid(), place.ring)


def gather_others(
    place: Place, secret: bytes, local: LocalRanks | None, check: Callable[[], None]
) -> dict[int, Connection]:
    """Rank 0's connections to the others, which it starts itself where `local` is given.

    Args:
        check: called several times a second; may raise.

    Raises:
        RanksFailedError: some did not come or do not belong here, or a port is taken.
    """

    def checked() -> None:
        check()
        ended = local.ended() if local is not None else None
        if ended is not None:
            raise RanksFailedError(f"{ended} while the group was being formed; its log says why.")

    try:
        require_free(place)
        with listen(place.control) as listener:
            if local is not None:
                local.start(place, secret)
            else:
                log.info("rank 0 waits for %d others at %s port %d", place.size - 1, *place.control)
            within_s = WAIT_S if local is None else FORM_S
            return gather(listener, secret, hello_of(place), within_s, checked)
    except BaseException:  # Ctrl-C too: they would wait for as long as a group may take
        if local is not None:
            local.end()
        raise


def join_group(place: Place) -> mx.distributed.Group:
    """The group of all ranks; waits for them.

    Where another rank ends just now, MLX waits for it for ever, and lets no Python run meanwhile.
    So the process ends, with status 1, after `JOIN_S` seconds: a timer without Python does that.

    Raises:
        RuntimeError: MLX could not reach them, or has no such backend.
    """
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(JOIN_S, exit=True, file=nowhere)
        try:
            return _joined(place)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _joined(place: Place) -> mx.distributed.Group:
    if not place.ring:
        return mx.distributed.init(strict=True, backend="mpi")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(place.ring, file)
        file.flush()
        given = {"MLX_RANK": str(place.rank), "MLX_HOSTFILE": file.name}
        before = {name: os.environ.get(name) for name in given}
        os.environ.update(given)
        try:
            return mx.distributed.init(strict=True, backend="ring")
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def shut_ring(ring: Sequence[Sequence[str]]) -> None:
    """Shut this process's sockets of a ring: what waits for them gets an error of MLX."""
    ports = {int(address.rpartition(":")[2]) for host in ring for address in host}
    for fd in range(3, 1024):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as found:
                if found.family == socket.AF_INET and found.type == socket.SOCK_STREAM:
                    ends = {found.getsockname()[1]}
                    with contextlib.suppress(OSError):  # one that listens has no peer
                        ends.add(found.getpeername()[1])
                    if ports.intersection(ends):
                        found.shutdown(socket.SHUT_RDWR)
