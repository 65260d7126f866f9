"""Messages to prompt text through a checkpoint's chat template, under limits of time and memory."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2

from ..errors import TemplateError, shown
from .marked_text import without_marks
from .sandbox import Budget, LimitError, TemplateSandbox, size_of

MAX_SOURCE_CHARS = 1 << 17  # which takes seconds to compile; usual ones have 10,000
MAX_RENDER_S = 10.0
MAX_INPUT_CHARS = 64_000_000
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' tag, at which the rendering is cut
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The chat templates of one checkpoint, rendered as transformers 5 renders them.

    Args:
        sources: {name: jinja source}; "default", and optionally "tool_use" for requests with tools.
        variables: visible to every rendering, such as bos_token; a request's kwargs win.
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
        marks: str = "",
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        **kwargs: Any,
    ) -> str:
        """Return the prompt's text.

        Args:
            messages: dicts with "role" and mostly "content"; a key with the value None counts as
                missing.
            marks: characters within the messages that the template must not see; its decisions
                are those for texts without them.
            tools: JSON schemas of functions, in any form that the template reads.
            documents: for templates with retrieval.
            add_generation_prompt: end with the header of an assistant's message.
            continue_final_message: end within the last message, so that the model continues it; a
                string names the field to continue.
            **kwargs: the template's own variables, such as enable_thinking.

        Raises:
            TemplateError: the template refuses the messages, is broken, or exceeds a limit.
        """
        given = {"tools": tools, "documents": documents, **kwargs, "messages": messages}
        with _template_failures():
            data = plain_data(given)
            size = _size_of_input(data)
            chat = [
                with_reasoning_fields(without_none(m)) for m in check_messages(data["messages"])
            ]
            source = self.source_for(tools)
            tail = insert_continue_tag(chat, continue_final_message, add_generation_prompt, source)
            data |= {"messages": chat, "add_generation_prompt": add_generation_prompt}
            variables = {**self.variables, **data}
            text = self._run(source, variables, Budget(size, self._deadline_s), marks)
        return text if tail is None else cut_at_continue_tag(text, tail, marks)

    def source_for(self, tools: object = None) -> str:
        """Return the source that renders a request, with tools or without."""
        name = "tool_use" if tools is not None and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise TemplateError(
                f"There are several chat templates ({', '.join(sorted(self.sources))}) "
                "and none is called default."
            )
        return self.sources[name]

    def reads(self, variable: str) -> bool:
        """Whether any of the templates reads this variable, such as "tools"."""
        return any(self._sandbox.reads(source, variable) for source in self.sources.values())

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
        """Return the text and the string constants of a template, all that it writes itself."""
        try:
            tree = self._sandbox.parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"The chat template is broken: {error}") from None
        texts = {data.data for data in tree.find_all(jinja2.nodes.TemplateData)}
        constants = {const.value for const in tree.find_all(jinja2.nodes.Const)}
        return "\0".join(texts | {value for value in constants if isinstance(value, str)})

    def replaced_texts(self, source: str) -> list[str]:
        """Return the texts that a template replaces by others (`replace`, method or filter)."""
        tree = self._sandbox.parse(source)
        calls = [c for c in tree.find_all(jinja2.nodes.Call) if _is_replace(c.node)]
        filters = [f for f in tree.find_all(jinja2.nodes.Filter) if f.name == "replace"]
        given = [(c.args, c.kwargs) for c in calls] + [(f.args, f.kwargs) for f in filters]
        firsts = [first for args, kwargs in given for first in _first(args, kwargs)]
        values = [first.value for first in firsts if isinstance(first, jinja2.nodes.Const)]
        return list(dict.fromkeys(v for v in values if isinstance(v, str) and v))

    def _run(self, source: str, variables: dict[str, Any], budget: Budget, marks: str) -> str:
        template = self.compiled(source)
        chunks: list[str] = []
        size = 0
        self._sandbox.limit(budget, marks)
        try:
            for chunk in template.generate(variables):
                budget.tick()
                size += len(chunk)
                budget.check_size(size)
                chunks.append(chunk)
        finally:
            self._sandbox.limit(None)
        return "".join(chunks)


def _is_replace(node: jinja2.nodes.Node) -> bool:
    return isinstance(node, jinja2.nodes.Getattr) and node.attr == "replace"


def _first(args: list[Any], kwargs: list[Any]) -> list[Any]:
    """Return the argument that is replaced, where it is given."""
    return args[:1] or [pair.value for pair in kwargs if pair.key == "old"]


@contextmanager
def _template_failures() -> Iterator[None]:
    """Turn whatever a template raises into TemplateError: it is foreign code on foreign data."""
    try:
        yield
    except TemplateError:
        raise
    except LimitError as error:
        raise TemplateError(f"The chat template was stopped: {error}.") from None
    except MemoryError:
        raise TemplateError("The chat template was stopped: it ran out of memory.") from None
    except RecursionError:
        raise TemplateError("The chat template was stopped: it nests too deeply.") from None
    except Exception as error:  # a template can raise anything
        raise TemplateError(f"The chat template failed: {error}") from error


def _size_of_input(data: object) -> int:
    try:
        return size_of(data, MAX_INPUT_CHARS)
    except LimitError:
        raise TemplateError(
            f"The messages have more than {MAX_INPUT_CHARS} characters together."
        ) from None


def plain_data(value: Any) -> Any:
    """Return a copy that holds only None, bool, int, float, str, list, tuple and dict.

    Any other object (an image, an array) becomes a string with the name of its type, so that a
    template finds no methods on it. Dataclasses become dicts.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):  # an enum, or the like
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain_data(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain_data(getattr(value, field.name)) for field in fields}
    return f"<{type(value).__name__}>"


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages as a list; raise TemplateError unless they are one or more objects."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise TemplateError("messages is empty or no list; expected at least one message.")
    for message in messages:
        if not isinstance(message, dict):
            raise TemplateError(f"A message is {shown(message)}; expected an object with a role.")
    return list(messages)


def without_none(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message without keys of the value None: templates test for missing keys."""
    return {key: value for key, value in message.items() if value is not None}


def with_reasoning_fields(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning under every name that templates read."""
    found = [message[key] for key in _REASONING_FIELDS if key in message]
    if not found:
        return message
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


def insert_continue_tag(
    chat: list[dict[str, Any]], wanted: bool | str, add_generation_prompt: bool, source: str
) -> str | None:
    """Append the tag to the text that the answer continues; return that text, None without one.

    Changes the last message in `chat`. `wanted` is True or the name of the field to continue.
    """
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


def cut_at_continue_tag(rendered: str, text: str, marks: str = "") -> str:
    """Return the rendering up to the end of `text`; keep its trailing spaces if the template did.

    The template may have moved `marks` within the text; it still counts as the same text.
    """
    end = rendered.rfind(_CONTINUE.strip())
    if end < 0 or without_marks(text, marks).strip() not in without_marks(rendered, marks):
        raise TemplateError(
            "continue_final_message: the chat template does not write the last message as it is."
        )
    kept = rendered.startswith(_CONTINUE, end)
    return rendered[:end] if kept else rendered[:end].rstrip()
