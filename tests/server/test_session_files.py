"""Files of sessions that are damaged, made up, broken off or too large; many clients at once."""

import json
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from click.testing import CliRunner
from test_sessions import LONG, ask, error_of, exported, serving

from mlxinfer.cache.disk.entry import Entry, encode, read_entry
from mlxinfer.cache.prefix.index import page_key
from mlxinfer.cli import session as session_command
from mlxinfer.server.keys import ApiKeys
from tests.seeds import seeded
from tests.waiting import wait_until

ROOT = bytes(20)
SECONDS = 60.0  # that anything may take here


def with_head(file: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A file whose head says something else, with the right checksum."""
    rest = BytesIO(file)
    head = read_entry(rest, len(file))
    assert head is not None
    said = json.loads(bytes(head.payload))
    change(said)
    payload = memoryview(json.dumps(said).encode())
    return b"".join(encode(Entry(page_key(ROOT, ()), ROOT, (), payload))) + rest.read()


def run(server_url: str, *words: str) -> tuple[int, str]:
    """The exit code of a command, and its error."""
    outcome = CliRunner().invoke(session_command.command, [*words, "--url", server_url])
    return outcome.exit_code, str(outcome.exception)


# -- exports that fail ----------------------------------------------------------------------------


def test_an_export_of_a_damaged_session_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    target = tmp_path / "notes.session"
    target.write_bytes(b"what was there")
    with serving(tmp_path / "cache") as server:
        ask(server)
        server.post("/v1/sessions", {"name": "notes"})
        pages = [p for p in (tmp_path / "cache/sessions").glob("*/*.kv") if p.stem != "session"]
        data = bytearray(pages[-1].read_bytes())
        data[len(data) // 2] ^= 1
        pages[-1].write_bytes(data)
        code, said = run(server.url, "export", "notes", str(target))
        assert (code, "before its answer was complete" in said) == (1, True)
        pages[-1].unlink()
        code, said = run(server.url, "export", "notes", str(target))
        assert (code, "damaged on the disk, or gone" in said) == (1, True)
        assert ask(server)[0], "the server goes on"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["notes.session"]
    assert target.read_bytes() == b"what was there"


@contextmanager
def dying_server(reply: bytes) -> Iterator[str]:
    """A server that ends in the middle of its reply."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(reply)

        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + bytes(5000),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1000\r\n" + bytes(500),
    ],
)
def test_a_server_that_dies_leaves_no_half_of_an_export(tmp_path: Path, reply: bytes) -> None:
    with dying_server(reply) as url:
        code, said = run(url, "export", "notes", str(tmp_path / "notes.session"))
    assert (code, "before its answer was complete" in said) == (1, True)
    assert not list(tmp_path.iterdir())


def test_a_server_that_dies_ends_an_import_with_a_message(tmp_path: Path) -> None:
    file = tmp_path / "notes.session"
    file.write_bytes(bytes(8 << 20))
    with dying_server(b"") as url:
        code, said = run(url, "import", str(file))
    assert code == 1
    assert "before its answer was complete" in said or "The connection to" in said


def test_a_full_disk_ends_an_export_with_the_name_of_the_file(tmp_path: Path) -> None:
    target = tmp_path / "notes.session"
    with serving(tmp_path / "cache") as server:
        ask(server)
        server.post("/v1/sessions", {"name": "notes"})
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            code, said = run(server.url, "export", "notes", str(target))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (code, str(target) in said) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


# -- files that somebody made up ------------------------------------------------------------------


def set_in(said: dict[str, Any], *, path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        said = said[name]
    said[path[-1]] = value


def apply(change: Callable[[dict[str, Any]], None], said: dict[str, Any]) -> None:
    change(said["prompt"])


@pytest.mark.ci
def test_no_made_up_head_is_an_error_of_the_server(tmp_path: Path) -> None:
    nasty: tuple[Any, ...] = (
        *(None, -1, 0, 1, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 1 << 80, 1e300, True),
        *("", "../../x", "a" * 5000, "\x00", [], [[]], [[-1, 0]], [[0, 99]], [[0, 0]] * 99, {}),
    )
    file = exported(tmp_path / "a")
    top = ("name", "owner", "model", "created_s", "num_bytes", "prompt")
    inner = ("identity", "root", "token_ids", "page_size", "places", "adapter", "rope_variant")
    paths = [*((name,) for name in top), *(("prompt", name) for name in inner)]
    with serving(tmp_path / "b") as server:
        for path in paths:
            for value in nasty:
                made = with_head(file, partial(set_in, path=path, value=value))
                reply = server.client.put("/v1/sessions?name=made", content=made)
                assert reply.status_code in (200, 400, 503), (path, value, reply.text)
                assert server.get("/v1/sessions").status_code == 200, (path, value)
            code, said = run(server.url, "list")
            assert code == 0, (path, said)
        changes: tuple[Callable[[dict[str, Any]], None], ...] = (
            lambda prompt: prompt.update(page_size=1),
            lambda prompt: prompt.update(token_ids=[-1, *prompt["token_ids"][1:]]),
            lambda prompt: prompt.update(token_ids=[1 << 70, *prompt["token_ids"][1:]]),
            lambda prompt: prompt.update(token_ids=prompt["token_ids"] * 2),
            lambda prompt: prompt.update(places=prompt["places"] * 2),
            lambda prompt: prompt.update(places=[[n, -1] for n, _ in prompt["places"]]),
            lambda prompt: prompt.update(places=[[n, 1 << 63] for n, _ in prompt["places"]]),
            lambda prompt: prompt.update(places=prompt["places"][::-1]),
        )
        for change in changes:
            made = with_head(file, partial(apply, change))
            error_of(server.client.put("/v1/sessions?name=bad", content=made), 400)
        assert server.client.put("/v1/sessions", content=file).status_code == 200
        assert ask(server)[2] <= 16


@pytest.mark.ci
def test_no_damaged_header_of_an_entry_is_an_error_of_the_server(tmp_path: Path) -> None:
    file = exported(tmp_path / "a")
    rest = BytesIO(file)
    read_entry(rest, len(file))
    second, rng = rest.tell(), random.Random(5)
    with serving(tmp_path / "b") as server:
        for start in (0, second):
            for at in range(start, start + 64):
                for value in {0, 0xFF, file[at] ^ 1 << rng.randrange(8)} - {file[at]}:
                    damaged = bytearray(file)
                    damaged[at] = value
                    reply = server.client.put("/v1/sessions", content=bytes(damaged))
                    assert "damaged" in error_of(reply, 400), at
        assert server.get("/v1/sessions").json()["data"] == []


# -- room -----------------------------------------------------------------------------------------


def test_a_file_without_room_is_refused_and_leaves_what_sessions_keep(tmp_path: Path) -> None:
    file = exported(tmp_path / "a")
    with serving(tmp_path / "b", f"{len(file) * 3 // 2 // 1000}KB") as server:
        taken = server.client.put("/v1/sessions?name=first", content=file)
        assert taken.status_code == 200, taken.text
        ask(server, LONG[::-1] * 2)
        other = exported(
            tmp_path / "c", "Birds fly over a house, and fish swim under a boat. " * 12
        )
        for _ in range(2):
            refused = server.client.put("/v1/sessions?name=second", content=other)
            assert "no room for the session" in error_of(refused, 503)
        names = [item["name"] for item in server.get("/v1/sessions").json()["data"]]
        assert names == ["first"]
        assert ask(server)[2] <= 16
    with serving(tmp_path / "d", f"{len(file) // 2000}KB") as server:
        refused = server.client.put("/v1/sessions", content=file)
        assert "no room for the session" in error_of(refused, 503)


def test_sessions_saved_at_once_keep_to_the_share_of_their_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, keys=ApiKeys.from_plain(["a", "b"])) as server:
        anna = {"x-api-key": "a"}
        ask(server, headers=anna)
        saved = server.post("/v1/sessions", {"name": "n0"}, headers=anna).json()
        sessions = server.service.sessions
        assert sessions is not None
        sessions.max_bytes = 2 * 2 * saved["bytes"]
        slow, go_on = sessions.save, threading.Event()

        def save(*given: Any) -> None:
            go_on.wait(SECONDS)
            slow(*given)

        monkeypatch.setattr(sessions, "save", save)
        with ThreadPoolExecutor(8) as threads:
            asked = [
                threads.submit(server.post, "/v1/sessions", {"name": f"n{n}"}, headers=anna)
                for n in range(1, 9)
            ]
            wait_until(lambda: sum(one.done() for one in asked) == 7)
            go_on.set()
            statuses = [one.result().status_code for one in asked]
        assert sorted(statuses) == [200] + [503] * 7


def test_one_file_of_a_key_is_taken_in_at_a_time(tmp_path: Path) -> None:
    file = exported(tmp_path / "a")
    with serving(tmp_path / "b", body_timeout_s=2.0) as server:
        going, go_on = threading.Event(), threading.Event()

        def parts() -> Iterator[bytes]:
            yield file[:1000]
            going.set()
            go_on.wait(SECONDS)
            yield file[1000:]

        with ThreadPoolExecutor() as threads:
            first = threads.submit(server.client.put, "/v1/sessions?name=one", content=parts())
            going.wait(SECONDS)
            refused = server.client.put("/v1/sessions?name=two", content=file)
            assert "is being imported" in error_of(refused, 503)
            go_on.set()
            assert first.result().status_code == 200
        assert server.client.put("/v1/sessions?name=two", content=file).status_code == 200


@pytest.mark.parametrize("leaves", [True, False])
def test_an_upload_that_stops_gives_way(tmp_path: Path, leaves: bool) -> None:
    with serving(tmp_path, body_timeout_s=1.0) as server:
        head = b"PUT /v1/sessions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\nx"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head)
            if not leaves:
                connection.settimeout(SECONDS)
                assert b"408" in connection.recv(1 << 16)
        until_s = time.monotonic() + SECONDS
        while "is being imported" in server.client.put("/v1/sessions", content=b"x").text:
            assert time.monotonic() < until_s


# -- many at once ---------------------------------------------------------------------------------


def test_a_session_may_be_loaded_by_many_at_once(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        cold, _, _ = ask(server)
        server.post("/v1/sessions", {"name": "notes"})
        with ThreadPoolExecutor(16) as threads:
            replies = list(
                threads.map(lambda _: server.post("/v1/sessions/notes/load", {}), range(48))
            )
        assert {reply.status_code for reply in replies} == {200}
        assert ask(server)[0] == cold


@pytest.mark.ci  # seconds
def test_whatever_clients_do_at_once_no_request_fails_by_the_server(tmp_path: Path) -> None:
    rng = seeded()
    with serving(tmp_path) as server:
        cold, _, _ = ask(server)
        server.post("/v1/sessions", {"name": "a"})
        file = server.get("/v1/sessions/a/file").content
        kinds: tuple[Callable[[str], Any], ...] = (
            lambda name: server.post("/v1/sessions", {"name": name}),
            lambda name: server.post(f"/v1/sessions/{name}/load", {}),
            lambda name: server.get(f"/v1/sessions/{name}/file"),
            lambda name: server.client.delete(f"/v1/sessions/{name}"),
            lambda name: server.client.put(f"/v1/sessions?name={name}", content=file),
            lambda name: server.get("/v1/sessions"),
            lambda name: server.post("/v1/chat/completions", asked(name)),
        )

        def act(choice: tuple[Callable[[str], Any], str]) -> int:
            kind, name = choice
            try:
                reply = kind(name)
            except httpx.RemoteProtocolError:  # a session was removed while it was exported
                return 0
            assert reply.status_code in (200, 400, 404, 503), reply.text
            return int(reply.status_code)

        choices = [(rng.choice(kinds), rng.choice("ab")) for _ in range(400)]
        with ThreadPoolExecutor(12) as threads:
            done = list(threads.map(act, choices))
        assert done.count(200) > 100
        assert server.client.put("/v1/sessions?name=a", content=file).status_code == 200
        # A page that is there already stays: steps of other requests may have rounded it otherwise.
        assert len(server.get("/v1/sessions/a/file").content) == len(file)
        assert ask(server)[0] == cold
        assert not list((tmp_path / "sessions").glob("*.*"))


def asked(name: str) -> dict[str, Any]:
    message = {"role": "user", "content": LONG + name}
    return {"messages": [message], "temperature": 0, "max_tokens": 4}
