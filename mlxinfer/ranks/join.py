"""Gathers ranks, joins MLX's `distributed`, once in the life of a process, and leaves it."""

import contextlib
import faulthandler
import json
import logging
import os
import socket
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version as installed

import mlx.core as mx

from ..errors import RanksFailedError
from ..layers.ranks import Summand
from .control import Connection, Hello, gather, listen
from .hosts import LocalRanks, RankPlace, require_free

FORM_S = 120.0  # that processes of this machine may take to come
WAIT_S = 3600.0  # ... and machines, which may be starting
JOIN_S = 60.0  # that MLX may take to join them: it tries a connection for half of it
log = logging.getLogger("mlxinfer.ranks")


def hello_of(place: RankPlace) -> Hello:
    version = f"mlxinfer {installed('mlxinfer')}, MLX {installed('mlx')}"
    return Hello(place.rank, place.size, version, os.getpid(), place.ring)


def gather_others(
    place: RankPlace, secret: bytes, local: LocalRanks | None, check: Callable[[], None]
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


def join_group(place: RankPlace) -> mx.distributed.Group:
    """The group of all ranks; waits for them.

    If another rank ends at this moment, MLX waits for it for ever, and lets no Python run
    meanwhile. So a timer without Python ends the process with status 1 after `JOIN_S` seconds.

    Raises:
        RuntimeError: MLX could not reach them, or has no such backend.
    """
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(JOIN_S, exit=True, file=nowhere)
        try:
            return _joined(place)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _joined(place: RankPlace) -> mx.distributed.Group:
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
    """Shut this process's sockets of a ring: operations that wait for them end with an error."""
    ports = {int(address.rpartition(":")[2]) for host in ring for address in host}
    for fd in range(3, 1024):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as link:
                if link.family == socket.AF_INET and link.type == socket.SOCK_STREAM:
                    ends = {link.getsockname()[1]}
                    with contextlib.suppress(OSError):  # one that listens has no peer
                        ends.add(link.getpeername()[1])
                    if ports.intersection(ends):
                        link.shutdown(socket.SHUT_RDWR)


class GroupLink:
    """See `layers.ranks.Link`.

    While `receive` waits, `send` and all else go on: each of the two has a stream of its own, and a
    ring has a socket to either side.

    Attributes:
        sent, received: bytes of this rank since the beginning, by what they are: kinds of sums (as
            a ring does one, 2 (n - 1) / n of the array in both directions), logits, and hidden
            states between stages.
    """

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group
        self._sending = mx.new_thread_local_stream(mx.cpu)
        self._receiving = mx.new_thread_local_stream(mx.cpu)
        self.rank = group.rank()
        self.size = group.size()
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()

    def sum(self, x: mx.array, of: Summand) -> mx.array:
        num_bytes = 2 * (self.size - 1) * x.nbytes // self.size
        self.sent[of] += num_bytes
        self.received[of] += num_bytes
        return mx.distributed.all_sum(x, group=self._group)

    def to_first(self, x: mx.array) -> mx.array:
        """On rank 0, x (T, n) of every rank side by side, (T, size * n). On others, their message.

        In a ring only neighbours can send to each other, so each rank passes on what it receives.
        The first half of the ranks sends downwards, the others upwards.

        Each operation is launched as it is built. A received array depends on nothing, so MLX
        would know no order between it and the sums that x was made of.
        """
        half = self.size // 2
        mx.async_eval(x)
        if self.rank == 0:
            parts = [x, self._received(1, x, half)]
            if half < self.size - 1:
                parts.append(self._received(self.size - 1, x, self.size - 1 - half))
            return mx.concatenate(parts, axis=-1)
        if self.rank <= half:
            to, behind, count = self.rank - 1, self.rank + 1, half - self.rank
        else:
            to, behind, count = (self.rank + 1) % self.size, self.rank - 1, self.rank - half - 1
        if count:
            others = self._received(behind, x, count)
            x = mx.concatenate([x, others] if self.rank <= half else [others, x], axis=-1)
        self.sent["logits"] += x.nbytes
        x = mx.distributed.send(x, to, group=self._group)
        mx.async_eval(x)
        return x

    def _received(self, rank: int, like: mx.array, count: int) -> mx.array:
        """(T, count * n) from a neighbour, of `count` ranks; like (T, n)."""
        shape = like.shape[0], count * like.shape[1]
        logits = mx.distributed.recv(shape, like.dtype, rank, group=self._group)
        self.received["logits"] += logits.nbytes
        mx.async_eval(logits)
        return logits

    def send(self, x: mx.array) -> mx.array:
        """x, which the next rank receives once it is evaluated."""
        self.sent["hidden"] += x.nbytes
        to = (self.rank + 1) % self.size
        return mx.distributed.send(x, to, group=self._group, stream=self._sending)

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        source = (self.rank - 1) % self.size
        hidden = mx.distributed.recv(
            shape, dtype, source, group=self._group, stream=self._receiving
        )
        self.received["hidden"] += hidden.nbytes
        return hidden
