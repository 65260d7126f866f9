"""The /commands of a chat. No terminal: what is to be shown is returned."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import InvalidRequestError
from ..memory import human_bytes
from ._asking import thinking
from ._chat_session import ChatSession, check_setting
from ._output import counted, table
from ._terminal import copy


@dataclass(frozen=True, slots=True)
class Reply:
    """What the chat's loop has to do after a command."""

    text: str = ""  # show it
    ask: str | None = None  # send this message
    edit: str | None = None  # let the user change this text, then send it
    quit: bool = False


Run = Callable[[ChatSession, str], Reply]


def is_command(line: str) -> bool:
    """Whether a line is a command; '//' starts a message that begins with '/'."""
    return line.startswith("/") and not line.startswith("//")


def run_command(session: ChatSession, line: str) -> Reply:
    """Run the command of a line.

    Raises:
        InvalidRequestError: there is no such command, or its argument is missing or wrong.
        MlxinferError, OSError: those of models and files.
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
    session.clear()
    return Reply("The conversation is empty.")


def _regen(session: ChatSession, _: str) -> Reply:
    return Reply(ask=_last_question(session))


def _edit(session: ChatSession, text: str) -> Reply:
    last = _last_question(session)
    return Reply(ask=text) if text else Reply(edit=last)


def _stats(session: ChatSession, _: str) -> Reply:
    stats, info = session.llm.stats(), session.llm.model_info
    last = session.last.summary if session.last is not None else "no answer yet"
    read = stats.get("prompt_tokens_computed", 0) + stats.get("prompt_tokens_reused", 0)
    reused = stats.get("prompt_tokens_reused", 0)
    speculation = stats.get("speculation") or {}
    rows = [
        ("model", f"{info.name}, {info.summary}"),
        ("chat", f"{counted(len(session.messages), 'message')}, {session.params.words}"),
        ("last answer", last),
        ("memory", _memory(stats)),
        (
            "saved",
            f"{reused:,} of {read:,} prompt tokens found in the cache, "
            f"{speculation.get('accepted', 0):,} tokens verified ahead",
        ),
    ]
    return Reply(table(rows))


def _memory(stats: dict[str, Any]) -> str:
    """The KV cache, used of its limit, and what MLX holds altogether."""
    limit = sum(group["pages"] * group["page_bytes"] for group in stats.get("groups", ()))
    used = stats.get("kv_bytes_held", 0) + stats.get("kv_bytes_cached", 0)
    held = human_bytes(stats.get("active_memory_bytes", 0))
    return f"{held} in use; KV cache {human_bytes(used)} of {human_bytes(limit)}"


def _think(session: ChatSession, word: str) -> Reply:
    wishes = {"": session.think, "on": True, "off": False, "auto": None}
    if word not in wishes:
        raise InvalidRequestError("Usage: /think [on|off|auto]")
    thinking(session.llm, wishes[word])
    session.think = wishes[word]
    named = {None: "as the model does by itself", True: "on", False: "off"}
    return Reply(f"thinking: {named[session.think]}")


def _copy(session: ChatSession, _: str) -> Reply:
    answers = [m["content"] for m in session.messages if m["role"] == "assistant"]
    if not answers:
        raise InvalidRequestError("There is no answer to copy.")
    return Reply(f"{copy(answers[-1])}: {len(answers[-1])} characters")


def _file(session: ChatSession, name: str) -> Reply:
    if not name:
        raise InvalidRequestError("Usage: /file FILE")
    if "\0" in name:
        raise InvalidRequestError("A file name holds no NUL character.")
    count = session.attach(Path(name).expanduser())
    return Reply(f"{count:,} characters go with the next message")


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
    "file": ("FILE", _file, "send a text along with the next message"),
    "think": ("[on|off|auto]", _think, "whether a model that can think does"),
    "copy": ("", _copy, "the last answer, to the clipboard"),
    "stats": ("", _stats, "the model, the last answer, memory"),
    "quit": ("", _quit, "leave (or Ctrl-D)"),
}


def _last_question(session: ChatSession) -> str:
    text = session.take_back()
    if text is None:
        raise InvalidRequestError("There is no message to send again.")
    return text
