"""The places of ranks: from a host file, from a launcher's environment, or on this machine.

Links are private by rule. Ranks are named by addresses, each of one interface, and bound to them.
Names and public addresses are refused.
"""

import ipaddress
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..core import MAX_COUNT
from ..errors import InvalidRequestError, RanksFailedError, check_int, check_switch, wrong_value

RING_PORT = 32323  # of the first rank; as mlx.launch has it
CONTROL_PORT = 32300
SECRET = "MLXINFER_RANKS_SECRET"  # environment variable
CONTROL = "MLXINFER_RANKS_CONTROL"  # the same: address and port of rank 0's control socket
MIN_SECRET = 16  # characters


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank among others."""

    rank: int
    size: int
    ring: list[list[str]]  # addresses with ports of every rank, as MLX's ring takes them
    control: tuple[str, int]  # where rank 0 waits for the others


def _wrong(problem: str) -> InvalidRequestError:
    return InvalidRequestError(problem, param="hostfile")


def local_place(size: int) -> RankPlace:
    """Rank 0 of `size` ranks on this machine, at free ports."""
    ports = free_ports(size + 1)
    ring = [[f"127.0.0.1:{port}"] for port in ports[1:]]
    return RankPlace(0, size, ring, ("127.0.0.1", ports[0]))


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing uses now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def read_hosts(path: Path, rank: int | None) -> RankPlace:
    """One rank of a host file.

    Args:
        path: of JSON: a list with a list of addresses with ports for each rank, as MLX's ring
            takes it; or a list of objects with `ips`, as mlx.launch does.
        rank: which; None: the one with this machine's address.

    Raises:
        InvalidRequestError: no such file, a name or a public address, or no address of this
            machine.
    """
    try:
        hosts = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(f"{path} cannot be read: {error}.") from None
    if not isinstance(hosts, list) or len(hosts) < 2:
        raise _wrong(f"{path} must be a list of two hosts or more.")
    ring = [_addresses(host, i, str(path)) for i, host in enumerate(hosts)]
    every = [address for addresses in ring for address in addresses]
    if (repeated := next((one for one in every if every.count(one) > 1), None)) is not None:
        raise _wrong(f"{path} names {repeated} twice.")
    if rank is None:
        here = [i for i, addresses in enumerate(ring) if _is_here(addresses[0])]
        if len(here) != 1:
            raise _wrong(
                f"{path} has {len(here)} hosts with an address of this machine; give --rank."
            )
        (rank,) = here
    if not 0 <= rank < len(ring):
        raise InvalidRequestError.of("rank", f"is {rank}; {path} has {len(ring)} hosts, from 0.")
    return RankPlace(rank, len(ring), ring, _control(ring[0][0].rpartition(":")[0]))


def launched(environ: Mapping[str, str] = os.environ) -> RankPlace | None:
    """The rank that mlx.launch gave this process; None: it did not start it.

    Raises:
        InvalidRequestError: see `read_hosts`.
    """
    if "MLX_RANK" in environ and environ.get("MLX_HOSTFILE"):
        return read_hosts(Path(environ["MLX_HOSTFILE"]), _number(environ, "MLX_RANK"))
    return None


def shared_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """The secret that all ranks have in their environment.

    Raises:
        InvalidRequestError: there is none, or a short one.
    """
    stated = environ.get(SECRET, "")
    if len(stated) < MIN_SECRET:
        raise InvalidRequestError(
            f"Ranks on several machines, or of another launcher, need a secret that all of them "
            f"have: set {SECRET} to the same {MIN_SECRET} characters or more on each, say of "
            "`openssl rand -hex 32`.",
            param="ranks",
        )
    return stated.encode()


def require_private(address: str, where: str) -> None:
    """Raise InvalidRequestError unless `address` is that of a private network or this machine."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        raise _wrong(
            f"{where} names {address!r}; expected an IPv4 address of one interface, so that it is "
            "known which link is used."
        ) from None
    if ip.version != 4 or ip.is_global or ip.is_unspecified or ip.is_multicast:
        raise _wrong(
            f"{where} names {address}, which is not an IPv4 address of a private network. Ranks "
            "talk without encryption: use the addresses of a link that only they share."
        )


def _addresses(host: Any, rank: int, where: str) -> list[str]:
    listed = host.get("ips") if isinstance(host, dict) else host
    if not isinstance(listed, list) or not listed or not all(isinstance(a, str) for a in listed):
        raise _wrong(f"Host {rank} of {where} has no list of addresses.")
    addresses = []
    for place, stated in enumerate(listed):
        address, port = _address(stated, where, RING_PORT + 8 * rank + place)
        addresses.append(f"{address}:{port}")
    return addresses


def _control(default_host: str) -> tuple[str, int]:
    stated = os.environ.get(CONTROL)
    if stated is None:
        return default_host, CONTROL_PORT
    return _address(stated, CONTROL, CONTROL_PORT)


def _address(stated: str, where: str, default_port: int) -> tuple[str, int]:
    """A private address and its port, of `address:port` or an address alone."""
    address, colon, port = stated.partition(":")
    if ":" in port:  # of IPv6
        address, colon, port = stated, "", ""
    require_private(address, where)
    if colon and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise _wrong(f"{where} names {stated}; expected a port from 1 to 65,535 behind the colon.")
    return address, int(port) if colon else default_port


def _number(environ: Mapping[str, str], name: str) -> int:
    stated = environ.get(name, "")
    if not (stated.isascii() and stated.isdigit()):
        raise wrong_value(name, stated, "a number", "rank")
    return int(stated)


def require_free(place: RankPlace) -> None:
    """Raise RanksFailedError unless this rank can bind its own addresses of the ring.

    MLX would say so too, but other ranks may wait for this one in C++ by then.
    """
    for stated in place.ring[place.rank]:
        address, _, port = stated.partition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, int(port)))
                probe.listen()
            except OSError as error:
                raise RanksFailedError(
                    f"Rank {place.rank} cannot use {address} port {port} for the ring: "
                    f"{error.strerror}. Expected a free port of an address of this machine."
                ) from None


def _is_here(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address.partition(":")[0], 0))
        except OSError:
            return False
        return True


MAX_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """Options of a model that is spread over ranks. Checked when built.

    Raises:
        InvalidRequestError: a value out of its range.
    """

    ranks: int = 1
    hostfile: Path | None = None  # where they are; None: on this machine, or as a launcher says
    rank: int | None = None  # in the host file; None: the one with this machine's address
    rank_deadline: float = 60.0  # seconds that a step may take
    pipeline: bool = False  # ranks have some of the layers each, not a part of every layer

    def __post_init__(self) -> None:
        check_int("ranks", self.ranks, low=1, high=MAX_COUNT)
        if self.ranks > MAX_RANKS:
            raise wrong_value("ranks", self.ranks, f"{MAX_RANKS} at most")
        if self.rank is not None and self.hostfile is None:
            raise InvalidRequestError("rank goes with hostfile.", param="rank")
        check_switch("pipeline", self.pipeline)
        if self.pipeline and self.is_alone:
            raise InvalidRequestError(
                "pipeline divides the layers among ranks, but there is only one; give ranks or "
                "hostfile.",
                param="pipeline",
            )
        if not self.rank_deadline > 0:
            raise wrong_value("rank_deadline", self.rank_deadline, "seconds above 0")

    @property
    def is_alone(self) -> bool:
        return self.ranks == 1 and self.hostfile is None and launched() is None

    @property
    def elsewhere(self) -> RankPlace | None:
        """This process among ranks that others start too; None: it is alone, or starts them.

        Raises:
            InvalidRequestError: see `read_hosts`; or there are not as many as were asked for.
        """
        if self.hostfile is not None:
            place = read_hosts(self.hostfile, self.rank)
        elif (launched_place := launched()) is not None:
            place = launched_place
        else:
            return None
        if self.ranks not in (1, place.size):
            raise InvalidRequestError(
                f"ranks is {self.ranks}, and there are {place.size} hosts or processes; leave "
                "ranks out.",
                param="ranks",
            )
        return place


END_S = 3.0


class LocalRanks:
    """Processes of all ranks but 0. They end when their connection to rank 0 does."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, place: RankPlace, secret: bytes) -> None:
        """Start them. Their settings go over standard input, where no one else sees them."""
        for rank in range(1, place.size):
            process = subprocess.Popen(
                [sys.executable, "-m", "mlxinfer.ranks"], stdin=subprocess.PIPE
            )
            self._processes[rank] = process
            given = {**asdict(place), "rank": rank, "secret": secret.hex()}
            assert process.stdin is not None
            process.stdin.write(json.dumps(given).encode())
            process.stdin.close()

    def ended(self) -> str | None:
        """Describe a process that has ended; None: all run."""
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
                return f"rank {rank} (process {process.pid}) {how}"
        return None

    def end(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait(END_S)
