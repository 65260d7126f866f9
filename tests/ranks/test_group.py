"""Rank 0's side of a group, with sockets in place of the other ranks."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from ranks.test_wire import PAGE, step_of

from mlxinfer.cache.pages import PageTable
from mlxinfer.config import KVOptions
from mlxinfer.errors import CheckpointError, InvalidRequestError, RanksFailedError
from mlxinfer.memory import default_kv_bytes
from mlxinfer.ranks import control, messages
from mlxinfer.ranks import follower as follower_module
from mlxinfer.ranks import group as group_module
from mlxinfer.ranks.control import Connection, connect
from mlxinfer.ranks.group import RankGroup
from mlxinfer.ranks.hosts import LocalRanks, RankPlace, local_place
from mlxinfer.ranks.join import hello_of, shut_ring
from mlxinfer.ranks.messages import Checked, Loaded
from mlxinfer.ranks.wire import StepWriter, checksum
from tests.waiting import wait_until

Group = tuple[RankGroup, dict[int, Connection]]


class NoLink:
    """In place of MLX's group."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 3


def proven(sock: socket.socket) -> Connection:
    """A connection as it is behind the handshake; this one has no delays to switch off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "IPPROTO_TCP", socket.SOL_SOCKET)
        patch.setattr(socket, "TCP_NODELAY", socket.SO_KEEPALIVE)
        connection = Connection(sock)
    connection.trust()
    return connection


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """A group of three, and the ends of the other two."""
    pairs = {rank: socket.socketpair(socket.AF_UNIX) for rank in (1, 2)}
    ours, theirs = ({rank: proven(pair[end]) for rank, pair in pairs.items()} for end in (0, 1))
    monkeypatch.setattr(group_module, "gather_others", lambda *_: ours)
    monkeypatch.setattr(group_module, "join_group", lambda place: NoLink())
    made = RankGroup(RankPlace(0, 3, [], ("127.0.0.1", 1)), b"")
    for connection in theirs.values():  # to form a group, and the watcher's first ping
        connection.receive()
        connection.receive()
    yield made, theirs
    made.close()
    made._watcher.join()
    for connection in theirs.values():
        connection.close()


def test_the_checksum_of_every_rank_is_compared(three: Group) -> None:
    group, theirs = three
    group._writer, group._groups = StepWriter(), []
    step = step_of([[PageTable(PAGE, pages=[1])]], None, 3)
    group.send(step)
    say = messages.encode
    theirs[1].send(say(Checked(1, checksum(step))))
    theirs[2].send(say(Checked(1, checksum(step) ^ 1)))
    group._watcher.join(60)
    assert "rank 2 disagrees about step 1" in str(group.failure)


def test_a_watchers_fault_fails_the_group(three: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step would wait for a rank that nobody hears any more."""
    group, theirs = three

    def hear(rank: int) -> None:
        raise KeyError("a reply of no known kind")

    monkeypatch.setattr(group, "_hear", hear)
    theirs[1].send(messages.encode(messages.Pong()))
    group._watcher.join(60)
    assert "no known kind" in str(group.failure)
    with pytest.raises(RanksFailedError):
        group._await(messages.Ready, timeout_s=60)


def test_a_fault_while_orders_are_read_ends_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def receive_within(self, seconds: float) -> bytes:
            raise ValueError("a fault")

    class EndedError(Exception):
        pass

    ends = []

    def ended() -> None:
        ends.append(threading.current_thread())
        if threading.current_thread() is threading.main_thread():
            raise EndedError

    monkeypatch.setattr(follower_module, "END_S", 0.0)
    with pytest.raises(EndedError):
        follower_module.Follower(RankPlace(1, 2, [], ("", 1)), Broken(), None, ended).run()  # type: ignore[arg-type]
    wait_until(lambda: len(ends) == 2)


def test_a_rank_that_cannot_load_says_so_and_the_group_lives_on(
    three: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, theirs = three
    say = messages.encode
    monkeypatch.setattr(messages, "digest_of", lambda folder: 7)

    def load(*_: object, watch: Callable[[int, int], None], **__: object) -> object:
        """A long one, which reports how far it is."""
        theirs[2].send(say(Loaded(2, group._num_loads, "no such folder", 0, 0, 0)))
        for done in range(500):
            watch(done, 500)
            time.sleep(0.01)
        raise AssertionError("it went on")

    monkeypatch.setattr(group_module, "load_share", load)
    for _ in range(2):  # what the other one says too late is not taken for the next model's
        with pytest.raises(CheckpointError, match="Rank 2 cannot load tiny: no such folder"):
            group.load("tiny", Path(), dtype="auto", watch=None)
        theirs[1].send(say(Loaded(1, group._num_loads, None, 1, 1, 1)))
    assert group.failure is None
    received = [messages.ORDERS.decode(theirs[1].receive()).name for _ in range(4)]
    assert [name for name in received if name != "ping"][:2] == ["load", "release"]


def test_an_interrupt_while_ranks_are_awaited_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(control._Door, "let_in", interrupted)
    local = LocalRanks()
    with pytest.raises(KeyboardInterrupt):
        RankGroup(local_place(3), b"0123456789abcdef", local=local)
    assert local.ended() is not None
    assert all(process.poll() is not None for process in local._processes.values())


def test_two_processes_of_one_rank_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """But one that came again after its end takes its place."""
    secret, place = b"0123456789abcdef", local_place(3)
    monkeypatch.setattr(group_module, "join_group", lambda place: NoLink())
    results: list[object] = []

    def form() -> None:
        try:
            results.append(RankGroup(place, secret))
        except RanksFailedError as error:
            results.append(error)

    thread = threading.Thread(target=form, daemon=True)
    thread.start()

    def come(rank: int) -> Connection:
        hello = msgspec.structs.replace(hello_of(place), rank=rank, pid=40 + rank)
        return connect(place.control, secret, hello, time.monotonic() + 10)

    come(1).close()
    came = come(1)
    with pytest.raises(RanksFailedError, match="Two processes are rank 1"):
        come(1)
    thread.join(60)
    assert "Two processes are rank 1 (process 41 came last)" in str(results[0])
    came.close()


def test_the_kv_cache_of_ranks_leaves_room_for_all_weights(three: Group) -> None:
    """On one machine those of every rank, the draft of rank 0 with them; else each has its own."""
    group, _ = three
    machines = {1: 2 * 10**9, 2: 10**9}
    group.loaded = [Loaded(i, 1, None, 200_000_000, 0, size) for i, size in machines.items()]

    def room(weights: int) -> int:
        return 1_500_000_000 - weights

    budget = group.kv_bytes(room, 300_000_000, adapter_bytes=100_000_000)
    assert budget == default_kv_bytes(10**9, 300_000_000) < room(300_000_000)
    group._local = LocalRanks()
    budget = group.kv_bytes(room, 300_000_000, adapter_bytes=100_000_000)
    assert budget == room(900_000_000) // 3


def test_ranks_run_one_model_at_a_time(three: Group) -> None:
    group, _ = three
    group.claim("one")
    with pytest.raises(InvalidRequestError, match="run one, and they run one model at a time"):
        group.claim("other")
    group.release()
    group.claim("other")


def test_a_step_that_is_not_read_before_the_model_goes_is_not_late_afterwards(three: Group) -> None:
    group, _ = three
    group._writer, group._groups = StepWriter(), []
    group.send(step_of([[PageTable(PAGE, pages=[1])]], None, 3))
    group.release()
    group._heard_s = {}  # only steps are looked at
    group._check_time(time.monotonic() + 1e6)
    assert group.failure is None


def test_an_adapter_that_is_loaded_beside_a_step_is_not_the_step_s_time(three: Group) -> None:
    """Its pieces have a deadline of their own; the step's goes on where their answers end."""
    group, theirs = three
    group._writer, group._groups, group._num_loads = StepWriter(), [], 1
    group._heard_s = {}  # only steps are looked at
    group.send(step_of([[PageTable(PAGE, pages=[1])]], None, 3))
    sent_s = group._sent_s[0]
    waiting = threading.Thread(target=group._next_answer, args=(messages.AdapterDone, 30.0))
    waiting.start()
    wait_until(lambda: group._answered_s >= sent_s)
    group._check_time(time.monotonic() + 1e6)
    assert group.failure is None
    done = messages.AdapterDone(1, 1, 1, None, 0, True)
    theirs[1].send(messages.encode(done))
    waiting.join(60)
    assert sent_s < group._answered_s < time.monotonic()
    group._heard_s = {}
    with pytest.raises(RanksFailedError, match="a step has taken more than 60 seconds"):
        group._check_time(time.monotonic() + 61)


def test_a_socket_of_the_ring_that_waits_for_a_rank_is_shut() -> None:
    """A rank that fails before it has joined: MLX would wait for it for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        errors: list[OSError] = []

        def wait() -> None:
            try:
                listener.accept()
            except OSError as error:
                errors.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        thread.join(0.1)
        shut_ring([[f"127.0.0.1:{listener.getsockname()[1]}"]])
        thread.join(60)
        assert errors


def test_an_order_with_arguments_of_other_types_is_refused() -> None:
    came: list[object] = []

    def resize(num_pages: list[int], kv: KVOptions) -> None:
        came.append((num_pages, kv))

    orders = messages.Orders(resize=resize)
    call = messages.Order("resize", [[3, 4], KVOptions(window=8, sinks=2)])
    orders.obey(messages.ORDERS.decode(messages.encode(call)))
    assert came == [([3, 4], KVOptions(window=8, sinks=2))]
    with pytest.raises(msgspec.ValidationError):
        orders.obey(messages.Order("resize", [["3"], {}]))
    with pytest.raises(msgspec.ValidationError):
        orders.obey(messages.Order("resize", [[3]]))
