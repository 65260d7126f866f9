"""Which processes may connect, and where ranks may be."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mlxinfer.errors import InvalidRequestError, RanksFailedError
from mlxinfer.ranks import control
from mlxinfer.ranks.control import Connection, Hello, connect, gather, listen
from mlxinfer.ranks.hosts import (
    RankOptions,
    RankPlace,
    free_ports,
    launched,
    read_hosts,
    require_free,
    require_private,
    shared_secret,
)
from tests.waiting import wait_until

SECRET = b"0123456789abcdef"

OWN = Hello(0, 2, "v", 1)


@contextlib.contextmanager
def gathering(within_s: float = 60.0) -> Iterator[tuple[tuple[str, int], list[object]]]:
    """Rank 0 of two on a thread: where it waits, and what it gets in the end."""
    address, results = ("127.0.0.1", free_ports(1)[0]), list[object]()

    def run() -> None:
        with listen(address) as listener:
            ready.set()
            try:
                results.append(gather(listener, SECRET, OWN, within_s, lambda: None))
            except RanksFailedError as error:
                results.append(error)

    ready = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(60)
    try:
        yield address, results
    finally:
        thread.join()
    if isinstance(results[0], dict):
        for connection in results[0].values():
            connection.close()


def come(address: tuple[str, int], hello: Hello, secret: bytes = SECRET) -> Connection:
    return connect(address, secret, hello, time.monotonic() + 60)


def tcp_pair() -> tuple[Connection, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        return Connection(listener.accept()[0]), theirs


def test_a_rank_that_knows_the_secret_is_let_in_and_frames_arrive():
    with gathering() as (address, gathered):
        other = come(address, Hello(1, 2, "v", 7))
        other.send(b"a frame" * 1000)
        wait_until(lambda: gathered)
        assert gathered[0][1].receive() == b"a frame" * 1000
    with pytest.raises((EOFError, OSError)):
        other.receive()
    other.close()


def test_a_wrong_secret_is_refused_on_both_sides(caplog):
    refused = pytest.raises(RanksFailedError, match="another secret")
    with gathering(within_s=1.0) as (address, gathered), refused:
        come(address, Hello(1, 2, "v", 7), b"another secret..")
    assert "Ranks [1] did not come" in str(gathered[0])
    assert "127.0.0.1 did not prove itself: it has another secret" in caplog.text


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello(1, 2, "w", 7), "Rank 1 of 2 runs w, and rank 0 v"),
        (Hello(1, 3, "v", 7), "Rank 1 of 3 came; expected one of ranks 1 to 1 of 2"),
        (Hello(0, 2, "v", 7), "Rank 0 of 2 came; expected one of ranks 1 to 1 of 2"),
        (Hello(1, 2, "v", 7, [["10.0.0.1:5"]]), "another host file"),
    ],
)
def test_a_rank_that_does_not_belong_here_is_refused_by_name_on_both_sides(hello, reason):
    refused = pytest.raises(RanksFailedError, match=f"did not take this rank: .*{reason}")
    with gathering() as (address, gathered), refused:
        come(address, hello)
    assert isinstance(gathered[0], RanksFailedError)
    assert reason in str(gathered[0])


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 64,
        b"\x00\x00\x00\x01" + b"x" * 64,  # a frame of 16 MiB, which is not believed
        b"\x01\x00\x00\x00\xc0",
        b"",
    ],
    ids=["http", "large", "not a proof", "nothing"],
)
def test_noise_is_refused_at_once_and_the_rank_gets_in(noise):
    with gathering() as (address, gathered):
        with socket.create_connection(address) as stranger:
            stranger.settimeout(60)
            began_s = time.monotonic()
            with contextlib.suppress(OSError):  # it may be refused before all of it is sent
                stranger.sendall(noise)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):  # its nonce, then the end
                    pass
            assert time.monotonic() - began_s < control.HANDSHAKE_S
        come(address, Hello(1, 2, "v", 7)).close()
    assert isinstance(gathered[0], dict)


def test_strangers_that_drip_or_say_nothing_hold_up_no_rank(monkeypatch):
    """However many they are: the oldest give way. Each has as long as others, dripping or not."""
    monkeypatch.setattr(control, "MAX_STRANGERS", 4)
    monkeypatch.setattr(control, "HANDSHAKE_S", 20.0)
    with contextlib.ExitStack() as strangers, gathering() as (address, gathered):
        for i in range(8):
            stranger = strangers.enter_context(socket.create_connection(address))
            if i % 2:
                stranger.sendall(b"\xff\x0f\x00\x00\x00")  # of a frame of 4,095 bytes
        began_s = time.monotonic()
        come(address, Hello(1, 2, "v", 7)).close()
        assert time.monotonic() - began_s < 15
    assert isinstance(gathered[0], dict)


def test_a_stranger_that_drips_has_as_long_as_others(monkeypatch):
    """The deadline is one of the whole handshake, not of each byte."""
    monkeypatch.setattr(control, "HANDSHAKE_S", 0.5)
    connection, theirs = tcp_pair()
    ends = threading.Event()

    def drip() -> None:
        while not ends.wait(0.1):
            with contextlib.suppress(OSError):
                theirs.sendall(b"\x00")

    theirs.sendall(b"\xff\x0f\x00\x00")  # a frame of 4,095 bytes follows
    dripping = threading.Thread(target=drip)
    dripping.start()
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        connection.receive()
    assert time.monotonic() - began_s < 20
    ends.set()
    dripping.join()
    connection.close()
    theirs.close()


def test_a_side_that_says_nothing_is_noticed():
    connection, theirs = tcp_pair()
    connection.trust()
    with pytest.raises(EOFError, match="said nothing for 1 seconds"):
        connection.receive_within(1.0)
    connection.close()
    theirs.close()


def test_a_port_of_the_ring_that_is_taken_is_known_before_others_wait(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = RankPlace(1, 2, [["127.0.0.1:1"], [f"127.0.0.1:{port}"]], ("127.0.0.1", 1))
        with pytest.raises(RanksFailedError, match=f"Rank 1 cannot use 127.0.0.1 port {port}"):
            require_free(place)
    require_free(place)
    elsewhere = replace(place, ring=[["127.0.0.1:1"], ["10.255.255.254:5"]])
    with pytest.raises(RanksFailedError, match="an address of this machine"):
        require_free(elsewhere)


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
    assert (place.rank, place.size) == (1, 2)
    assert place.control[0] == "10.0.0.1"
    assert [a.split(":")[0] for (a,) in place.ring] == ips
    with pytest.raises(InvalidRequestError, match="give --rank"):
        read_hosts(path, None)
    with pytest.raises(InvalidRequestError, match="2 hosts"):
        read_hosts(path, 2)


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        ('[["mac.local:5"], ["10.0.0.2"]]', "'mac.local'"),
        ('[["::1"], ["10.0.0.2"]]', "::1, which is not an IPv4"),
        ('[["8.8.8.8:5"], ["10.0.0.2"]]', "8.8.8.8, which is not"),
        ('[["10.0.0.1:5"], ["10.0.0.1:5"]]', "10.0.0.1:5 twice"),
        ('[["10.0.0.1:x"], ["10.0.0.2"]]', "expected a port"),
        ('[["10.0.0.1:0"], ["10.0.0.2"]]', "expected a port"),
        ('[["10.0.0.1:65536"], ["10.0.0.2"]]', "expected a port"),
        ('[["10.0.0.1:"], ["10.0.0.2"]]', "expected a port"),
        ('[["10.0.0.1"]]', "two hosts or more"),
        ('[[["10.0.0.1"]], [["10.0.0.2"]]]', "no list of addresses"),
        ("[[], []]", "no list of addresses"),
        ('{"a": 1}', "two hosts or more"),
        ("", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_host_file_that_cannot_be_meant_is_refused(hosts, problem, tmp_path):
    path = tmp_path / "hosts.json"
    path.write_text(hosts)
    with pytest.raises(InvalidRequestError, match=problem):
        read_hosts(path, 0)


@pytest.mark.parametrize(
    "stated", ["127.0.0.1:abc", "127.0.0.1:99999", "127.0.0.1:-5", "8.8.8.8", "mac.local:5"]
)
def test_a_control_address_that_cannot_be_meant_is_refused(stated, tmp_path, monkeypatch):
    path = tmp_path / "hosts.json"
    path.write_text('[["10.0.0.1"], ["10.0.0.2"]]')
    monkeypatch.setenv("MLXINFER_RANKS_CONTROL", stated)
    with pytest.raises(InvalidRequestError, match="MLXINFER_RANKS_CONTROL names"):
        read_hosts(path, 0)


def test_an_environment_of_no_launcher_is_refused():
    with pytest.raises(InvalidRequestError, match="expected a number"):
        launched({"MLX_RANK": "x", "MLX_HOSTFILE": "hosts.json"})


def test_launchers_say_which_rank_it_is(tmp_path):
    assert launched({}) is None


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
