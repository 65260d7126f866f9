"""Named sessions: saved, loaded after a restart, carried to another server."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from live_server import CHAT, LiveServer, chat
from models.runs import every

from mlxinfer.cli import session as session_command
from mlxinfer.engine.loop import Loop
from mlxinfer.server.keys import ApiKeys
from mlxinfer.session.saved import NamedSessions
from tests.waiting import wait_until

pytestmark = pytest.mark.demo

LONG = "A cat sat on a mat, and a dog saw the cat. " * 12
PAGE = 16


@contextmanager
def serving(folder: Path, size: str = "50MB", **config: Any) -> Iterator[LiveServer]:
    """A server with a disk cache in `folder`, whose model is identified for it, and sessions."""
    engine = {"disk_cache": size, "disk_cache_dir": folder}
    with LiveServer(engine=engine, **config) as server:
        server.service.sessions = NamedSessions(folder, 1 << 30)
        wait_until(lambda: server.model.session.engine.call(has_disk_tier))
        yield server


def has_disk_tier(loop: Loop) -> bool:
    return loop.store is not None and loop.store.disk is not None


def ask(server: LiveServer, text: str = LONG, **fields: Any) -> tuple[str, int, int]:
    """The answer to a chat, the tokens of its prompt, and those that were computed."""
    headers = fields.pop("headers", {})
    before = server.stats()["prompt_tokens_computed"]
    reply = server.post(CHAT, chat(text, **fields), headers=headers).json()
    computed = server.stats()["prompt_tokens_computed"] - before
    return reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens"], computed


def exported(folder: Path, text: str = LONG) -> bytes:
    """The file of a session called notes."""
    with serving(folder) as server:
        ask(server, text)
        server.post("/v1/sessions", {"name": "notes"})
        return server.get("/v1/sessions/notes/file").content


def error_of(reply: Any, status: int) -> str:
    assert reply.status_code == status, reply.text
    message: str = reply.json()["error"]["message"]
    return message


def entry_files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/*.kv") if path.parent.parent == folder]


def test_a_session_is_there_tomorrow_and_on_another_mac(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with serving(here) as server:
        cold, num_prompt, computed = ask(server)
        assert computed == num_prompt
        saved = server.post("/v1/sessions", {"name": "notes"}).json()
        assert saved["tokens"] >= num_prompt - num_prompt % PAGE
        assert saved["model"] == "demo"
    with serving(here) as server:
        assert server.get("/v1/sessions").json()["data"] == [saved]
        assert server.post("/v1/sessions/notes/load", {}).json() == saved
        tokens_loaded = server.stats()["disk"]["tokens_loaded"]
        assert tokens_loaded == saved["tokens"]
        answer, _, computed = ask(server)
        assert (answer, computed <= PAGE) == (cold, True)
        assert server.stats()["disk"]["tokens_loaded"] == tokens_loaded, "it was in memory"
        exported = server.get("/v1/sessions/notes/file").content
    with serving(there) as server:
        took = server.client.put("/v1/sessions?name=carried", content=exported)
        assert took.json() == {**saved, "name": "carried"}
        answer, _, computed = ask(server)
        assert (answer, computed <= PAGE) == (cold, True)
        again = server.get("/v1/sessions/carried/file").content
        assert len(again) > saved["bytes"]
        assert server.client.delete("/v1/sessions/carried").json()["deleted"]
        assert server.get("/v1/sessions").json()["data"] == []
        assert "no session 'carried'" in error_of(server.get("/v1/sessions/carried/file"), 404)


@pytest.mark.ci
def test_eviction_leaves_what_a_session_keeps(tmp_path: Path) -> None:
    with serving(tmp_path, "2MB") as server:
        ask(server)
        assert server.post("/v1/sessions", {"name": "kept"}).status_code == 200
        pinned = {path for path in entry_files(tmp_path) if path.stat().st_nlink == 2}
        assert pinned
        disk = server.model.session.engine.call(lambda loop: loop.store)
        num_others = 0
        while disk.disk.stats()["evicted"] < 10:
            num_others += 1
            ask(server, f"{num_others} " * 100, max_tokens=1)
            refused = server.post("/v1/sessions", {"name": "again"})
            if refused.status_code == 200:
                server.client.delete("/v1/sessions/again")
            assert num_others < 200
        assert pinned <= set(entry_files(tmp_path))
        assert disk.disk.stats()["num_bytes"] <= 2_000_000
        server.client.delete("/v1/sessions/kept")
        assert all(path.stat().st_nlink == 1 for path in entry_files(tmp_path))


def test_a_session_without_room_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, "40KB") as server:
        ask(server)
        assert "no room" in error_of(server.post("/v1/sessions", {"name": "large"}), 503)
        assert server.get("/v1/sessions").json()["data"] == []
        assert ask(server)[2] <= PAGE, "it is in memory"


@pytest.mark.alike
@pytest.mark.parametrize("at", every(2, [3, 100, 2000, 40_000]))
def test_a_damaged_file_is_refused(tmp_path: Path, at: int) -> None:
    whole = exported(tmp_path / "a")
    flipped = bytearray(whole)
    flipped[at] ^= 1
    with serving(tmp_path / "b") as server:
        for content in (bytes(flipped), whole[:-at], whole[:at], b""):
            message = error_of(server.client.put("/v1/sessions", content=content), 400)
            assert "damaged" in message
        assert server.get("/v1/sessions").json()["data"] == []
        assert server.client.put("/v1/sessions?name=a/b", content=whole).status_code == 400
        assert server.client.put("/v1/sessions", content=whole).status_code == 200
        ask(server)
        (page, *_) = [
            path
            for path in (tmp_path / "b" / "sessions").glob("*/*.kv")
            if path.name != "session.kv"
        ]
        page.write_bytes(page.read_bytes()[:-1])
        assert "damaged" in error_of(server.post("/v1/sessions/notes/load", {}), 400)


def test_a_session_of_other_weights_is_refused(tmp_path: Path) -> None:
    file = exported(tmp_path / "a")
    with serving(tmp_path / "b", bundled="demo") as server:
        message = error_of(server.client.put("/v1/sessions", content=file), 400)
        assert "was saved with weights" in message
    other = {"disk_cache": "50MB", "disk_cache_dir": tmp_path / "c", "kv_bits": 8}
    with LiveServer(engine=other) as server:
        server.service.sessions = NamedSessions(tmp_path / "c", 1 << 30)
        message = error_of(server.client.put("/v1/sessions", content=file), 400)
        assert "was saved with the page format" in message


def test_a_session_belongs_to_the_key_that_saved_it(tmp_path: Path) -> None:
    keys = ApiKeys.from_plain(["a", "b"])
    anna, ben = {"x-api-key": "a"}, {"x-api-key": "b"}
    with serving(tmp_path / "here", keys=keys) as server:
        cold, _, _ = ask(server, headers=anna)
        assert "no prompt" in error_of(server.post("/v1/sessions", {"name": "x"}, headers=ben), 400)
        assert server.post("/v1/sessions", {"name": "notes"}, headers=anna).status_code == 200
        assert server.get("/v1/sessions", headers=ben).json()["data"] == []
        assert server.get("/v1/sessions").status_code == 401
        for reply in (
            server.post("/v1/sessions/notes/load", {}, headers=ben),
            server.get("/v1/sessions/notes/file", headers=ben),
            server.client.delete("/v1/sessions/notes", headers=ben),
        ):
            assert "no session" in error_of(reply, 404)
        file = server.get("/v1/sessions/notes/file", headers=anna).content
        assert ask(server, headers=ben)[2] > PAGE, "prompts are not shared"
        took = server.client.put("/v1/sessions", content=file, headers=ben)
        assert took.status_code == 200
        assert server.client.delete("/v1/sessions/notes", headers=anna).status_code == 200
        assert len(server.get("/v1/sessions", headers=ben).json()["data"]) == 1
    with serving(tmp_path / "here", keys=keys) as server:
        answer, _, computed = ask(server, headers=ben)
        assert (answer, computed <= PAGE) == (cold, True)
    with serving(tmp_path / "there") as server:
        assert server.client.put("/v1/sessions", content=file).status_code == 200
        answer, _, computed = ask(server)
        assert (answer, computed <= PAGE) == (cold, True)


def test_who_shares_prefixes_takes_files_of_administrators_only(tmp_path: Path) -> None:
    tables = {"user": {"key": "u"}, "chief": {"key": "c", "admin": True}}
    keys = ApiKeys().with_named(tables, "keys.toml")
    with serving(tmp_path, keys=keys, share_prefixes=True) as server:
        refused = server.client.put("/v1/sessions", content=b"", headers={"x-api-key": "u"})
        assert refused.status_code == 403
        refused = server.client.put("/v1/sessions", content=b"", headers={"x-api-key": "c"})
        assert refused.status_code == 400


@pytest.mark.parametrize(("weight", "parts"), [(1, 3), (0.5, 4), (2, 2.5)])
def test_no_key_takes_the_share_of_another(tmp_path: Path, weight: float, parts: float) -> None:
    """The room that one session, but not two, fits in, as parts of all."""
    tables = {"anna": {"key": "a", "weight": weight}, "ben": {"key": "b"}}
    with serving(tmp_path, keys=ApiKeys().with_named(tables, "keys")) as server:
        anna = {"x-api-key": "a"}
        ask(server, headers=anna)
        saved = server.post("/v1/sessions", {"name": "notes"}, headers=anna).json()
        sessions = server.service.sessions
        assert sessions is not None
        sessions.max_bytes = int(parts * saved["bytes"])
        assert server.post("/v1/sessions", {"name": "notes"}, headers=anna).status_code == 200
        refused = server.post("/v1/sessions", {"name": "more"}, headers=anna)
        assert "more than its share" in error_of(refused, 503)
        file = server.get("/v1/sessions/notes/file", headers=anna).content
        refused = server.client.put("/v1/sessions?name=more", content=file, headers=anna)
        assert "more than its share" in error_of(refused, 503)


def test_what_a_crash_or_a_bad_disk_left_is_removed(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        ask(server)
        server.post("/v1/sessions", {"name": "notes"})
        (head,) = (tmp_path / "sessions").glob("*/session.kv")
        unfinished = tmp_path / "sessions" / f"{head.parent.name}.0123"
        shutil.copytree(head.parent, unfinished)
        saving = os.open(unfinished, os.O_RDONLY)
        fcntl.flock(saving, fcntl.LOCK_EX)  # as another process does while it saves
        head.write_bytes(b"x")
        assert server.get("/v1/sessions").json()["data"] == []
        assert "damaged" in error_of(server.get("/v1/sessions/notes/file"), 400)
        assert server.client.delete("/v1/sessions/notes").status_code == 200
        assert not head.exists()
        NamedSessions(tmp_path, 1 << 30)
        assert unfinished.exists(), "another process is about to finish it"
        os.close(saving)
        (unfinished / "session.kv").unlink()
        NamedSessions(tmp_path, 1 << 30)
        assert not unfinished.exists()


def test_a_session_between_its_two_names_is_not_lost(tmp_path: Path) -> None:
    """A new session takes the place of an old one in two renames; a kill may come between them."""
    with serving(tmp_path) as server:
        ask(server)
        server.post("/v1/sessions", {"name": "notes"})
        (place,) = (tmp_path / "sessions").iterdir()
        place.rename(place.with_name(f"{place.name}.0123"))
        assert server.get("/v1/sessions").json()["data"] == []
        server.service.sessions = NamedSessions(tmp_path, 1 << 30)
        assert [item["name"] for item in server.get("/v1/sessions").json()["data"]] == ["notes"]
        shutil.copytree(place, place.with_name(f"{place.name}.0123"))
        assert server.client.delete("/v1/sessions/notes").status_code == 200
        NamedSessions(tmp_path, 1 << 30)
        assert not list((tmp_path / "sessions").iterdir()), "what was removed does not come back"


def test_without_a_disk_cache_nothing_is_saved() -> None:
    with LiveServer() as server:
        for reply in (
            server.post("/v1/sessions", {"name": "x"}),
            server.get("/v1/sessions"),
            server.client.put("/v1/sessions", content=b"x"),
        ):
            assert "--disk-cache" in error_of(reply, 400)


def test_the_commands_do_what_the_paths_do(tmp_path: Path) -> None:
    file = tmp_path / "notes.session"
    with serving(tmp_path) as server:

        def run(*words: str, fails: bool = False) -> str:
            """What a command says."""
            given = [*words, "--url", server.url]
            outcome = CliRunner().invoke(session_command.command, given)
            assert (outcome.exit_code != 0) == fails, outcome.output
            return str(outcome.exception) if fails else outcome.output

        assert "has no prompt" in run("save", "notes", fails=True)
        ask(server)
        said = run("save", "notes")
        assert said.startswith("Saved notes: ")
        assert " tokens of demo, " in said
        assert run("load", "notes") == said.replace("Saved", "Loaded")
        assert "notes" in run("list")
        run("export", "notes", str(file))
        took = run("import", str(file), "--name", "again", "-m", "demo")
        assert took == said.replace("Saved notes", "Imported again")
        assert run("rm", "notes") == "Removed notes\n"
        assert "no session" in run("export", "notes", str(tmp_path / "none"), fails=True)
        assert not list(tmp_path.glob("none*"))
        assert '"again"' in run("list", "--json")
        file.write_bytes(b"x" * 1000)
        assert "no saved session" in run("import", str(file), fails=True)
