"""A conversation: messages, settings, the model that answers. Knows no terminal."""

import json
import os
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..core import SamplingParams
from ..errors import InvalidRequestError, TemplateError
from ..session.results import Delta, Result

Message = dict[str, str]
FORMAT = 1  # of saved conversations


@dataclass(slots=True)
class ChatSession:
    """What a chat is made of. `open_model` turns a name into an LLM."""

    model: str
    open_model: Callable[[str], Any]
    params: SamplingParams = field(default_factory=SamplingParams)
    system: str | None = None
    messages: list[Message] = field(default_factory=list)  # user and assistant, in turn
    last: Result | None = None
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
        """Go on with another model; on failure the one before is loaded again when needed.

        The old one goes first: two large models at once may not fit.
        """
        self.close()
        self._llm = self._opened(model)
        self.model = model

    def ask(self, text: str) -> Generator[Delta, None, None]:
        """Add a user message and stream the answer.

        Closing the stream early, or Ctrl-C, keeps what came so far as the answer. An error takes
        the question out again: it must not spoil the next one.
        """
        self.messages.append({"role": "user", "content": text})
        prompt = [{"role": "system", "content": self.system}] if self.system is not None else []
        answer, self.last = "", None
        try:
            for delta in self.llm.stream_chat([*prompt, *self.messages], self.params):
                answer += delta.text
                self.last = delta.result
                yield delta
        except Exception:
            self.messages.pop()
            raise
        except (GeneratorExit, KeyboardInterrupt):
            self._add_answer(answer)
            raise
        self._add_answer(answer)

    def take_back(self) -> str | None:
        """Remove the last user message and its answer. Returns the message, or None."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def set(self, key: str, value: str) -> None:
        """Change one sampling parameter; `value` is JSON, or text for `stop`.

        Raises:
            InvalidRequestError: no such parameter, or out of range.
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
            InvalidRequestError: nothing can be written there.
        """
        state = {
            "format": FORMAT,
            "model": self.model,
            "system": self.system,
            "messages": self.messages,
        }
        _write_whole(path, json.dumps(state, indent=2, ensure_ascii=False))

    def load(self, path: Path) -> None:
        """Read a saved conversation; the model that is loaded stays.

        Raises:
            InvalidRequestError: the file holds something else.
        """
        try:
            state = json.loads(_read_file(path))
            messages = [
                {"role": _role(m["role"]), "content": str(m["content"])} for m in state["messages"]
            ]
            system = state["system"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidRequestError(f"{path} is not a saved conversation: {error}") from error
        self.messages, self.system = messages, None if system is None else str(system)

    def _opened(self, model: str) -> Any:
        """A model, if it is one that can hold a conversation."""
        from ._inspect import has_chat_template

        llm = self.open_model(model)
        if has_chat_template(llm.model_info.path):
            return llm
        llm.close()
        raise TemplateError(
            f"{model} has no chat template: it was not made for conversations. "
            "`mlxinfer run` has it continue a text."
        )

    def _add_answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})


def check_setting(key: str) -> None:
    """Raise InvalidRequestError unless SamplingParams has such a field."""
    known = [f.name for f in fields(SamplingParams)]
    if key not in known:
        near = get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]}" if near else f"there are: {', '.join(known)}"
        raise InvalidRequestError(f"{key!r} cannot be set; {hint}{'?' if near else '.'}")


def _write_whole(path: Path, text: str) -> None:
    """Replace a file, or the one that a link leads to; what is no file is left alone."""
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
    """The text of a file, which ends: pipes and devices may not."""
    if path.exists() and not path.is_file():
        raise InvalidRequestError(f"{path} is no file.")
    return path.read_text(encoding="utf-8")


def _role(value: object) -> str:
    if value not in ("user", "assistant"):
        raise ValueError(f"role {value!r}")
    return str(value)
