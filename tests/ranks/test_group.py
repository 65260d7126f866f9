"""Rank 0's side of a group, with sockets in place of the other ranks."""

import socket
import threading
from collections.abc import Iterator

import pytest
from ranks.test_wire import PAGE, step_of

from mlxinfer.cache.pages import PageTable
from mlxinfer.errors import InvalidRequestError
from mlxinfer.ranks import group as group_module
from mlxinfer.ranks.control import Connection
from mlxinfer.ranks.group import RankGroup
from mlxinfer.ranks.hosts import Place
from mlxinfer.ranks.messages import Checked, replies
from mlxinfer.ranks.wire import Writer, checksum

Group = tuple[RankGroup, dict[int, Connection]]


class NoLink:
    """In place of MLX's group."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 3


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """A group of three, and the ends of the other two."""
    pairs = {rank: socket.socketpair(socket.AF_UNIX) for rank in (1, 2)}
    monkeypatch.setattr(Connection, "__init__", lambda self, sock: setattr(self, "_socket", sock))
    ours = {rank: Connection(pair[0]) for rank, pair in pairs.items()}
    theirs = {rank: Connection(pair[1]) for rank, pair in pairs.items()}
    monkeypatch.setattr(RankGroup, "_gather", lambda self, place, secret: ours)
    monkeypatch.setattr(group_module, "join_group", lambda place: NoLink())
    made = RankGroup(Place(0, 3, [], ("127.0.0.1", 1)), b"")
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
    group._writer, group._groups = Writer(), []
    step = step_of([[PageTable(PAGE, pages=[1])]], None, 3)
    group.send(step)
    say = replies().encode
    theirs[1].send(say(Checked(1, checksum(step))))
    theirs[2].send(say(Checked(1, checksum(step) ^ 1)))
    group._watcher.join(10)
    assert "rank 2 disagrees about step 1" in str(group.failure)


def test_ranks_run_one_model_at_a_time(three: Group) -> None:
    group, _ = three
    group.claim("one")
    with pytest.raises(InvalidRequestError, match="run one, and they run one model at a time"):
        group.claim("other")
    group.release()
    group.claim("other")


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
        group_module._shut([[f"127.0.0.1:{listener.getsockname()[1]}"]])
        thread.join(5)
        assert errors
