"""ChatSession: messages and settings, without a terminal."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM

from mlxinfer.cli._chat_session import ChatSession
from mlxinfer.errors import InvalidRequestError, ModelNotFoundError, OverloadedError


@pytest.fixture
def llm(tmp_path: Path) -> FakeLLM:
    return FakeLLM(tmp_path / "model")


@pytest.fixture
def session(llm: FakeLLM) -> ChatSession:
    return ChatSession("fake", lambda _: llm)


def contents(session: ChatSession) -> list[str]:
    return [message["content"] for message in session.messages]


def test_a_turn_adds_question_and_answer(session: ChatSession, llm: FakeLLM) -> None:
    assert "".join(delta.text for delta in session.ask("hi")) == "Hello there."
    assert session.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello there."},
    ]
    assert session.last is not None
    session.system = "Be brief."
    list(session.ask("more"))
    assert [m["role"] for m in llm.asked[1][0]] == ["system", "user", "assistant", "user"]  # type: ignore[attr-defined]


def test_leaving_early_keeps_what_came_and_ends_the_stream(
    session: ChatSession, llm: FakeLLM
) -> None:
    deltas = session.ask("hi")
    next(deltas)
    deltas.close()
    assert contents(session) == ["hi", "Hello "]
    assert llm.ended_streams == 1


def test_ctrl_c_inside_the_model_keeps_what_came(session: ChatSession, llm: FakeLLM) -> None:
    llm.fail_after = 1
    with pytest.raises(KeyboardInterrupt):
        list(session.ask("hi"))
    assert contents(session) == ["hi", "Hello "]


def test_a_failed_question_is_taken_out(session: ChatSession, llm: FakeLLM) -> None:
    llm.fail_after, llm.error = 1, OverloadedError("full")
    with pytest.raises(OverloadedError):
        list(session.ask("hi"))
    assert session.messages == []


def test_a_stream_that_was_never_started_leaves_no_trace(session: ChatSession) -> None:
    session.ask("hi").close()
    assert session.messages == []


def test_take_back(session: ChatSession) -> None:
    assert session.take_back() is None
    list(session.ask("one"))
    list(session.ask("two"))
    assert session.take_back() == "two"
    assert contents(session) == ["one", "Hello there."]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("temperature", "0.5", 0.5),
        ("max_tokens", "null", None),
        ("stop", "END", ("END",)),
        ("stop", '["a", "b"]', ("a", "b")),
        ("ignore_eos", "true", True),
        ("logit_bias", '{"3": 1.5}', {3: 1.5}),
    ],
)
def test_settings(session: ChatSession, key: str, value: str, expected: Any) -> None:
    session.set(key, value)
    assert getattr(session.params, key) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", "-1"),
        ("colour", "3"),
        ("logit_bias", '{"a": 1}'),
        ("logit_bias", '{"-1": 1}'),
        ("logit_bias", "3"),
    ],
)
def test_settings_that_are_refused_change_nothing(
    session: ChatSession, key: str, value: str
) -> None:
    before = session.params
    with pytest.raises(InvalidRequestError, match=key):
        session.set(key, value)
    assert session.params == before


def test_save_and_load(session: ChatSession, tmp_path: Path) -> None:
    session.system = "sys"
    list(session.ask("grüezi"))
    session.save(tmp_path / "talk.json")
    other = ChatSession("other", session.open_model)
    other.load(tmp_path / "talk.json")
    assert (other.messages, other.system, other.model) == (session.messages, "sys", "other")
    assert list(tmp_path.glob("*.partial")) == []


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        '{"messages": 3, "system": null}',
        '{"messages": [{"role": "root", "content": ""}], "system": null}',
    ],
)
def test_load_refuses_other_files(session: ChatSession, tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(InvalidRequestError, match="conversation that /save wrote"):
        session.load(tmp_path / "x")
    with pytest.raises(InvalidRequestError, match="is not there; /load takes"):
        session.load(tmp_path / "y")


def test_switching_frees_the_old_model_first(session: ChatSession, llm: FakeLLM) -> None:
    list(session.ask("hi"))
    session.switch("other")
    assert (session.model, llm.closed) == ("other", 1)
    assert len(session.messages) == 2


def test_a_switch_that_fails_keeps_the_conversation_going(llm: FakeLLM) -> None:
    def open_model(name: str) -> FakeLLM:
        if name == "none":
            raise ModelNotFoundError("no such model")
        return llm

    session = ChatSession("fake", open_model)
    with pytest.raises(ModelNotFoundError):
        session.switch("none")
    assert session.model == "fake"
    assert list(session.ask("hi"))


def test_saving_follows_links_and_replaces_nothing_but_files(
    session: ChatSession, tmp_path: Path
) -> None:
    list(session.ask("hi"))
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    session.save(link)
    assert link.is_symlink()
    assert "Hello" in real.read_text()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for wrong in (tmp_path, pipe, tmp_path / "no" / "such.json"):
        with pytest.raises(InvalidRequestError, match=re.escape(f"{wrong} ")) as caught:
            session.save(wrong)
        assert ".partial" not in str(caught.value)
    with pytest.raises(InvalidRequestError, match="no file"):
        session.load(pipe)
    assert pipe.is_fifo()


def test_a_disk_that_fills_up_leaves_what_was_saved_before(
    session: ChatSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "talk.json"
    session.save(path)
    before = path.read_text()
    list(session.ask("hi"))

    def full(self: Path, *_: object, **__: object) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InvalidRequestError, match="No space left"):
        session.save(path)
    assert path.read_text() == before
    assert list(tmp_path.glob("*.partial")) == []


def test_a_setting_is_checked_against_the_vocabulary_once_it_is_known(session: ChatSession) -> None:
    session.set("top_k", "5000")
    list(session.ask("hi"))
    with pytest.raises(InvalidRequestError, match="vocabulary has 100"):
        session.set("top_k", "6000")
    assert session.params.top_k == 5000
