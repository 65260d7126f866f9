"""Messages to prompt text through a checkpoint's chat template. Knows no tokens and no requests."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from ..errors import TemplateError
from .budget import Budget, LimitError, size_of
from .sandbox import TemplateSandbox

MAX_SOURCE_CHARS = 1 << 20
MAX_RENDER_S = 10.0
MAX_INPUT_CHARS = 64_000_000
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "  # the mark that transformers appends, and cuts at
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The chat templates of one checkpoint, rendered as transformers 5 renders them.

    Args:
        sources: {name: jinja source}; "default", and perhaps "tool_use" for requests with tools.
        variables: what every rendering sees, such as bos_token; a request's kwargs win.
        now: the clock behind `strftime_now`.
        deadline_s: seconds that one rendering may take.
    """

    def __init__(
        self,
        sources: Mapping[str, str] | str,
        *,
        variables: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
        deadline_s: float = MAX_RENDER_S,
    ) -> None:
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self.variables = dict(variables or {})
        self._sandbox = TemplateSandbox(now)
        self._deadline_s = deadline_s
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        **kwargs: Any,
    ) -> str:
        """Return the prompt.

        Args:
            messages: dicts with "role" and mostly "content"; keys whose value is None count as
                missing.
            tools: JSON schemas of functions, in whatever form the template knows.
            documents: for templates that know retrieval.
            add_generation_prompt: end with the header of an assistant's message.
            continue_final_message: end within the last message, so that the model goes on with it;
                a string names the field to go on with.
            **kwargs: the template's own variables, such as enable_thinking.

        Raises:
            TemplateError: the template refuses the messages, is broken, or goes past a limit.
        """
        try:
            data = plain_data(
                {"tools": tools, "documents": documents, "kwargs": kwargs, "messages": messages}
            )
            size = size_of(data, MAX_INPUT_CHARS)
            chat = [_with_reasoning_names(_without_none(m)) for m in _checked(data["messages"])]
            source = self.source_for(tools)
            tail = _mark_end(chat, continue_final_message, add_generation_prompt, source)
            variables = {
                **self.variables,
                **data["kwargs"],
                "messages": chat,
                "tools": data["tools"],
                "documents": data["documents"],
                "add_generation_prompt": add_generation_prompt,
            }
            text = self._run(source, variables, Budget(size, self._deadline_s))
        except TemplateError:
            raise
        except LimitError as error:
            raise TemplateError(f"The chat template was stopped: {error}.") from None
        except MemoryError:
            raise TemplateError("The chat template was stopped: it ran out of memory.") from None
        except RecursionError:
            raise TemplateError("The chat template was stopped: it nests too deeply.") from None
        except Exception as error:  # a template is foreign code: it raises whatever it likes
            raise TemplateError(f"The chat template failed: {error}") from error
        return text if tail is None else _cut_at_mark(text, tail)

    def source_for(self, tools: object = None) -> str:
        """Return the source that renders a request, with tools or without."""
        name = "tool_use" if tools is not None and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise TemplateError(
                f"There are several chat templates ({', '.join(sorted(self.sources))}) "
                "and none is called default."
            )
        return self.sources[name]

    def compiled(self, source: str) -> jinja2.Template:
        """Return the template of a source, compiled once."""
        if source not in self._compiled:
            if len(source) > MAX_SOURCE_CHARS:
                raise TemplateError(
                    f"The chat template has {len(source)} characters; "
                    f"at most {MAX_SOURCE_CHARS} are accepted."
                )
            self._compiled[source] = self._sandbox.compile_template(source)
        return self._compiled[source]

    def literal_text(self, source: str) -> str:
        """Return what the template itself may write: its text and its string constants."""
        try:
            tree = self._sandbox.parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"The chat template is broken: {error}") from None
        texts = {data.data for data in tree.find_all(jinja2.nodes.TemplateData)}
        constants = {const.value for const in tree.find_all(jinja2.nodes.Const)}
        return "\0".join(texts | {value for value in constants if isinstance(value, str)})

    def _run(self, source: str, variables: dict[str, Any], budget: Budget) -> str:
        template = self.compiled(source)
        chunks: list[str] = []
        size = 0
        with self._sandbox.limited_by(budget):
            for chunk in template.generate(variables):
                budget.tick()
                size += len(chunk)
                budget.check_size(size)
                chunks.append(chunk)
        return "".join(chunks)


def plain_data(value: Any) -> Any:
    """Return a copy made of None, bool, int, float, str, list, tuple and dict only.

    Whatever else is in there (images, arrays) becomes a string with the name of its type, so that a
    template gets no methods to call. Dataclasses become dicts.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):  # an enum, or the like
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain_data(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain_data(getattr(value, field.name)) for field in fields}
    return f"<{type(value).__name__}>"


def _checked(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise TemplateError("messages is empty or no list; expected at least one message.")
    for message in messages:
        if not isinstance(message, dict):
            raise TemplateError(f"A message is {message!r}; expected an object with a role.")
    return list(messages)


def _without_none(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def _with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    """Offer the reasoning under the names that templates read, whichever one it came under."""
    found = [message[key] for key in _REASONING_FIELDS if key in message]
    if not found:
        return message
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


def _mark_end(
    chat: list[dict[str, Any]], wanted: bool | str, add_generation_prompt: bool, source: str
) -> str | None:
    """Append the mark to the text that is to be continued; return that text, None if none is."""
    if not wanted:
        return None
    if add_generation_prompt:
        raise TemplateError(
            "continue_final_message and add_generation_prompt exclude each other: the first goes "
            "on with the last message, the second begins a new one."
        )
    name = wanted if isinstance(wanted, str) else "content"
    value = chat[-1].get(name)
    if value is None:
        raise TemplateError(f"continue_final_message: the last message has no {name}.")
    names = [name]
    if name in _REASONING_FIELDS:
        names = [n for n in _REASONING_FIELDS if chat[-1].get(n) == value]
    if not any(n in source for n in names):
        raise TemplateError(f"continue_final_message: the chat template never reads {name}.")
    if isinstance(value, str):
        chat[-1].update(dict.fromkeys(names, value + _CONTINUE))
        return value
    for part in reversed(value):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] += _CONTINUE
            return text
    raise TemplateError("continue_final_message: the last message has no text to go on with.")


def _cut_at_mark(rendered: str, text: str) -> str:
    """Return the rendering up to the end of `text`, its trailing spaces kept if they were."""
    end = rendered.rfind(_CONTINUE.strip())
    if end < 0 or text.strip() not in rendered:
        raise TemplateError(
            "continue_final_message: the chat template does not write the last message as it is."
        )
    kept = rendered.startswith(_CONTINUE, end)
    return rendered[:end] if kept else rendered[:end].rstrip()
