"""Which processes may connect, and where ranks may be."""

import contextlib
import json
import socket
import threading
import time

import pytest

from mlxinfer.errors import InvalidRequestError, RanksFailedError
from mlxinfer.ranks import control
from mlxinfer.ranks.control import Hello, accept, connect, listen
from mlxinfer.ranks.hosts import free_ports, launched, read_hosts, require_private, shared_secret
from mlxinfer.ranks.options import RankOptions

SECRET = b"0123456789abcdef"


def meet(theirs: bytes, hello: Hello) -> tuple[object, object]:
    """What rank 0 and another rank get."""
    address = ("127.0.0.1", free_ports(1)[0])
    results: list[object] = []

    def come() -> None:
        try:
            results.append(connect(address, theirs, hello, time.monotonic() + 5))
        except RanksFailedError as error:
            results.append(error)

    with listen(address) as listener:
        thread = threading.Thread(target=come)
        thread.start()
        try:
            found: object = accept(listener, SECRET, Hello(0, 2, "v", 1), time.monotonic() + 5)
        except RanksFailedError as error:
            found = error
        thread.join()
    return found, results[0]


def test_who_knows_the_secret_is_let_in_and_frames_arrive():
    found, other = meet(SECRET, Hello(1, 2, "v", 7))
    connection, hello = found
    assert hello == Hello(1, 2, "v", 7)
    other.send(b"a frame" * 1000)
    assert connection.receive() == b"a frame" * 1000
    connection.close()
    with pytest.raises((EOFError, OSError)):
        other.receive()
    other.close()


def test_a_wrong_secret_is_refused_on_both_sides():
    found, other = meet(b"another secret..", Hello(1, 2, "v", 7))
    assert found is None
    assert isinstance(other, RanksFailedError)


def test_another_version_is_refused_by_name():
    found, other = meet(SECRET, Hello(1, 2, "w", 7))
    assert isinstance(found, RanksFailedError)
    assert "runs w" in str(found)
    if not isinstance(other, RanksFailedError):
        other.close()


def test_noise_is_refused():
    address = ("127.0.0.1", free_ports(1)[0])
    with listen(address) as listener, socket.create_connection(address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 64)
        stranger.shutdown(socket.SHUT_WR)
        found = accept(listener, SECRET, Hello(0, 2, "v", 1), time.monotonic() + 5)
    assert found is None


def test_a_stranger_that_drips_has_as_long_as_others(monkeypatch):
    """The deadline is one of the whole handshake, not of each byte."""
    monkeypatch.setattr(control, "HANDSHAKE_S", 0.5)
    address, ends = ("127.0.0.1", free_ports(1)[0]), threading.Event()

    def drip(stranger: socket.socket) -> None:
        while not ends.wait(0.1):
            with contextlib.suppress(OSError):
                stranger.sendall(b"\x00")

    with listen(address) as listener, socket.create_connection(address) as stranger:
        stranger.sendall(b"\xff\x0f\x00\x00")  # a frame of 4,095 bytes follows
        dripping = threading.Thread(target=drip, args=(stranger,))
        dripping.start()
        began_s = time.monotonic()
        found = accept(listener, SECRET, Hello(0, 2, "v", 1), began_s + 5)
        ends.set()
        dripping.join()
    assert found is None
    assert time.monotonic() - began_s < 3


def test_a_rank_behind_a_silent_stranger_tries_again(monkeypatch):
    """Rank 0 hears one connection at a time: a rank that waits for long is not refused."""
    monkeypatch.setattr(control, "HANDSHAKE_S", 0.4)
    address, results = ("127.0.0.1", free_ports(1)[0]), []
    deadline_s = time.monotonic() + 10

    def come() -> None:
        try:
            results.append(connect(address, SECRET, Hello(1, 2, "v", 7), deadline_s))
        except RanksFailedError as error:
            results.append(error)

    with listen(address) as listener, socket.create_connection(address):
        thread = threading.Thread(target=come)
        thread.start()
        time.sleep(0.2)
        found = None
        while found is None and time.monotonic() < deadline_s and not results:
            found = accept(listener, SECRET, Hello(0, 2, "v", 1), time.monotonic() + 0.2)
        thread.join()
    assert found is not None, results
    for connection in (found[0], results[0]):
        connection.close()


def test_a_stranger_cannot_have_large_frames_kept(monkeypatch):
    """The length of a frame is not believed before the secret is proven."""
    address = ("127.0.0.1", free_ports(1)[0])
    with listen(address) as listener, socket.create_connection(address) as stranger:
        stranger.sendall(b"\x00\x00\x00\x01" + b"x" * 64)  # 16 MiB
        began_s = time.monotonic()
        assert accept(listener, SECRET, Hello(0, 2, "v", 1), began_s + 5) is None
    assert time.monotonic() - began_s < 3, "refused at once: nothing waits for the rest"


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "0.0.0.0", "example.com", "2001:4860:4860::8888", "224.0.0.1", ""]
)
def test_public_addresses_and_names_are_refused(address):
    with pytest.raises(InvalidRequestError, match=r"hosts\.json names"):
        require_private(address, "hosts.json")


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "192.168.0.9", "169.254.1.1"])
def test_private_addresses_are_taken(address):
    require_private(address, "hosts.json")


@pytest.mark.parametrize("form", ["ring", "launch"])
def test_host_files_of_both_forms(form, tmp_path):
    ips = ["10.0.0.1", "10.0.0.2"]
    hosts = {
        "ring": [[f"{ip}:5000"] for ip in ips],
        "launch": [{"ssh": "x", "ips": [ip]} for ip in ips],
    }
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(hosts[form]))
    place = read_hosts(path, 1)
    assert (place.rank, place.size, place.backend) == (1, 2, "ring")
    assert place.control[0] == "10.0.0.1"
    assert [a.split(":")[0] for (a,) in place.ring] == ips
    with pytest.raises(InvalidRequestError, match="say --rank"):
        read_hosts(path, None)
    with pytest.raises(InvalidRequestError, match="2 hosts"):
        read_hosts(path, 2)


def test_launchers_say_which_rank_it_is(tmp_path):
    assert launched({}) is None
    place = launched({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
    assert place is not None
    assert (place.rank, place.size, place.backend) == (1, 4, "mpi")


def test_options_are_checked():
    for wrong in (
        {"ranks": 0},
        {"ranks": 65},
        {"rank": 1},
        {"rank_deadline": 0.0},
        {"pipeline": True},
    ):
        with pytest.raises(InvalidRequestError):
            RankOptions(**wrong)
    with pytest.raises(InvalidRequestError, match="MLXINFER_RANKS_SECRET"):
        shared_secret({"MLXINFER_RANKS_SECRET": "short"})
