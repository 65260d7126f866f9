"""Content blocks of Anthropic's API: those of a conversation as messages, and its tools."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from ...errors import InvalidRequestError, PictureError, UnsupportedFieldError
from ...text import around, joined
from ..http import Plain, refuse
from .documents import PDF, PdfPart, check_text_type, shown_file, text_of_file
from .tools import (
    base64_part,
    function_call,
    newest_turn,
    not_text,
    part_text,
    read_content,
    skip,
    text_part,
    url_part,
)

# Claude Code's first line: it differs with each version and session, and says nothing to a model.
BILLING = "x-anthropic-billing-header:"


class BlockSource(msgspec.Struct, kw_only=True):
    """The content of a document or of a picture."""

    type: str
    media_type: str = "text/plain"
    data: str | None = None
    url: str | None = None  # of a picture
    content: "str | list[ContentBlock] | None" = None


class ContentBlock(msgspec.Struct, kw_only=True):
    """A content block of any type: of a message, a system prompt or a tool result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    # one block: of hosted tools
    content: "str | list[ContentBlock] | ContentBlock | None" = None
    is_error: bool | None = None
    source: "BlockSource | str | None" = None  # of a search result: its URL
    title: str | None = None
    tool_name: str | None = None  # of a tool_reference

    @property
    def parts(self) -> "str | list[ContentBlock]":
        return [self.content] if isinstance(self.content, ContentBlock) else self.content or ""


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """One turn; system messages may be among them."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A tool of the client's own, one with a schema that Anthropic has defined, or a hosted one."""

    name: str | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    defer_loading: Any = None
    allowed_callers: Any = None
    strict: bool | None = None


def conversation(
    given: list[ContentBlock] | str | None, turns: Sequence[AnthropicMessage], skipped: list[str]
) -> list[Plain]:
    """System prompt and turns as messages; neighbours of one role become one message.

    A tool result is a message of the role tool; one that reports an error says so in its text.
    Blocks of tools that Anthropic's servers run are left out, and noted in `skipped`.
    """
    if not turns:
        raise InvalidRequestError.of("messages", "is empty; send at least one.")
    messages: list[Plain] = []
    system = _without_billing(_text(given, "system")) if given else ""
    if system:
        messages.append({"role": "system", "content": system})
    newest = newest_turn([message.role for message in turns])
    for number, message in enumerate(turns):
        place = f"messages[{number}]"
        for plain in _turn(message, place, skipped, is_earlier=number < newest):
            if messages and _together(messages[-1], plain):
                messages[-1]["content"] = joined(messages[-1]["content"], plain["content"], "\n\n")
            else:
                messages.append(plain)
    return messages


def _without_billing(system: str) -> str:
    """The system prompt without Claude Code's first line, so that its prefix stays the same."""
    first, _, rest = system.partition("\n")
    return rest.lstrip("\n") if first.startswith(BILLING) else system


def _together(one: Plain, two: Plain) -> bool:
    plain = {"role", "content"}
    return one["role"] == two["role"] and one["role"] != "tool" and set(one) == set(two) == plain


def openai_tools(tools: Sequence[AnthropicTool] | None, skipped: list[str]) -> list[Plain]:
    """The tools in OpenAI's form, which templates expect."""
    functions = []
    for number, tool in enumerate(tools or ()):
        where = f"tools[{number}]"
        if tool.type is not None and tool.type != "custom" and tool.type not in DEFINED:
            skip(skipped, where, tool.type)
            continue
        if tool.name is None:
            raise InvalidRequestError.of(f"{where}.name", "is missing, and is required.")
        if tool.defer_loading:  # it is told at once: nothing here searches for tools
            skip(skipped, where, "defer_loading")
        refuse(f"{where}.allowed_callers", tool.allowed_callers, (["direct"],))
        # Templates write a function in the order of its keys: models know OpenAI's.
        told = {"description": tool.description} if tool.description else {}
        function: Plain = {"name": tool.name, **told, **DEFINED.get(tool.type or "", {}), **told}
        function.setdefault("parameters", tool.input_schema or {})
        if tool.strict:
            function["strict"] = True
        functions.append({"type": "function", "function": function})
    return functions


def _turn(
    message: AnthropicMessage, path: str, skipped: list[str], *, is_earlier: bool
) -> list[Plain]:
    if message.role == "assistant":
        content = message.content
        return [_earlier_answer(content, f"{path}.content", skipped, is_earlier=is_earlier)]
    if isinstance(message.content, str) or message.role == "system":
        return [{"role": message.role, "content": _text(message.content, f"{path}.content")}]
    messages: list[Plain] = []
    rest: list[ContentBlock] = []
    read_part = partial(_part, skipped=skipped)
    notes = skipped if is_earlier else None
    for number, block in enumerate(message.content):
        if block.type == "tool_result":
            messages.append(_tool_result(block, read_part, f"{path}.content[{number}]", notes))
        else:
            rest.append(block)
    if rest or not messages:
        said = read_content(rest, read_part, f"{path}.content", notes)
        messages.append({"role": "user", "content": said})
    return messages


def _earlier_answer(
    content: str | list[ContentBlock], path: str, skipped: list[str], *, is_earlier: bool
) -> Plain:
    """An answer: text, reasoning, calls. `is_earlier`: it stands before the newest turn."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    of_type: dict[str, list[ContentBlock]] = {"text": [], "thinking": [], "tool_use": []}
    for number, block in enumerate(content):
        if block.type not in of_type:
            if not (is_earlier or block.type in HOSTED_BLOCKS):
                raise not_text(block.type, f"{path}[{number}]")
            skip(skipped, f"{path}[{number}]", block.type)
            continue
        of_type[block.type].append(block)
    plain: Plain = {"role": "assistant", "content": _text(of_type["text"], path)}
    thoughts = [block.thinking or "" for block in of_type["thinking"]]
    if thoughts:
        plain["reasoning_content"] = "\n".join(thoughts)
    if of_type["tool_use"]:
        plain["tool_calls"] = [_earlier_call(block, path) for block in of_type["tool_use"]]
    return plain


def _earlier_call(block: ContentBlock, path: str) -> Plain:
    if block.name is None or block.id is None:
        raise InvalidRequestError(f"{path}: a tool_use has neither name nor id.", param=path)
    return function_call(block.id, block.name, block.input or {})


def _tool_result(
    block: ContentBlock,
    read_part: Callable[[ContentBlock, str], Plain],
    path: str,
    notes: list[str] | None,
) -> Plain:
    if block.tool_use_id is None:
        raise InvalidRequestError.of(f"{path}.tool_use_id", "is missing.")
    content = read_content(block.parts, read_part, f"{path}.content", notes)
    if block.is_error:
        content = around(content, "Error: ")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _part(block: ContentBlock, path: str, skipped: list[str]) -> Plain:
    """A part, or the name of a tool that `skipped` gets."""
    if block.type == "tool_reference":
        skip(skipped, path, block.type)
        return text_part(f"[tool {block.tool_name}]")
    source = block.source
    if block.type != "image" or not isinstance(source, BlockSource):
        return text_part(_block_text(block, path))
    if source.type == "url":
        return url_part(source.url, None, f"{path}.source.url")
    if source.type != "base64" or source.data is None:
        raise PictureError.of(f"{path}.source", "is no picture in base64, and has no URL.")
    return base64_part(source.data, f"{path}.source.data")


def _text(content: str | Sequence[ContentBlock], path: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join([_block_text(block, f"{path}[{i}]") for i, block in enumerate(content)])


def _block_text(block: ContentBlock, path: str) -> str:
    if block.type == "search_result" and isinstance(block.source, str):
        text = _text(block.parts, f"{path}.content")
        return shown_file(text, block.title or block.source)
    if block.type == "document" and isinstance(block.source, BlockSource):
        return shown_file(_document(block, block.source, path), block.title)
    return part_text(block.type, block.text, path, ("text",))


def _document(block: ContentBlock, source: BlockSource, path: str) -> str:
    if source.type == "content" and source.content is not None:
        return _text(source.content, f"{path}.source.content")
    if source.type not in ("text", "base64") or source.data is None:
        raise UnsupportedFieldError.of(
            f"{path}.source", "of this document holds no file; send it as text or in base64."
        )
    check_text_type(source.media_type, f"{path}.source.media_type")
    if source.type == "text":
        return source.data
    return text_of_file(source.data, f"{path}.source.data")


def pdfs(
    system: list[ContentBlock] | str | None, turns: Sequence[AnthropicMessage]
) -> Iterator[PdfPart]:
    for block, path in _blocks(system, "system"):
        yield from _pdf(block, path)
    newest = newest_turn([message.role for message in turns])
    for number, message in enumerate(turns):
        place = f"messages[{number}].content"
        for block, path in _blocks(message.content, place):
            yield from _pdf(block, path, is_earlier=number < newest)
            for inner, inner_path in _blocks(block.parts, f"{path}.content"):
                yield from _pdf(inner, inner_path, is_earlier=number < newest)


def _blocks(
    content: str | list[ContentBlock] | None, path: str
) -> Iterator[tuple[ContentBlock, str]]:
    for number, block in enumerate([] if isinstance(content, str) else content or ()):
        yield block, f"{path}[{number}]"


def _pdf(block: ContentBlock, path: str, *, is_earlier: bool = False) -> Iterator[PdfPart]:
    source = block.source
    if (
        block.type == "document"
        and isinstance(source, BlockSource)
        and (source.type, source.media_type.lower()) == ("base64", PDF)
        and source.data is not None
    ):
        place = f"{path}.source.data"
        yield PdfPart(source.data, place, partial(_be_text, source), is_earlier)


def _be_text(source: BlockSource, text: str) -> None:
    source.type, source.media_type, source.data = "text", "text/plain", text


# -- tools and blocks that Anthropic has defined ------------------------------------------------
#
# Sources: its documentation's pages on the bash, text editor and memory tools; types of its Python
# library 2.10.

_PATH = {"type": "string", "description": "Path of the file or folder."}
_LINES = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_TEXT = {"type": "string"}
_EDITS: dict[str, Any] = {
    "path": _PATH,
    "view_range": {**_LINES, "description": "With view: first and last line; -1 is the end."},
    "old_str": {**_TEXT, "description": "With str_replace: the text to be replaced."},
    "new_str": {**_TEXT, "description": "With str_replace: the text in its place."},
    "file_text": {**_TEXT, "description": "With create: the content of the file."},
    "insert_line": {"type": "integer", "description": "With insert: the line before the text."},
    "insert_text": {**_TEXT, "description": "With insert: the text."},
}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _editor(*commands: str, **more: Any) -> dict[str, Any]:
    command = {"type": "string", "enum": list(commands)}
    return {
        "description": "Views, creates and edits text files.",
        "parameters": _object({"command": command, **_EDITS, **more}, "command", "path"),
    }


_BASH = {
    "description": "Runs a command in a shell that stays open, or restarts that shell.",
    "parameters": _object(
        {
            "command": {"type": "string", "description": "The command to run."},
            "restart": {"type": "boolean", "description": "Restart the shell instead."},
        }
    ),
}
_COMMANDS = ("view", "create", "str_replace", "insert")
_MOVES = {"old_path": _TEXT, "new_path": _TEXT}
_MEMORY = _editor(*_COMMANDS, "delete", "rename", **_MOVES)
DEFINED: dict[str, dict[str, Any]] = {  # run by the client; by `type`
    "bash_20250124": _BASH,
    "text_editor_20250124": _editor(*_COMMANDS, "undo_edit"),
    "text_editor_20250429": _editor(*_COMMANDS),
    "text_editor_20250728": _editor(*_COMMANDS),
    "memory_20250818": {
        "description": "Reads and writes files under /memories, which last between conversations.",
        "parameters": {**_MEMORY["parameters"], "required": ["command"]},
    },
}
_RUN_BY = ("code_execution", "bash_code_execution", "text_editor_code_execution")
HOSTED_BLOCKS = frozenset(  # in earlier answers of Anthropic's own models
    (
        "server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload",
        "redacted_thinking", "compaction", "fallback",  # only its own servers can read them
        *(f"{tool}_tool_result" for tool in ("web_search", "web_fetch", "tool_search", *_RUN_BY)),
    )
)  # fmt: skip
