"""A conversation (messages, settings, model) and the /commands of a chat. No terminal."""

import json
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..core import SamplingParams
from ..errors import InvalidRequestError, TemplateError
from ..outputs import Delta, Result
from ._chat_log import ChatLog
from ._output import table

Message = dict[str, str]
FORMAT = 1  # of saved conversations


@dataclass(slots=True)
class ChatSession:
    """The messages, settings and model of a chat. `open_model` turns a name into an LLM."""

    model: str
    open_model: Callable[[str], Any]
    params: SamplingParams = field(default_factory=SamplingParams)
    system: str | None = None
    messages: list[Message] = field(default_factory=list)  # user and assistant, in turn
    last: Result | None = None
    log: ChatLog | None = None  # where the conversation is kept
    _llm: Any = None

    @property
    def llm(self) -> Any:
        """The model, loaded when it is first needed."""
        if self._llm is None:
            self._llm = self._opened(self.model)
        return self._llm

    def close(self) -> None:
        """Free the model."""
        if self._llm is not None:
            self._llm.close()
            self._llm = None

    def switch(self, model: str) -> None:
        """Continue with another model; if that fails, the previous one is loaded when needed.

        The old model is freed first: two large models may not fit in memory together.
        """
        self.close()
        self._llm = self._opened(model)
        self.model = model

    def ask(self, text: str) -> Generator[Delta, None, None]:
        """Add a user message and stream the answer.

        If the stream is closed early, or by Ctrl-C, the text so far is kept as the answer. An error
        removes the question again, so that it does not affect the next one.
        """
        self._add("user", text)
        prompt = [{"role": "system", "content": self.system}] if self.system is not None else []
        answer, thoughts, self.last = "", "", None
        try:
            for delta in self.llm.stream_chat([*prompt, *self.messages], self.params):
                answer += delta.text
                thoughts += delta.reasoning or ""
                self.last = delta.result
                yield delta
        except Exception:
            self._remove()
            raise
        except (GeneratorExit, KeyboardInterrupt):
            self._add("assistant", answer, thoughts)
            raise
        self._add("assistant", answer, thoughts)

    def take_back(self) -> str | None:
        """Remove the last user message and its answer. Returns the message, or None."""
        while self.messages:
            message = self._remove()
            if message["role"] == "user":
                return message["content"]
        return None

    def set(self, key: str, value: str) -> None:
        """Change one sampling parameter; `value` is JSON, or text for `stop`.

        Raises:
            InvalidRequestError: there is no such parameter, or the value is out of range.
        """
        check_setting(key)
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = value
        if key == "logit_bias" and isinstance(parsed, dict):  # keys of JSON objects are texts
            parsed = {int(k) if k.isdecimal() else k: bias for k, bias in parsed.items()}
        params = replace(self.params, **{key: parsed})
        if self._llm is not None:
            params.check_vocabulary(self._llm.model_info.vocab_size)
        self.params = params

    def save(self, path: Path) -> None:
        """Write the conversation as JSON, all of it or nothing.

        Raises:
            InvalidRequestError: the file cannot be written.
        """
        state = {
            "format": FORMAT,
            "model": self.model,
            "system": self.system,
            "messages": self.messages,
        }
        _write_whole(path, json.dumps(state, indent=2, ensure_ascii=False))

    def load(self, path: Path) -> None:
        """Read a saved conversation; the loaded model stays.

        Raises:
            InvalidRequestError: the file holds no conversation.
        """
        try:
            state = json.loads(_read_file(path))
            messages = [
                {"role": _role(m["role"]), "content": str(m["content"])} for m in state["messages"]
            ]
            system = state["system"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidRequestError(f"{path} is not a saved conversation: {error}") from error
        self.clear()
        self.system = None if system is None else str(system)
        for message in messages:
            self._add(message["role"], message["content"])

    def clear(self) -> None:
        """Begin another conversation; a stored one stays stored."""
        self.messages.clear()
        if self.log is not None:
            self.log.begin()

    def _opened(self, model: str) -> Any:
        """Return the loaded model; raise unless it has a chat template."""
        from ._model import has_chat_template

        llm = self.open_model(model)
        if has_chat_template(llm.model_info.path):
            return llm
        llm.close()
        raise TemplateError(
            f"{model} has no chat template: it was not made for conversations. "
            "`mlxinfer run` has it continue a text."
        )

    def _add(self, role: str, text: str, thoughts: str = "") -> None:
        self.messages.append({"role": role, "content": text})
        if self.log is not None:
            self.log.add(role, text, thoughts, model=self.model, system=self.system)

    def _remove(self) -> Message:
        if self.log is not None:
            self.log.step_back()
        return self.messages.pop()


def check_setting(key: str) -> None:
    """Raise InvalidRequestError unless SamplingParams has such a field."""
    known = [f.name for f in fields(SamplingParams)]
    if key not in known:
        near = get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]}" if near else f"there are: {', '.join(known)}"
        raise InvalidRequestError(f"{key!r} cannot be set; {hint}{'?' if near else '.'}")


def _write_whole(path: Path, text: str) -> None:
    """Replace a file, or the target of a link; a path that is no file is left alone."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise InvalidRequestError(f"{path} is there and is no file; choose another name.")
    partial = target.with_name(target.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise InvalidRequestError(
            f"{path} cannot be written: {error.strerror or error}."
        ) from error


def _read_file(path: Path) -> str:
    """Return the text of a regular file; pipes and devices may never end."""
    if path.exists() and not path.is_file():
        raise InvalidRequestError(f"{path} is no file.")
    return path.read_text(encoding="utf-8")


def _role(value: object) -> str:
    if value not in ("user", "assistant"):
        raise ValueError(f"role {value!r}")
    return str(value)


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
