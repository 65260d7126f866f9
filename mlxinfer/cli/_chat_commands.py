"""The /commands of a chat: text in, a Reply out. Knows the session, not the terminal."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import InvalidRequestError
from ._chat_session import ChatSession, check_setting
from ._output import table


@dataclass(frozen=True, slots=True)
class Reply:
    """What the loop has to do after a command."""

    text: str = ""  # show it
    ask: str | None = None  # send this message
    edit: str | None = None  # let the user change this text, then send it
    quit: bool = False


Run = Callable[[ChatSession, str], Reply]


def is_command(line: str) -> bool:
    """Whether a line is for us; '//' starts a message that begins with '/'."""
    return line.startswith("/") and not line.startswith("//")


def run_command(session: ChatSession, line: str) -> Reply:
    """Do what `line` says.

    Raises:
        InvalidRequestError: no such command, or its argument is missing or wrong.
        MlxinferError, OSError: what models and files raise.
    """
    name, _, argument = line[1:].partition(" ")
    if name not in COMMANDS:
        raise InvalidRequestError(
            f"There is no /{name}; /help lists what there is, and // sends a text that begins so."
        )
    return COMMANDS[name][1](session, argument.strip())


def _help(_: ChatSession, __: str) -> Reply:
    rows = [(f"/{name} {usage}".rstrip(), text) for name, (usage, _, text) in COMMANDS.items()]
    keys = "End a line with \\ (or press Alt-Enter) to go on in the next. Ctrl-C stops an answer."
    texts = "A message that begins with / is written with two: //tmp is a folder."
    return Reply(f"{table(rows)}\n\n{keys}\n{texts}")


def _model(session: ChatSession, name: str) -> Reply:
    if name:
        session.switch(name)
    return Reply(f"model: {session.model}")


def _system(session: ChatSession, text: str) -> Reply:
    if text:
        session.system = None if text == "off" else text
    return Reply(f"system: {session.system or 'none'}")


def _set(session: ChatSession, argument: str) -> Reply:
    key, _, value = argument.partition(" ")
    if value:
        session.set(key, value.strip())
    elif key:
        check_setting(key)
    settings = [(f.name, str(getattr(session.params, f.name))) for f in fields(session.params)]
    return Reply(table([row for row in settings if not key or row[0] == key]))


def _clear(session: ChatSession, _: str) -> Reply:
    session.messages.clear()
    return Reply("The conversation is empty.")


def _regen(session: ChatSession, _: str) -> Reply:
    return Reply(ask=_last_question(session))


def _edit(session: ChatSession, text: str) -> Reply:
    last = _last_question(session)
    return Reply(ask=text) if text else Reply(edit=last)


def _save(session: ChatSession, name: str) -> Reply:
    path = _path(name, "/save")
    session.save(path)
    return Reply(f"saved {len(session.messages)} messages to {path}")


def _load(session: ChatSession, name: str) -> Reply:
    path = _path(name, "/load")
    session.load(path)
    return Reply(f"loaded {len(session.messages)} messages")


def _stats(session: ChatSession, _: str) -> Reply:
    rows = list(_flat("", session.llm.stats()))
    if session.last is not None:
        rows.insert(0, ("last answer", session.last.summary))
    return Reply(table(rows))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """{"a": [{"b": 1}]} -> ("a.0.b", "1")"""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            yield from _flat(f"{name}.{key}" if name else str(key), item)
    else:
        yield name, str(value)


def _quit(_: ChatSession, __: str) -> Reply:
    return Reply(quit=True)


COMMANDS: dict[str, tuple[str, Run, str]] = {
    "help": ("", _help, "this list"),
    "model": ("[NAME]", _model, "show the model, or go on with another"),
    "system": ("[TEXT|off]", _system, "show or change the system message"),
    "set": ("[KEY [VALUE]]", _set, "show or change how tokens are chosen"),
    "clear": ("", _clear, "forget the conversation"),
    "regen": ("", _regen, "answer the last message again"),
    "edit": ("[TEXT]", _edit, "change the last message and send it again"),
    "save": ("FILE", _save, "write the conversation to a file"),
    "load": ("FILE", _load, "read it back"),
    "stats": ("", _stats, "counters of the engine"),
    "quit": ("", _quit, "leave (or Ctrl-D)"),
}


def _last_question(session: ChatSession) -> str:
    text = session.take_back()
    if text is None:
        raise InvalidRequestError("There is no message to send again.")
    return text


def _path(name: str, command: str) -> Path:
    if not name:
        raise InvalidRequestError(f"Usage: {command} FILE")
    if "\0" in name:
        raise InvalidRequestError("A file name holds no NUL character.")
    return Path(name).expanduser()
