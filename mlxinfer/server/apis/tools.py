"""Tools, calls and parts of messages in requests of all APIs.

Functions, custom tools and namespaces are told to the model as functions. Hosted tools (web search,
file search, MCP and others) and the shells of particular clients have nothing here that would run
them: they are left out of a request, and named in a header and the log.

A picture is translated here and loaded by the session. The call fetches those that are named by a
URL (`Call.encode`, `Call.start`), where the server does so. No request can name a file.
"""

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from ...errors import InvalidRequestError, PictureError, UnsupportedFieldError, shown
from ...images import from_base64, from_data_url
from ...text import Content
from ..http import Plain
from .sampling import check_json_size


class TypedPart(Protocol):
    """A part of a message."""

    type: str


P = TypeVar("P", bound=TypedPart)
Prompts = str | list[str | int | list[int]]  # one, several, one as token ids, or several of these
URLS = ("http://", "https://")
MAX_TOOLS = 512
NOT_READ = "[A part was here. It cannot be read.]"
INPUT = "input"  # the one parameter of a custom tool
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_KIND = re.compile(r"[a-z0-9_]{1,40}")
TEXTS = frozenset(  # types of parts in messages of OpenAI's APIs
    ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")
)


def check_tools(tools: list[Any] | None, choice: Any = None) -> None:
    if tools and len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"{len(tools)} tools; at most {MAX_TOOLS} are accepted.", param="tools"
        )
    check_json_size(tools, param="tools")
    check_json_size(choice, param="tool_choice")


def call_arguments(text: str | None) -> dict[str, Any] | str:
    """The arguments of a call in a conversation as an object; as text if they are no object.

    max_tokens may have cut them off, and not every model writes JSON.
    """
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text or ""


def function_call(id: str | None, name: str, arguments: Any) -> Plain:
    function = {"name": name, "arguments": arguments}
    return {"id": id, "type": "function", "function": function}


def begun_object(text: str) -> dict[str, Any]:
    """A JSON object that may be cut off: its whole members, and a string that was begun."""
    closers: list[str] = []
    in_string = escaped = False
    whole = ("", "")  # the text up to the last whole member, and the brackets that close it
    for index, char in enumerate(text):
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        elif char in "{[":
            closers.append("}" if char == "{" else "]")
            whole = (text[: index + 1], "".join(reversed(closers)))
        elif char in "}]" and closers:
            closers.pop()
        elif char == ",":
            whole = (text[:index], "".join(reversed(closers)))
    closed = text + '"' * in_string + "".join(reversed(closers))
    for candidate in (closed, "".join(whole)):
        with suppress(msgspec.DecodeError, UnicodeError, RecursionError):
            return msgspec.json.decode(candidate, type=dict[str, Any])
    return {}


def skip(skipped: list[str], place: str, kind: object) -> None:
    """Note that the item or hosted tool at `place` is left out; an odd `kind` is not repeated."""
    text = str(kind)
    skipped.append(f"{place} {text if _KIND.fullmatch(text) else 'unknown'}")


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """A tool under the names that the client has declared."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(slots=True)
class DeclaredTools:
    """The callable tools of a request.

    Attributes:
        declared: by the names that the model sees, of all tools but plain functions.
        skipped: hosted tools, and grammars of custom tools that are not enforced.
    """

    functions: list[Plain] = field(default_factory=list)
    declared: dict[str, DeclaredTool] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def choose(self, choice: str | Plain | None) -> str | Plain:
        """The tool_choice in the form of chat completions; `allowed_tools` leaves only those."""
        if not isinstance(choice, dict):
            return "auto" if choice is None else choice
        kind, choice = choice.get("type"), _unnested(choice)
        if kind in ("function", "custom") and "name" in choice:
            return {"type": "function", "function": {"name": self._shown(choice)}}
        if kind == "allowed_tools":
            return self._allow(choice)
        raise UnsupportedFieldError.of(
            "tool_choice", f"demands a tool of type {str(kind)[:50]!r}, which is not callable here."
        )

    def _allow(self, choice: Plain) -> str:
        tools, mode = choice.get("tools"), choice.get("mode", "auto")
        if not isinstance(tools, list) or not tools or mode not in ("auto", "required"):
            raise InvalidRequestError.of(
                "tool_choice",
                'of type allowed_tools: expected tools, and mode "auto" or "required".',
            )
        named = [_unnested(tool) for tool in tools if isinstance(tool, dict)]
        names = {self._shown(tool) for tool in named if tool.get("type") in ("function", "custom")}
        known = [str(_unnested(function).get("name")) for function in self.functions]
        for name in sorted(names.difference(known)):
            raise InvalidRequestError.of(
                "tool_choice", f"allows {name[:100]!r}, which is none of tools."
            )
        told = zip(self.functions, known, strict=True)
        self.functions = [function for function, name in told if name in names]
        return mode if self.functions else "none"

    def _shown(self, named: Plain) -> str:
        return shown_name(str(named.get("name")), named.get("namespace"))

    def add(self, tool: Plain, path: str, namespace: str | None = None) -> None:
        kind = tool.get("type")
        if kind == "namespace" and namespace is None:
            name, inner = tool.get("name"), tool.get("tools")
            if not isinstance(name, str) or not isinstance(inner, list):
                raise InvalidRequestError.of(path, "has no name or no tools.")
            for number, member in enumerate(inner):
                if not isinstance(member, dict):
                    raise InvalidRequestError(f"{path}.tools[{number}] is no object.", param=path)
                self.add(member, f"{path}.tools[{number}]", name)
        elif kind in ("function", "custom"):
            self._add_callable(tool, path, namespace)
        elif kind is None:
            raise InvalidRequestError.of(f"{path}.type", "is missing.")
        else:
            skip(self.skipped, path, kind)

    def _add_callable(self, tool: Plain, path: str, namespace: str | None) -> None:
        function = {k: v for k, v in tool.items() if k in _FUNCTION_KEYS and v is not None}
        custom = tool["type"] == "custom"
        if custom:
            function = self._custom(tool, path)
        name = tool.get("name")
        if isinstance(name, str) and (custom or namespace):
            function["name"] = shown_name(name, namespace)
            self.declared[function["name"]] = DeclaredTool(name, namespace, custom)
        self.functions.append({"type": "function", "function": function})

    def _custom(self, tool: Plain, path: str) -> Plain:
        given: Mapping[str, Any] = tool.get("format") or {"type": "text"}
        if not isinstance(given, Mapping):
            raise InvalidRequestError.of(f"{path}.format", "is no object.")
        text: Plain = {"type": "string", "description": "The whole input of the tool, as text."}
        description, strict = tool.get("description"), False
        if given.get("type") == "grammar":
            definition = given.get("definition")
            if not isinstance(definition, str):
                raise InvalidRequestError.of(f"{path}.format.definition", "is missing.")
            text["description"] += f" It follows this grammar:\n{definition}"
            pattern = self._pattern(given.get("syntax"), definition, path)
            if pattern is not None:
                text["pattern"], strict = pattern, True
        elif given.get("type") != "text":
            raise UnsupportedFieldError.of(
                f"{path}.format",
                f"is of type {str(given.get('type'))[:50]!r}; expected text or grammar.",
            )
        function: Plain = {
            "name": tool.get("name"),
            "parameters": {"type": "object", "properties": {INPUT: text}, "required": [INPUT]},
            "strict": strict,
        }
        return function if description is None else {**function, "description": description}

    def _pattern(self, syntax: object, definition: str, path: str) -> str | None:
        """A regular expression as a pattern; None, and noted, for a Lark grammar.

        Such an input is a string of JSON, to which no Lark grammar applies.
        """
        if syntax == "regex":
            return f"^(?:{definition})$"
        if syntax != "lark":
            raise UnsupportedFieldError.of(
                f"{path}.format.syntax", f"is {str(syntax)[:50]!r}; expected lark or regex."
            )
        skip(self.skipped, f"{path}.format", "grammar")
        return None


def _unnested(tool: Plain) -> Plain:
    """The fields of a tool or a choice, with those that chat completions nest in it."""
    inner = tool.get(str(tool.get("type", "function")))
    return {**tool, **inner} if isinstance(inner, dict) else tool


def read_tools(tools: list[Plain] | None) -> DeclaredTools:
    check_tools(tools)
    declared = DeclaredTools()
    for number, tool in enumerate(tools or ()):
        declared.add(tool, f"tools[{number}]")
    return declared


def read_chat_tools(tools: list[Plain] | None, declared: DeclaredTools) -> None:
    """Add the tools of a chat request to `declared`; as `read_tools`, but functions pass unread."""
    for number, tool in enumerate(tools or ()):
        if tool.get("type") == "custom":
            declared.add(_flat(tool, f"tools[{number}]"), f"tools[{number}].custom")
        else:
            declared.functions.append(tool)


def _flat(tool: Plain, path: str) -> Plain:
    custom = tool.get("custom")
    if not isinstance(custom, dict):
        raise InvalidRequestError.of(f"{path}.custom", "is no object.")
    form = custom.get("format")
    if isinstance(form, dict) and isinstance(form.get("grammar"), dict):
        form = {**form["grammar"], "type": form.get("type")}
    return {**custom, "type": "custom", "format": form}


def shown_name(name: str, namespace: object) -> str:
    """The name by which the model calls a tool: unlike those of other namespaces."""
    if not isinstance(namespace, str):
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def custom_input(arguments: str) -> str:
    """The input of a custom tool, from the arguments of its call, which may be cut off.

    A model may use a name of its own for the parameter, or write no JSON.
    """
    values: Iterable[Any] = begun_object(arguments).values()
    texts = [value for value in values if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else arguments


# -- parts of messages --------------------------------------------------------------------------


def part_text(kind: str, text: str | None, path: str, kinds: Container[str] = TEXTS) -> str:
    if kind not in kinds:
        raise not_text(kind, path)
    if text is None:
        raise InvalidRequestError.of(f"{path}.text", "is missing.")
    return text


def not_text(kind: str, path: str) -> UnsupportedFieldError:
    return UnsupportedFieldError(
        f"{path} is of type {kind[:50]!r}; expected a text, or where messages have pictures one in "
        "this API's form.",
        param=f"{path}.type",
    )


def texts_of(given: Prompts, name: str, most: int) -> dict[str, str | list[int]]:
    """The texts of a field, each with its place in the request."""
    if isinstance(given, str) or (given and all(type(item) is int for item in given)):
        return {name: given}  # type: ignore[dict-item]  # a text, or ids
    if not 0 < len(given) <= most:
        raise InvalidRequestError.of(name, f"holds {len(given)} texts; expected 1 to {most}.")
    texts: dict[str, str | list[int]] = {}
    for index, item in enumerate(given):
        if isinstance(item, int):
            raise InvalidRequestError.of(
                name, "mixes token ids with texts; expected texts, ids, or lists of ids."
            )
        texts[f"{name}[{index}]"] = item
    return texts


class ImageUrl(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A picture of OpenAI's chat, or a video of vLLM's."""

    url: str
    detail: str | None = None


def text_part(text: str) -> Plain:
    return {"type": "text", "text": text}


def url_part(url: str | None, detail: str | None, path: str) -> Plain:
    """The part of a picture with a data: URL, or with an http URL."""
    if url is None:
        raise UnsupportedFieldError.of(path, "has no image_url; uploaded files are not kept here.")
    if url.startswith("data:"):
        return _image(from_data_url(url, place=path), path, detail)
    if not url.lower().startswith(URLS):
        raise PictureError.of(
            path,
            f"is {shown(url)}; expected a URL that begins with data:image/png;base64, or with "
            "https:.",
        )
    return _image(url, path, detail)


def video_part(url: str | None, detail: str | None, path: str) -> Plain:
    if url is None or not url.startswith("data:"):
        raise PictureError.of(path, "is no URL of data; send data:video/mp4;base64, and the video.")
    return {
        "type": "video",
        "video": from_data_url(url, place=path),
        "detail": detail,
        "place": path,
    }


def base64_part(data: str, path: str) -> Plain:
    return _image(from_base64(data, place=path), path)


def _image(source: bytes | str, path: str, detail: str | None = None) -> Plain:
    return {"type": "image", "image": source, "detail": detail, "place": path}


def read_content(
    content: str | Sequence[P],
    read: Callable[[P, str], Plain],
    path: str,
    notes: list[str] | None = None,
) -> Content:
    """The content of a message with a text, or with parts.

    Args:
        notes: the message is of an earlier turn, which no client can mend. A note stands for a part
            that cannot be read, and this gets its place. None: such a part is an error.
    """
    if isinstance(content, str):
        return content
    return content_of(
        part_or_note(partial(read, part), f"{path}[{i}]", part.type, notes)
        for i, part in enumerate(content)
    )


def part_or_note(
    read: Callable[[str], Plain], path: str, kind: str, notes: list[str] | None
) -> Plain:
    if notes is None:
        return read(path)
    try:
        part = read(path)
    except InvalidRequestError:
        skip(notes, path, kind)
        return text_part(NOT_READ)
    return part if part["type"] == "text" else {**part, "earlier": True}


def newest_turn(roles: Sequence[str]) -> int:
    """The place of the first message of the newest turn.

    It follows the last answer, and begins with the last message of a user behind that. An answer at
    the end is one that is to be continued.
    """
    count = len(roles)
    while count and roles[count - 1] == "assistant":
        count -= 1
    answers = [number + 1 for number in range(count) if roles[number] == "assistant"]
    users = [number for number in range(count) if roles[number] == "user"]
    return max([0, *answers[-1:], *users[-1:]])


def content_of(parts: Iterable[Plain]) -> Content:
    """The content of a message: its parts if the model sees some, else its texts, line by line."""
    all_parts = list(parts)
    if any(part["type"] != "text" for part in all_parts):
        return all_parts
    return "\n".join(part["text"] for part in all_parts)
