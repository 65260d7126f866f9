"""Messages of conversations, and the prompt text that a chat template makes of them.

`read_messages` checks messages and finds their pictures. `ChatTemplate` renders them. Its
environment is that of transformers: jinja's immutable sandbox, in which a template sees nothing of
Python. A process with a deadline finds out once whether a template ends (`samples.py`).
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import jinja2
from jinja2 import nodes

from ..errors import InvalidRequestError, TemplateError, shown
from .environment import ChatEnvironment

Content = str | list[dict[str, Any]]  # text, or parts of text and places of pictures

_EXAMPLE = '[{"role": "user", "content": "Hello"}]'
_TEXTS = ("text", "input_text", "output_text")
_PART = (
    '{"type": "text", "text": ...}, {"type": "image", "image": ...} or '
    '{"type": "video", "frames": [...]}'
)


class ImagePart(NamedTuple):
    """A picture or a video in a message, as it came."""

    # a path, bytes, a data: URL, a PIL image or an array; of a video, a path, bytes or a list of
    # pictures
    source: Any
    low_detail: bool  # the picture may become few tokens
    place: str  # the field that errors name
    is_video: bool = False  # this is a video
    fps: float | None = None  # frames a second of a list of pictures, if the message states it
    is_earlier: bool = False  # a note may stand for it where it cannot be read


def read_messages(messages: Any) -> tuple[list[dict[str, Any]], list[ImagePart]]:
    """Return messages as templates read them, and the pictures in them, in their order.

    The content of a message is text, and several text parts are joined by newlines. With pictures
    it is a list of {"type": "text", "text": ...}, {"type": "image"} and {"type": "video"}.

    Raises:
        InvalidRequestError: this is no list of messages, or a part is of another type.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise _wrong(f"messages is {shown(messages)}; expected a list such as {_EXAMPLE}.")
    images: list[ImagePart] = []
    plain = [_message(message, f"messages[{i}]", images) for i, message in enumerate(messages)]
    return plain, images


def _message(message: Any, path: str, images: list[ImagePart]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _wrong(f"{path} is {shown(message)}; expected one such as {_EXAMPLE[1:-1]}.")
    content = message.get("content")
    if content is None and message["role"] != "assistant":
        raise _wrong(f"{path} has no content; give it a text.")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _wrong(f"{path}.content is {shown(content)}; expected a text.")
    before = len(images)
    parts = [_part(part, f"{path}.content[{i}]", images) for i, part in enumerate(content)]
    if len(images) > before:
        return {**message, "content": parts}
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def _part(part: Any, path: str, images: list[ImagePart]) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise _wrong(f"{path} is {shown(part)}; expected {_PART}.")
    kind = part.get("type")
    if kind in ("image", "image_url", "input_image"):
        images.append(_image(part, kind, path))
        return {"type": "image"}
    if kind == "video":
        images.append(_video(part, path))
        return {"type": "video"}
    if kind not in _TEXTS:
        raise _wrong(f"{path} is of type {shown(kind)}; expected {_PART}.")
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{path}.text is {shown(part.get('text'))}; expected a text.")
    return {"type": "text", "text": part["text"]}


def _image(part: Mapping[str, Any], kind: str, path: str) -> ImagePart:
    name = "image" if kind == "image" else "image_url"
    source: Any = part.get(name)
    detail = part.get("detail")
    if isinstance(source, Mapping):  # {"url": ..., "detail": ...}
        detail = source.get("detail", detail)
        source = source.get("url")
    if source is None:
        raise _wrong(f"{path}.{name} is missing; give it a picture.")
    if name == "image_url" and not (isinstance(source, str) and source.startswith("data:")):
        raise _wrong(
            f"{path}.image_url is {shown(source)}; expected a data: URL. A picture in a file goes "
            'into {"type": "image", "image": path}.'
        )
    place = part.get("place", f"{path}.{name}")
    return ImagePart(source, detail == "low", place, is_earlier=bool(part.get("earlier")))


def _video(part: Mapping[str, Any], path: str) -> ImagePart:
    sources = [name for name in ("video", "frames") if part.get(name) is not None]
    if len(sources) != 1:
        raise _wrong(
            f'{path} has {" and ".join(sources) or "no video"}; expected "video", a file, or '
            '"frames", a list of pictures.'
        )
    (name,) = sources
    if (name == "frames") != isinstance(part[name], list | tuple):
        expected = "a list of pictures" if name == "frames" else "a path or bytes"
        raise _wrong(f"{path}.{name} is {shown(part[name])}; expected {expected}.")
    low = part.get("detail") == "low"
    place = part.get("place", f"{path}.{name}")
    earlier = bool(part.get("earlier"))
    return ImagePart(part[name], low, place, True, part.get("fps"), is_earlier=earlier)


def around(content: Content | None, before: str = "", after: str = "") -> Content:
    if not isinstance(content, list):
        return f"{before}{content or ''}{after}"
    return [*_parts(before), *content, *_parts(after)]


def joined(one: Content, two: Content, between: str = "\n") -> Content:
    if isinstance(one, str) and isinstance(two, str):
        return f"{one}{between}{two}"
    return [*_parts(one), *_parts(between), *_parts(two)]


def _parts(content: Content) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")


Messages = Sequence[dict[str, Any]]


# -- tool calls in messages -----------------------------------------------------------------------


def has_calls(messages: object) -> bool:
    every = messages if isinstance(messages, (list, tuple)) else ()
    return any(
        isinstance(message, dict) and (message.get("tool_calls") or message.get("role") == "tool")
        for message in every
    )


def count_argument_values(messages: Messages) -> int:
    """Count the JSON values in the arguments of calls, or more: commas in texts count."""
    count = 0
    for call in (call for message in messages for call in _calls(message)):
        with suppress(TypeError, ValueError, RecursionError):  # rendering raises for such a call
            count += 1 + _as_text(_function(call).get("arguments")).count(",")
    return count


def with_parsed_arguments(messages: Any) -> Any:
    """Return messages with the arguments of tool calls as objects, which most templates expect.

    OpenAI's API sends them as JSON text. Text that is no JSON object is left as it is. A tool
    message without a name gets the name of the call that its `tool_call_id` refers to.
    """
    if not isinstance(messages, (list, tuple)):
        return messages
    names: dict[Any, Any] = {}
    changed = []
    for message in messages:
        message = _with_arguments(message, _as_object)
        for call in _calls(message):
            names[call.get("id")] = _function(call).get("name")
        changed.append(_with_name(message, names))
    return changed


def with_text_arguments(messages: Messages) -> list[dict[str, Any]]:
    """Return messages with the arguments of tool calls as JSON text, and a content beside calls.

    Some templates (DeepSeek's) append both to strings.
    """
    changed = [_with_arguments(message, _as_text) for message in messages]
    return [{**m, "content": ""} if _calls(m) and m.get("content") is None else m for m in changed]


def with_object_arguments(messages: Messages) -> list[dict[str, Any]]:
    """Return messages with all arguments of tool calls as objects: {"arguments": text} for text.

    Templates that write each argument by itself cannot write text that is no JSON object.
    """
    return [_with_arguments(message, _as_wrapped) for message in messages]


def _with_arguments(message: Any, change: Callable[[Any], Any]) -> Any:
    calls = _calls(message)
    if not calls:
        return message
    return {**message, "tool_calls": [_changed(call, change) for call in calls]}


def _changed(call: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    function = _function(call)
    if "arguments" not in function:
        return call
    new = {**function, "arguments": change(function["arguments"])}
    return {**call, "function": new} if function is not call else new


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_wrapped(arguments: Any) -> Any:
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_name(message: Any, names: Mapping[Any, Any]) -> Any:
    if not isinstance(message, dict) or message.get("role") != "tool" or message.get("name"):
        return message
    identity = message.get("tool_call_id")
    name = names.get(identity) if isinstance(identity, str) else None
    return message if name is None else {**message, "name": name}


def _function(call: dict[str, Any]) -> dict[str, Any]:
    """Return the `function` object of a call; some clients send it without the enclosing object."""
    function = call.get("function")
    return function if isinstance(function, dict) else call


def _calls(message: Any) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    listed = calls if isinstance(calls, (list, tuple)) else ()
    return [call for call in listed if isinstance(call, dict)]


# -- the template ---------------------------------------------------------------------------------


class Hider(Protocol):
    """Hides texts of messages from a template; see `chat.ControlTokens`."""

    def hide_constants(self, tree: nodes.Template) -> None:
        """Change a template so that it also looks for hidden texts."""

    def show(self, text: str) -> str:
        """Return a text with its hidden characters."""


MAX_SOURCE_CHARS = 1 << 17  # which takes seconds to compile; usual ones have 10,000
_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' tag, at which the rendering is cut
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The chat templates of one checkpoint, rendered as transformers 5 renders them.

    Args:
        sources: {name: jinja source}; "default", and optionally "tool_use" for requests with tools.
        variables: visible to every rendering, such as bos_token; a request's kwargs win.
        now: the clock behind `strftime_now`.
    """

    def __init__(
        self,
        sources: Mapping[str, str] | str,
        *,
        variables: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self.variables = dict(variables or {})
        self._environment = ChatEnvironment(now)
        self._compiled: dict[tuple[str, Hider | None], jinja2.Template] = {}
        self._known_words: tuple[frozenset[str], list[str]] | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        hider: Hider | None = None,
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
            hider: is what hid the texts of the messages; None: they are not hidden.
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
            chat = [
                with_reasoning_fields(without_none(m)) for m in check_messages(data["messages"])
            ]
            source = self.source_for(tools)
            tail = insert_continue_tag(chat, continue_final_message, add_generation_prompt, source)
            data |= {"messages": chat, "add_generation_prompt": add_generation_prompt}
            self._environment.begin()
            text = self._template(source, hider).render({**self.variables, **data})
        if tail is None:
            return text
        show = str if hider is None else hider.show
        return text[: len(cut_at_continue_tag(show(text), show(tail)))]

    def source_for(self, tools: object = None) -> str:
        name = "tool_use" if tools is not None and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise TemplateError(
                f"There are several chat templates ({', '.join(sorted(self.sources))}) "
                "and none is called default."
            )
        return self.sources[name]

    def reads(self, variable: str) -> bool:
        """Whether any of the templates reads this variable, such as "tools"."""
        try:
            return variable in self.names()
        except TemplateError:
            return False

    def names(self) -> frozenset[str]:
        """Return the names that the templates read, their own variables among them."""
        return self._words()[0]

    def given_names(self) -> frozenset[str]:
        """Return the names that every rendering has: functions, tokens, and what `render` takes."""
        return frozenset((*self._environment.globals, *self.variables, *_ARGUMENTS))

    def constants(self) -> list[str]:
        """Return the string constants in the templates."""
        return self._words()[1]

    def _words(self) -> tuple[frozenset[str], list[str]]:
        if self._known_words is None:
            trees = [self._parsed(source) for source in self.sources.values()]
            names = (name for tree in trees for name in tree.find_all(nodes.Name))
            values = (const.value for tree in trees for const in tree.find_all(nodes.Const))
            self._known_words = (
                frozenset(name.name for name in names if name.ctx == "load"),
                list(dict.fromkeys(value for value in values if isinstance(value, str))),
            )
        return self._known_words

    def _template(self, source: str, hider: Hider | None) -> jinja2.Template:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(
                f"The chat template has {len(source)} characters; "
                f"at most {MAX_SOURCE_CHARS} are accepted."
            )
        if (source, hider) not in self._compiled:
            tree = self._environment.parse(source)
            if hider is not None:
                hider.hide_constants(tree)
            self._environment.limit_loops(tree)
            code = self._environment.compile(tree)
            template = jinja2.Template.from_code(
                self._environment, code, self._environment.make_globals(None)
            )
            self._compiled[source, hider] = template
        return self._compiled[source, hider]

    def literal_text(self, source: str) -> str:
        tree = self._parsed(source)
        texts = {data.data for data in tree.find_all(nodes.TemplateData)}
        constants = {const.value for const in tree.find_all(nodes.Const)}
        return "\0".join(texts | {value for value in constants if isinstance(value, str)})

    def _parsed(self, source: str) -> nodes.Template:
        try:
            return self._environment.parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"The chat template is broken: {error}") from None


@contextmanager
def _template_failures() -> Iterator[None]:
    """Turn whatever a template raises into TemplateError: it is foreign code on foreign data."""
    try:
        yield
    except TemplateError:
        raise
    except MemoryError:
        raise
    except RecursionError:
        raise TemplateError("The chat template nests too deeply.") from None
    except Exception as error:  # a template can raise anything
        raise TemplateError(f"The chat template failed: {error}") from error


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
    if not isinstance(messages, (list, tuple)) or not messages:
        raise TemplateError("messages is empty or no list; expected at least one message.")
    for message in messages:
        if not isinstance(message, dict):
            raise TemplateError(f"A message is {shown(message)}; expected an object with a role.")
    return list(messages)


def without_none(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def with_reasoning_fields(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning under every name that templates read."""
    thoughts = [message[key] for key in _REASONING_FIELDS if key in message]
    if not thoughts:
        return message
    return {
        **dict.fromkeys(_REASONING_FIELDS, thoughts[0]),
        **message,
        "reasoning_content": thoughts[0],
    }


def with_empty_thoughts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which each answer without a thought has an empty one (K2 Horizon)."""
    empty = dict.fromkeys(_REASONING_FIELDS, "")
    return [
        {**(empty if message["role"] == "assistant" else {}), **message}
        if not any(field in message for field in _REASONING_FIELDS)
        else dict(message)
        for message in messages
    ]


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


def cut_at_continue_tag(rendered: str, text: str) -> str:
    """Return the rendering up to the end of `text`, with its trailing spaces if they are there."""
    end = rendered.rfind(_CONTINUE.strip())
    if end < 0 or text.strip() not in rendered:
        raise TemplateError(
            "continue_final_message: the chat template does not write the last message as it is."
        )
    has_spaces = rendered.startswith(_CONTINUE, end)
    return rendered[:end] if has_spaces else rendered[:end].rstrip()
