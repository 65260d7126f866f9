"""`mlxinfer history`, and chats that are kept and gone on with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM

from mlxinfer.history import History, StoredMessage, owner_of_key

TALK = "conversation-of-the-page"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "history.db"
    monkeypatch.setenv("MLXINFER_HISTORY", str(path))
    monkeypatch.delenv("MLXINFER_API_KEY", raising=False)
    return path


@pytest.fixture
def stored(place: Path) -> History:
    """A conversation with two answers to one question, the second of them shown."""
    history = History(place)
    files = {"attachments": [{"name": "a.txt", "text": "inside"}]}
    for id, parent, role, text in [
        ("question", None, "user", "What is a zebra?"),
        ("answer-1", "question", "assistant", "A horse."),
        ("answer-2", "question", "assistant", "A striped animal."),
    ]:
        details = files if role == "user" else {}
        message = StoredMessage(id=id, parent=parent, role=role, content=text, details=details)
        history.save_message("", TALK, message)
    history.save_conversation("", TALK, model="served-name", settings={"system": "Be brief."})
    return history


def test_list_show_and_search(outcome: Any, stored: History) -> None:
    listed = outcome("history", "list")
    assert "What is a zebra?" in listed.out
    assert outcome.json("history", "list")["conversations"][0]["id"] == TALK
    shown = outcome("history", "show").out
    assert "> Be brief." in shown
    assert "A striped animal." in shown
    assert "A horse." not in shown
    assert '<file name="a.txt">' in shown
    assert "A horse." in outcome("history", "search", "horse").out
    assert outcome("history", "show", TALK[:10]).out == shown
    [exported] = outcome.json("history", "show", "--all")
    assert [m["content"] for m in exported["messages"]][1:] == ["A horse.", "A striped animal."]


def test_rm_deletes_for_good(outcome: Any, stored: History) -> None:
    assert outcome("history", "rm").code == 2
    assert outcome("history", "rm", "nothing").code == 1
    assert outcome("history", "rm", "last").code == 2  # there is nobody to ask
    assert outcome("history", "rm", "last", "--yes").code == 0
    assert stored.conversations("") == []


def test_only_the_keys_own_conversations_are_shown(
    outcome: Any, stored: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXINFER_API_KEY", "secret")
    assert "zebra" not in outcome("history", "list").out
    message = StoredMessage(id="a-message", parent=None, role="user", content="of the key")
    stored.save_message(owner_of_key("secret"), "talk-of-the-key", message)
    assert "of the key" in outcome("history", "list").out


def test_without_a_history_the_commands_say_so(outcome: Any) -> None:
    seen = outcome("history", "list")
    assert (seen.code, "MLXINFER_HISTORY is `off`" in seen.err) == (1, True)
    assert outcome("chat", "-c").code == 1


@pytest.fixture
def talk(outcome: Any, stdin: Any) -> Callable[..., Any]:
    """talk("typed", "-c") -> the outcome of a chat."""

    def chat(typed: str, *args: str) -> Any:
        stdin(typed.encode())
        return outcome("chat", *args)

    return chat


def test_chat_goes_on_with_the_newest_conversation_and_keeps_both(
    fake: FakeLLM, stored: History, talk: Any
) -> None:
    assert talk("Which?\n", "-c", "no-such-id").code == 1
    assert talk("And an okapi?\n", "-c", TALK[:12]).code == 0
    sent: Any = fake.asked[-1][0]
    assert [m["content"] for m in sent][:1] == ["Be brief."]
    assert "inside" in sent[1]["content"]
    assert [m["content"] for m in sent][2:] == ["A striped animal.", "And an okapi?"]
    branch = stored.branch("", TALK)
    assert [m.content for m in branch][:3] == [
        "What is a zebra?",
        "A striped animal.",
        "And an okapi?",
    ]
    assert branch[-1].role == "assistant"
    assert branch[-1].content


def test_run_resumes_the_newest_conversation(fake: FakeLLM, outcome: Any, stored: History) -> None:
    assert outcome("run", "-c", "And an okapi?").code == 0
    sent: Any = fake.asked[-1][0]
    assert [m["content"] for m in sent][2:] == ["A striped animal.", "And an okapi?"]
    assert stored.branch("", TALK)[-1].role == "assistant"


def test_run_keeps_its_last_answer_and_what_somebody_goes_on_with(
    fake: FakeLLM, outcome: Any, stored: History
) -> None:
    for question in ("First", "Second"):
        assert outcome("run", question).code == 0
    assert outcome("run", "--no-history", "Unseen").code == 0
    assert [c.title for c in stored.conversations("")] == ["Second", "What is a zebra?"]
    assert outcome("run", "-c", "And then?").code == 0
    assert [m["content"] for m in fake.asked[-1][0]][0::2] == ["Second", "And then?"]
    assert outcome("run", "Third").code == 0
    assert [c.title for c in stored.conversations("")] == ["Third", "Second", "What is a zebra?"]


def test_no_history_goes_on_without_keeping(fake: FakeLLM, stored: History, talk: Any) -> None:
    assert talk("Unseen\n", "-c", "--no-history").code == 0
    assert len(stored.messages("", TALK)) == 3


def test_another_try_and_an_edit_are_branches(fake: FakeLLM, stored: History, talk: Any) -> None:
    assert talk("One\n/regen\n/edit Two\n/clear\nNew\n", "-c").code == 0
    messages = stored.messages("", TALK)
    questions = [m for m in messages if m.role == "user"][1:]
    assert [m.content for m in questions] == ["One", "One", "Two"]
    assert {m.parent for m in questions} == {"answer-2"}
    assert [c.title for c in stored.conversations("")] == ["New", "What is a zebra?"]


def test_chats_of_scripts_are_not_kept(fake: FakeLLM, place: Path, talk: Any) -> None:
    assert talk("Hello\n").code == 0
    assert not place.exists()
