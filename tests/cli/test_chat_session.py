"""ChatSession: messages and settings, without a terminal."""

from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM

from mlxinfer.cli._chat_session import ChatSession, run_command
from mlxinfer.core import SamplingParams
from mlxinfer.errors import InvalidRequestError, ModelNotFoundError


def contents(session: ChatSession) -> list[str]:
    return [message["content"] for message in session.messages]


def test_leaving_early_keeps_text_and_ends_streams(session: ChatSession, llm: FakeLLM) -> None:
    deltas = session.ask("hi")
    next(deltas)
    deltas.close()
    assert contents(session) == ["hi", "Hello "]
    assert llm.ended_streams == 1


def test_a_stream_that_was_never_started_leaves_no_trace(session: ChatSession) -> None:
    session.ask("hi").close()
    assert session.messages == []


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
def test_set_reads_a_value_by_its_fields_type(
    session: ChatSession, key: str, value: str, expected: Any
) -> None:
    session.set(key, value)
    assert getattr(session.params, key) == expected
    shown = run_command(session, f"/set {key}").text
    run_command(session, f"/set {shown}")  # as it is typed
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
def test_refused_settings_change_nothing(session: ChatSession, key: str, value: str) -> None:
    before = session.params
    with pytest.raises(InvalidRequestError, match=key):
        session.set(key, value)
    assert session.params == before


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


def test_a_setting_is_checked_against_the_vocabulary_once_it_is_known(session: ChatSession) -> None:
    session.set("top_k", "5000")
    list(session.ask("hi"))
    with pytest.raises(InvalidRequestError, match="vocabulary has 100"):
        session.set("top_k", "6000")
    assert session.params.top_k == 5000


def test_undo_copy_and_save(session: ChatSession, tmp_path: Path) -> None:
    session.system = "Be brief."
    for question in ("One", "Two"):
        list(session.ask(question))
    assert "Two" in run_command(session, "/undo").text
    assert [m["content"] for m in session.messages][::2] == ["One"]
    answer = session.messages[-1]["content"]
    assert run_command(session, "/copy").copy == answer
    place = tmp_path / "talk.md"
    assert "2 messages" in run_command(session, f"/save {place}").text
    assert place.read_text() == f"> Be brief.\n\n## You\n\nOne\n\n## Assistant\n\n{answer}\n"
    with pytest.raises(FileExistsError):
        run_command(session, f"/save {place}")
    run_command(session, "/undo")
    for command in ("/undo", "/copy"):
        with pytest.raises(InvalidRequestError, match="There is no"):
            run_command(session, command)


def test_a_limit_that_nobody_reaches_is_not_told() -> None:
    with pytest.raises(InvalidRequestError, match=r"an integer of at least 1\.$"):
        SamplingParams(max_tokens=0)
    with pytest.raises(InvalidRequestError, match=r"from 1 to 9223372036854775807"):
        SamplingParams(max_tokens=1 << 63)
