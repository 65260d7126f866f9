"""A conversation of a chat: its messages, settings and model. No terminal."""

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..core import SamplingParams
from ..errors import InvalidRequestError, TemplateError
from ..outputs import Delta, Result
from ._asking import attached, thinking
from ._chat_log import ChatLog

Message = dict[str, str]


@dataclass(slots=True)
class ChatSession:
    """The messages, settings and model of a chat. `open_model` turns a name into an LLM."""

    model: str
    open_model: Callable[[str], Any]
    values: dict[str, Any] = field(default_factory=dict)  # of SamplingParams, as the user chose
    system: str | None = None
    think: bool | None = None  # None: as the model does by itself
    files: list[str] = field(default_factory=list)  # texts that go with the next message
    messages: list[Message] = field(default_factory=list)  # user and assistant, in turn
    last: Result | None = None
    log: ChatLog | None = None  # where the conversation is kept
    adapter: str | None = None  # that the first model answers with
    _llm: Any = None

    @property
    def llm(self) -> Any:
        """The model, loaded when it is first needed."""
        if self._llm is None:
            self._llm = self._opened(self.model)
        return self._llm

    @property
    def params(self) -> SamplingParams:
        """How tokens are chosen: as the model wants, but for what the user chose."""
        params: SamplingParams = self.llm.chat_params.changed(self.values)
        return params

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
        self.model, self.adapter = model, None

    def ask(self, text: str) -> Generator[Delta, None, None]:
        """Add a user message and stream the answer.

        If the stream is closed early, or by Ctrl-C, the text so far is kept as the answer. An error
        removes the question again, so that it does not affect the next one.
        """
        switch = thinking(self.llm, self.think)
        if self.adapter is not None:
            switch["adapter"] = self.adapter
        self._add("user", "\n\n".join([text, *self.files]))
        self.files.clear()
        prompt = [{"role": "system", "content": self.system}] if self.system is not None else []
        answer, thoughts, self.last = "", "", None
        try:
            messages = [*prompt, *self.messages]
            for delta in self.llm.stream_chat(messages, self.params, **switch):
                answer += delta.text
                thoughts += delta.reasoning or ""
                self.last = delta.result
                yield delta
        except Exception:  # a question without an answer is no part of the conversation
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
        values = {**self.values, key: parsed}
        params = SamplingParams(**values)
        if self._llm is not None:
            params.check_vocabulary(self._llm.model_info.vocab_size)
        self.values = values

    def attach(self, path: Path) -> int:
        """Send a file's text along with the next message; returns its length in characters.

        Raises:
            InvalidRequestError: it cannot be read, or is not text.
        """
        text = attached(path)
        self.files.append(text)
        return len(text)

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
