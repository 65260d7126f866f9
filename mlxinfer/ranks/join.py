"""Joins the group of MLX's `distributed`, once in the life of a process; and leaves its ring."""

import contextlib
import json
import os
import socket
import stat
import tempfile
from collections.abc import Sequence
from importlib.metadata import version as installed

import mlx.core as mx

from .hosts import Place


def version() -> str:
    """Of what all ranks must have the same."""
    return f"mlxinfer {installed('mlxinfer')}, MLX {installed('mlx')}"


def join_group(place: Place) -> mx.distributed.Group:
    """The group of all ranks; waits for them.

    Raises:
        RuntimeError: MLX could not reach them, or has no such backend.
    """
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
