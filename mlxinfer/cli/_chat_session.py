"""A conversation: messages, settings, the model that answers. Knows no terminal."""

import json
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..core import SamplingParams
from ..errors import InvalidRequestError
from ..results import Delta, Result

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
            self._llm = self.open_model(self.model)
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
        self._llm = self.open_model(model)
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
        known = [f.name for f in fields(SamplingParams)]
        if key not in known:
            raise InvalidRequestError(f"{key!r} cannot be set; there are: {', '.join(known)}.")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        if key == "logit_bias" and isinstance(parsed, dict):
            parsed = {int(token_id): bias for token_id, bias in parsed.items()}
        self.params = replace(self.params, **{key: parsed})

    def save(self, path: Path) -> None:
        """Write the conversation as JSON, all of it or nothing."""
        state = {
            "format": FORMAT,
            "model": self.model,
            "system": self.system,
            "messages": self.messages,
        }
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(state, indent=2, ensure_ascii=False), encoding="utf-8")
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        """Read a saved conversation; the model that is loaded stays.

        Raises:
            InvalidRequestError: the file holds something else.
        """
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            messages = [
                {"role": _role(m["role"]), "content": str(m["content"])} for m in state["messages"]
            ]
            system = state["system"]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequestError(f"{path} is not a saved conversation: {error}") from error
        self.messages, self.system = messages, None if system is None else str(system)

    def _add_answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})


def _role(value: object) -> str:
    if value not in ("user", "assistant"):
        raise ValueError(f"role {value!r}")
    return str(value)
