"""The chat loop: what is typed, what is shown. Keys and screen are fakes."""

import io
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM
from rich.console import Console

from mlxinfer.cli import chat
from mlxinfer.cli._chat_session import COMMANDS, ChatSession
from mlxinfer.cli.chat import converse
from mlxinfer.errors import ContextLengthError, OverloadedError


class Typist:
    """A reader that types prepared lines; an exception class among them is raised."""

    def __init__(self, *lines: Any) -> None:
        self.lines = [*lines, EOFError]
        self.defaults: list[str] = []

    def __call__(self, default: str) -> str:
        self.defaults.append(default)
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        raise line


def talk(session: ChatSession, *lines: Any) -> str:
    screen = io.StringIO()
    converse(session, Typist(*lines), Console(file=screen, width=80))
    return screen.getvalue()


def test_answers_are_shown(session: ChatSession) -> None:
    assert talk(session, "hi", "", "again", "/quit", "no more") == "Hello there.\nHello there.\n"
    assert len(session.messages) == 4


@pytest.mark.parametrize("word", ["/exit", "/bye"])
def test_words_of_other_programs_leave_the_chat(session: ChatSession, word: str) -> None:
    assert talk(session, "hi", word, "no more") == "Hello there.\n"


def test_ctrl_c_stops_the_answer_and_not_the_chat(
    session: ChatSession, llm: FakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.fail_after = 1
    assert talk(session, "hi", "/clear") == "Hello \nThe conversation is empty.\n"
    assert "stopped" in capsys.readouterr().err


def test_ctrl_c_twice_at_the_prompt_leaves(session: ChatSession) -> None:
    assert talk(session, KeyboardInterrupt, KeyboardInterrupt, "hi") == ""
    assert talk(session, KeyboardInterrupt, "hi", KeyboardInterrupt, "hi").count("Hello") == 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OverloadedError("full"), "error: full\n"),
        (ContextLengthError("too long"), "error: too long\n/clear forgets"),
        (ZeroDivisionError("oops"), "error: unexpected ZeroDivisionError"),  # a bug of ours
    ],
)
def test_an_error_ends_only_the_turn(
    session: ChatSession,
    llm: FakeLLM,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    said: str,
) -> None:
    talk(session, "hi")
    llm.fail_after, llm.error = 0, error
    talk(session, "again")
    assert capsys.readouterr().err.startswith(said)
    assert len(session.messages) == 2


def test_a_line_that_is_wrong_is_named(
    session: ChatSession, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["/nonsense", "/set temperature hot", "/file /no/such/folder/x", "/set temprature 1"]
    talk(session, *lines, "/set temprature")
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors[0].startswith("error: There is no /nonsense; /help lists")
    assert "temperature" in errors[1]
    assert "/no/such/folder" in errors[2]
    assert [error.count("did you mean temperature?") for error in errors[3:]] == [1, 1]
    assert session.messages == []


def test_ctrl_c_while_a_model_loads_stops_only_that(llm: FakeLLM) -> None:
    def open_model(name: str) -> FakeLLM:
        if name == "huge":
            raise KeyboardInterrupt
        return llm

    session = ChatSession("fake", open_model)
    assert talk(session, "/model huge", "hi") == "Hello there.\n"
    assert session.model == "fake"


def test_two_slashes_send_one(session: ChatSession) -> None:
    talk(session, "//etc is a folder")
    assert session.messages[0]["content"] == "/etc is a folder"


def test_regen_repeats_the_request(session: ChatSession, llm: FakeLLM) -> None:
    assert talk(session, "hi", "/regen").count("Hello") == 2
    assert len(session.messages) == 2
    assert llm.asked[0][0] == llm.asked[1][0]


def test_edit_offers_the_last_message(session: ChatSession) -> None:
    typist = Typist("first", "/edit", "better", "/edit best")
    converse(session, typist, Console(file=io.StringIO()))
    assert typist.defaults[:4] == ["", "", "first", ""]
    assert [m["content"] for m in session.messages if m["role"] == "user"] == ["best"]


def test_help_settings_and_system_and_model(session: ChatSession) -> None:
    assert [name for name in COMMANDS if f"/{name}" not in talk(session, "/help")] == []
    assert "temperature  0.5" in talk(session, "/set temperature 0.5")
    assert "top_k" in talk(session, "/set")
    assert talk(session, "/set top_k") == "top_k  0\n"
    assert talk(session, "/system [red]x[/red]") == "system: [red]x[/red]\n"  # no markup
    assert talk(session, "/system off") == "system: none\n"
    assert session.system is None
    assert talk(session, "/model") == "model: fake\n"
    assert talk(session, "/model other") == "model: other\n"


def test_a_model_without_a_chat_template_is_refused_at_once(
    fake: FakeLLM, tmp_path: Path, outcome: Any
) -> None:
    fake.model_info = FakeLLM(tmp_path / "base", template=False).model_info
    seen = outcome("chat", "-m", "base")
    assert (seen.code, fake.asked, fake.closed) == (1, [], 1)
    assert seen.err.startswith("error: base has no chat template")


def test_stats_are_shown_and_clear_empties_the_chat(session: ChatSession) -> None:
    shown = talk(session, "hi", "/stats", "/clear")
    assert "7 prompt + 2 answer tokens" in shown
    assert "5.0 MB in use; KV cache 3.0 kB of 8.0 kB" in shown
    assert "80 of 100 prompt tokens found in the cache, 1 token verified ahead" in shown
    assert session.messages == []


def test_reasoning_is_shown_on_a_terminal_only(session: ChatSession, llm: FakeLLM) -> None:
    llm.thinks = "hm hm"
    assert talk(session, "hi") == "Hello there.\n"
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=40, no_color=True)
    converse(session, Typist("hi"), terminal)
    shown = screen.getvalue()
    assert shown.index("hm hm") < shown.rindex("Hello there.")


def test_chat_reads_stdin(fake: FakeLLM, outcome: Any, stdin: Any) -> None:
    stdin(b"first \\\nsecond\n/quit\n")
    seen = outcome("chat", "--temperature", "0.3")
    assert (seen.code, seen.out, seen.err) == (0, "Hello there.\n", "")
    messages, params = fake.asked[0]
    assert messages == [{"role": "user", "content": "first \nsecond"}]
    assert params.temperature == 0.3
    assert fake.closed == 1


def test_history_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = chat.history_file()
    assert path == tmp_path / "mlxinfer" / "chat_history"
    assert path.stat().st_mode & 0o077 == 0


def test_a_chat_needs_no_place_for_its_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    history = chat._open_history()
    assert "what you type is not remembered" in capsys.readouterr().err
    history.append_string("one")
    assert history.get_strings() == ["one"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is always full")
def test_a_full_disk_ends_no_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "history_file", lambda: Path("/dev/full"))
    history = chat._open_history()
    history.append_string("one")
    assert history.get_strings() == ["one"]


def test_keys_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter sends; a backslash before it, or Alt, makes a new line; the default can be edited."""
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        read = chat.terminal_reader(COMMANDS)
        keys.send_text("one\\\rtwo\x1b\rthree\r")
        assert read("") == "one\ntwo\nthree"
        keys.send_text("!\r")
        assert read("again") == "again!"
        keys.send_text("\x03")
        with pytest.raises(KeyboardInterrupt):
            read("")
        keys.send_text("\x04")
        with pytest.raises(EOFError):
            read("")
    assert "+one" in chat.history_file().read_text()


def test_no_input_line_crashes_the_chat(
    session: ChatSession, llm: FakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = "[" * 100_000
    lines = ["/file .", "/file a\0b", f"/set logit_bias {deep}", "/set top_k 1" + "0" * 99]
    assert talk(session, "hi", *lines, "again") == "Hello there.\nHello there.\n"
    assert len(session.messages) == 4
    errors = capsys.readouterr().err
    assert errors.count("error: ") == len(lines)
    assert "unexpected" not in errors
    assert len(errors) < 2000


def test_a_failed_turn_sets_the_exit_code(fake: FakeLLM, outcome: Any, stdin: Any) -> None:
    for typed, code in ((b"hi\n", 0), (b"hi\n/nonsense\nhi\n", 1)):
        stdin(typed)
        assert outcome("chat").code == code


def test_files_and_the_switch_of_thinking_go_with_a_message(
    session: ChatSession, llm: FakeLLM, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("one\n```\ntwo\n")
    talk(session, f"/file {tmp_path / 'notes.txt'}", "/think off", "What is in it?", "And now?")
    first, second = (messages for messages, _ in llm.asked)
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert first[0]["content"] == "What is in it?\n\nnotes.txt:\n````\none\n```\ntwo\n````"
    assert second[-1]["content"] == "And now?"
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert llm.options == [off, off]


def test_a_switch_that_the_model_has_not_is_an_error(
    session: ChatSession, llm: FakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.model_info.thinking = ()
    talk(session, "/think on", "hi")
    assert "fake has no switch for thinking" in capsys.readouterr().err
    assert llm.options == [{}]
