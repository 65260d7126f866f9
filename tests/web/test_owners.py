"""What a key stores belongs to its name in the file of keys, else to the key itself."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from page_server import LivePageServer

from mlxinfer.history import History, StoredMessage, owner_named, owner_of_key
from mlxinfer.server.call import Call
from mlxinfer.server.keys import ApiKeys
from mlxinfer.server.store import ResponseStore
from mlxinfer.session.saved import NamedSessions

TALK, ASKED = "conversation-1", "A prompt of more than one page of the cache, for a session. " * 2


class Keeping(LivePageServer):
    """A server that stores responses, sessions and conversations under `folder`."""

    def __init__(self, folder: Path, keys: ApiKeys) -> None:
        disk = {"disk_cache": "50MB", "disk_cache_dir": folder / "kv"}
        store = ResponseStore(folder / "responses.db")
        super().__init__(folder, keys=keys, store=store, engine=disk)
        self.service.sessions = NamedSessions(folder / "kv", 1 << 30)

    def store_all(self, key: str) -> str:
        """Store one thing of each kind; the response's id."""
        headers = {"x-api-key": key}
        body = {"model": "demo", "input": ASKED, "max_output_tokens": 2}
        response = self.post("/v1/responses", body, headers=headers).json()
        assert self.post("/v1/sessions", {"name": "notes"}, headers=headers).status_code == 200
        message = {"conversation": TALK, "id": "message-1", "role": "user", "content": "Hi"}
        assert self.post("/history/messages", message, headers=headers).status_code == 200
        return str(response["id"])

    def sees(self, key: str, response: str) -> list[bool]:
        """Which of these a key finds."""
        headers = {"x-api-key": key}
        return [
            self.get(path, headers=headers).status_code == 200
            for path in (
                f"/v1/responses/{response}",
                "/v1/sessions/notes/file",
                f"/history/conversations/{TALK}",
            )
        ]


def tables(**keys: str) -> ApiKeys:
    return ApiKeys().with_named({name: {"key": key} for name, key in keys.items()}, "keys.toml")


@pytest.mark.alike
@pytest.mark.parametrize(
    ("before", "first", "after", "own", "others"),
    [
        (ApiKeys.from_plain("ab"), "a", ApiKeys.from_plain("cba"), "a", "bc"),
        (tables(anna="a", ben="b"), "a", tables(ben="b", anna="new"), "new", "b"),
        (tables(anna="a", ben="b"), "a", tables(anna="b", ben="a"), "b", "a"),
    ],
    ids=["another order", "rotated", "exchanged"],
)
def test_all_that_a_key_stores_has_one_owner(
    before: ApiKeys, first: str, after: ApiKeys, own: str, others: str, tmp_path: Path
) -> None:
    with Keeping(tmp_path, before) as server:
        response = server.store_all(first)
        assert server.sees(first, response) == [True] * 3
        assert server.sees("b", response) == [False] * 3
    with Keeping(tmp_path, after) as server:
        assert server.sees(own, response) == [True] * 3
        loaded = server.post("/v1/sessions/notes/load", {}, headers={"x-api-key": own})
        assert loaded.status_code == 200, loaded.text
        for key in others:
            assert server.sees(key, response) == [False] * 3


def test_no_name_and_salt_are_another_name_and_salt() -> None:
    """Names and salts of blanks, quotes and what joins others: each pair is a namespace alone."""
    texts = ["a", "a b", "b", "key a", '["a", "b"]', '"', "\0", ", ", "name a", "x" * 32, "é"]
    config = SimpleNamespace(keys=range(2), share_prefixes=False)
    collected: dict[str | None, tuple[str, str | None]] = {}
    for name, salt in product(texts, [None, *texts]):
        owner = SimpleNamespace(owner=owner_named(name), service=SimpleNamespace(config=config))
        namespace = Call.namespace(cast(Call, owner), salt)
        assert collected.setdefault(namespace, (name, salt)) == (name, salt)
    config.share_prefixes = True
    assert Call.namespace(cast(Call, owner), None) is None
    assert all(Call.namespace(cast(Call, owner), salt) not in collected for salt in texts)


KEYS = ApiKeys.from_plain(["a", "b"]).with_named({"anna": {"key": "c"}}, "keys.toml")
ANNA = KEYS.all[-1]


def test_conversations_of_a_key_that_gets_a_name_go_to_the_name(tmp_path: Path) -> None:
    history = History(tmp_path / "h.db")
    message = StoredMessage(id="message-1", parent=None, role="user", content="Hi")
    history.save_message(owner_of_key("c"), TALK, message)
    assert history.owner_of_key("c") == owner_of_key("c")
    history.name_owner(owner_of_key("c"), ANNA.owner)
    assert history.owner_of_key("c") == ANNA.owner  # as the terminal asks
    assert len(history.messages(ANNA.owner, TALK)) == 1
    history.name_owner(owner_of_key("c"), owner_of_key("c"))  # the key lost its name again
    assert history.owner_of_key("c") == owner_of_key("c")
    assert [one.id for one in history.conversations(ANNA.owner)] == [TALK]
