"""Stored conversations: trees of messages, kept by owner, found by words, whole after a kill."""

import dataclasses
import sqlite3
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlxinfer.errors import ConversationNotFoundError, HistoryError, InvalidRequestError
from mlxinfer.history import (
    History,
    StoredMessage,
    default_place,
    excerpt,
    new_id,
    owner_of_key,
    text_sent,
    title_of,
)
from tests.seeds import seeded

TALK = "conversation"


def message(id: str, text: str, parent: str | None = None, role: str = "user") -> StoredMessage:
    return StoredMessage(id=f"{id:-<8}", parent=parent and f"{parent:-<8}", role=role, content=text)


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "folder" / "history.db")


def test_random_trees_come_back_as_they_were_saved(tmp_path: Path) -> None:
    rng = seeded()
    history = History(tmp_path / "h.db")
    expected: dict[str, StoredMessage] = {}
    for _ in range(120):
        if expected and rng.random() < 0.2:
            old = rng.choice(list(expected.values()))
            saved = StoredMessage(
                id=old.id, parent=old.parent, role=old.role, content=new_id(), created_s=1.0
            )
        else:
            parent = rng.choice([None, *expected])
            role = rng.choice(["user", "assistant", "tool"])
            saved = StoredMessage(
                id=new_id(), parent=parent, role=role, content=new_id(),
                reasoning=rng.choice(["", "hm"]), details={"n": rng.random()}, created_s=1.0,
            )  # fmt: skip
        history.save_message("", TALK, saved)
        expected[saved.id] = saved
        if rng.random() < 0.1:
            history.close()
            history = History(tmp_path / "h.db")
    assert {message.id: message for message in history.messages("", TALK)} == expected
    head = history.conversation("", TALK).head
    assert head == saved.id
    chain = [saved]
    while chain[-1].parent is not None:
        chain.append(expected[chain[-1].parent])
    assert history.branch("", TALK) == chain[::-1]
    for message in rng.sample(list(expected.values()), 10):
        assert [m.message for m in history.search("", message.content)] == [message.id]


def test_a_replaced_text_is_no_longer_found(history: History) -> None:
    history.save_message("", TALK, message("a", "first words"))
    history.save_message("", TALK, message("a", "other words"))
    assert history.search("", "first") == []
    assert [m.message for m in history.search("", "other")] == ["a-------"]


def test_no_owner_sees_what_is_anothers(history: History) -> None:
    ann, bob = owner_of_key("ann"), owner_of_key("bob")
    assert len({ann, bob, owner_of_key(None)}) == 3
    history.save_message(ann, TALK, message("a", "secret words"))
    assert history.conversations(bob) == []
    assert history.search(bob, "secret") == []
    for action in (
        lambda: history.conversation(bob, TALK),
        lambda: history.messages(bob, TALK),
        lambda: history.delete(bob, TALK),
    ):
        with pytest.raises(ConversationNotFoundError):
            action()
    with pytest.raises(InvalidRequestError, match="taken"):
        history.save_message(bob, TALK, message("b", "mine"))
    with pytest.raises(InvalidRequestError, match="taken"):
        history.save_conversation(bob, TALK, title="mine")
    history.save_message(bob, "bobs-talk", message("b", "mine"))
    with pytest.raises(InvalidRequestError):
        history.save_message(bob, "bobs-talk", message("a", "overwritten"))
    assert [m.content for m in history.messages(ann, TALK)] == ["secret words"]


def test_what_makes_no_sense_changes_nothing(history: History) -> None:
    url = {"url": None}
    odd_pictures = ("x", ["x"], [url], [{"name": "a"}], [{"name": "a", "url": "https://a"}])
    for bad, param in (
        (message("a", "x", parent="none"), "parent"),
        (message("a", "x", role="robot"), "role"),
        (StoredMessage(id="../../x", parent=None, role="user", content="x"), "id"),
        *(
            (dataclasses.replace(message("a", "x"), details={"pictures": odd}), "details.pictures")
            for odd in odd_pictures
        ),
    ):
        with pytest.raises(InvalidRequestError) as raised:
            history.save_message("", TALK, bad)
        assert (raised.value.param == param) or param in str(raised.value)
        assert history.conversations("") == []


def test_what_no_file_can_hold_is_an_error_of_the_history(history: History) -> None:
    wrong = StoredMessage(id=new_id(), parent=None, role="user", content="half \ud83d")
    for ask in (
        lambda: history.save_message("a", "conversation", wrong),
        lambda: history.search("a", "half \ud83d"),
        lambda: history.conversations("a", limit=2**70),
    ):
        with pytest.raises(HistoryError, match="cannot be used"):
            ask()
    assert history.conversations("a") == []


def test_the_first_question_is_the_title_until_another_is_given(history: History) -> None:
    history.save_message("", TALK, message("a", "  What\nis   it? "))
    assert history.conversation("", TALK).title == "What is it?"
    history.save_conversation("", TALK, title="Mine", model="m", settings={"system": "s"})
    history.save_message("", TALK, message("b", "More", parent="a"))
    result = history.conversation("", TALK)
    assert (result.title, result.model, result.settings) == ("Mine", "m", {"system": "s"})
    assert len(title_of("word " * 100)) <= 60


def test_conversations_are_listed_by_their_last_change(history: History) -> None:
    for name in ("one", "two", "three"):
        history.save_message("", f"{name:-<8}", message(name, name))
        time.sleep(0.002)
    history.save_message("", "one-----", message("again", "more", parent="one"))
    listed = history.conversations("")
    assert [item.title for item in listed] == ["one", "three", "two"]
    assert history.save_conversation("", listed[-1].id, pinned=True).pinned
    assert history.conversations("", pinned=True) == [history.conversation("", listed[-1].id)]
    assert history.conversations("", pinned=False) == listed[:-1]
    assert not history.save_conversation("", listed[-1].id, pinned=False).pinned
    older = history.conversations("", limit=1, before_s=listed[0].changed_s)
    assert [item.title for item in older] == ["three"]


def test_the_head_moves_between_branches(history: History) -> None:
    history.save_message("", TALK, message("q", "q"))
    history.save_message("", TALK, message("a", "first", "q", "assistant"))
    history.save_message("", TALK, message("b", "second", "q", "assistant"))
    history.save_conversation("", TALK, head="a-------")
    assert [m.content for m in history.branch("", TALK)] == ["q", "first"]
    with pytest.raises(InvalidRequestError, match="head"):
        history.save_conversation("", TALK, head="nothing--")


def test_search_is_for_parts_of_words_in_any_script(history: History) -> None:
    history.save_message("", TALK, message("a", 'Der Kölner Dom, köln. 日本語テスト "quoted" 100%'))
    for words in (
        "köln",
        "KÖLN dom",
        "本語",
        "日本語テ",
        '"quoted" 100%',
    ):  # 本語: less than a trigram
        assert history.search("", words), words
    for words in ("100_", "nothing", "", '" OR "', "AND NOT *"):
        assert not history.search("", words), words


def test_excerpts_show_the_words() -> None:
    text = "a " * 200 + "NEEDLE" + " b" * 200
    assert "NEEDLE" in excerpt(text, ["needle"])
    assert len(excerpt(text, ["needle"])) < 200


def test_deleted_text_is_gone_from_the_file(history: History) -> None:
    history.save_message("", TALK, message("a", "a very secret sentence"))
    history.delete("", TALK)
    history.close()
    data = b"".join(file.read_bytes() for file in history.path.parent.iterdir())
    assert b"very secret" not in data
    assert History(history.path).search("", "secret") == []


def test_the_file_is_readable_by_its_user_alone(history: History) -> None:
    history.save_message("", TALK, message("a", "x"))
    for file in history.path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file


def test_threads_and_processes_share_the_file(history: History) -> None:
    other = History(history.path)

    def write(store: History, name: str) -> None:
        for number in range(20):
            store.save_message("", f"{name}-talk-{name}", message(f"{name}{number}", "x"))

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, [history, other], "ab"))
    assert [len(other.messages("", talk.id)) for talk in history.conversations("")] == [20, 20]


def test_a_file_that_is_no_history_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(HistoryError, match="cannot be used"):
        History(path)
    assert path.read_bytes() == b"not a database at all" * 100
    newer = tmp_path / "newer.db"
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(HistoryError, match="newer mlxinfer"):
        History(newer)


def test_a_server_goes_on_without_a_history_that_it_cannot_use(tmp_path: Path) -> None:
    damaged = tmp_path / "history.db"
    damaged.write_bytes(b"no database" * 1000)
    history = History(damaged, keeps_on=True)
    history.save_conversation("", "conversation-1", title="x")
    assert [conversation.title for conversation in history.conversations("")] == ["x"]
    assert [conversation for conversation in tmp_path.iterdir() if ".damaged-" in conversation.name]
    history.close()
    (tmp_path / "home").write_text("in the way")
    history = History(tmp_path / "home" / "history.db", keeps_on=True)
    with pytest.raises(HistoryError):
        history.conversations("")
    (tmp_path / "home").unlink()
    assert history.conversations("") == []
    history.close()


def test_the_place_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_place() is None, "tests never touch the user's own"
    monkeypatch.setenv("MLXINFER_HISTORY", str(tmp_path / "x.db"))
    assert default_place() == tmp_path / "x.db"
    monkeypatch.delenv("MLXINFER_HISTORY")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_place() == tmp_path / "mlxinfer" / "history.db"


def pictured(id: str, *urls: str | None, parent: str | None = None) -> StoredMessage:
    pictures = [{"name": f"{place}.png", "url": url} for place, url in enumerate(urls)]
    details = {"pictures": pictures, "other": 1}
    return dataclasses.replace(message(id, "Look", parent), details=details)


def test_pictures_come_back_beside_their_messages(history: History) -> None:
    url = "data:image/png;base64,QUJD"
    first = pictured("a", url, None, url + "RA==")
    history.save_message("", TALK, first)
    history.save_message("", TALK, message("b", "Yes", "a", "assistant"))
    history.save_message("", TALK, first)  # saved again: they are not kept twice
    assert [item.details for item in history.messages("", TALK)] == [first.details, {}]
    with sqlite3.connect(history.path) as db:
        assert db.execute("SELECT count(*) FROM pictures").fetchone() == (2,)
        assert "QUJD" not in db.execute("SELECT details FROM messages").fetchone()[0]
    assert text_sent(first) == "".join(f"[picture: {n}.png]\n\n" for n in range(3)) + "Look"
    history.delete("", TALK)
    assert b"QUJD" not in history.path.read_bytes()


def test_oldest_pictures_are_forgotten(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "data:image/png;base64," + "A" * 978  # 1,000 bytes
    monkeypatch.setattr("mlxinfer.history.MAX_PICTURE_BYTES", 3500)
    history.save_message("other", "another-1", pictured("other", url, url))
    for number in range(5):
        history.save_message("", f"talk-{number:04}", pictured(f"{number}", url))
    kept = [
        history.messages("", f"talk-{number:04}")[0].details["pictures"][0]["url"] is not None
        for number in range(5)
    ]
    assert kept == [False, False, True, True, True]
    (others,) = history.messages("other", "another-1")
    assert [picture["url"] for picture in others.details["pictures"]] == [url, url]
    (forgotten,) = history.messages("", "talk-0000")
    assert (forgotten.content, forgotten.details["other"]) == ("Look", 1)


def test_a_file_of_an_older_version_keeps_pictures_too(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    History(path).close()
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE pictures")
    history = History(path)
    history.save_message("", TALK, pictured("a", "data:image/png;base64,QUJD"))
    (result,) = history.messages("", TALK)
    assert result.details["pictures"][0]["url"] == "data:image/png;base64,QUJD"


def test_a_message_of_pictures_alone_names_its_conversation(history: History) -> None:
    only = dataclasses.replace(pictured("a", None), content="")
    history.save_message("", TALK, only)
    assert history.conversation("", TALK).title == "0.png"
