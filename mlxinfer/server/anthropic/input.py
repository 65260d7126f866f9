"""Anthropic's conversations and tools, converted to messages and tools of chat templates."""

from collections.abc import Sequence
from typing import Any

from ...errors import InvalidRequestError
from ..errors import UnsupportedFieldError
from ..fields.checks import refuse
from ..fields.tools import Skipped
from .types import AnthropicMessage, AnthropicTool, Block, CountRequest, ToolChoice

Plain = dict[str, Any]

# Tools of which Anthropic has defined the schema, and those that only its servers run. Sources: its
# documentation's pages on the bash, text editor and memory tools; types of its Python library 2.10.
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
        *("server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload"),
        *(f"{tool}_tool_result" for tool in ("web_search", "web_fetch", "tool_search", *_RUN_BY)),
    )
)


def conversation(body: CountRequest, skipped: Skipped) -> list[Plain]:
    """System prompt and turns; neighbours of one role become one message.

    A tool result is a message of the role tool; one that reports an error says so in its text.
    Blocks of tools that Anthropic's servers run are left out, and noted in `skipped`.

    Raises:
        InvalidRequestError: no messages, or an incomplete block.
        UnsupportedFieldError: images, documents and other blocks that are not text.
    """
    if not body.messages:
        raise InvalidRequestError("messages is empty; send at least one.", param="messages")
    found: list[Plain] = []
    if body.system:
        found.append({"role": "system", "content": _text(body.system, "system")})
    for number, message in enumerate(body.messages):
        for plain in _turn(message, f"messages[{number}]", skipped):
            if found and _together(found[-1], plain):
                found[-1]["content"] += "\n\n" + plain["content"]
            else:
                found.append(plain)
    return found


def continues_last(messages: Sequence[AnthropicMessage]) -> bool:
    """Whether the answer continues the last message, the assistant's (a prefill).

    Raises:
        InvalidRequestError: that message calls a tool, and its result is missing.
    """
    if not messages or messages[-1].role != "assistant":
        return False
    last = messages[-1]
    if isinstance(last.content, list) and any(b.type == "tool_use" for b in last.content):
        raise InvalidRequestError(
            "The last message calls a tool; its tool_result has to follow.", param="messages"
        )
    return True


def openai_tools(tools: Sequence[AnthropicTool] | None, skipped: Skipped) -> list[Plain]:
    """The tools in OpenAI's form, which templates expect.

    Tools that clients run by a schema of Anthropic's (shell, text editor) have that schema; tools
    that Anthropic's servers run are left out, and noted in `skipped`.

    Raises:
        UnsupportedFieldError: a field that would change the answer.
    """
    found = []
    for number, tool in enumerate(tools or ()):
        where = f"tools[{number}]"
        if tool.type is not None and is_hosted(tool.type):
            skipped.add(where, tool.type)
            continue
        if tool.name is None:
            raise InvalidRequestError(
                f"{where}.name is missing, and is required.", param=f"{where}.name"
            )
        refuse(f"{where}.defer_loading", tool.defer_loading, (False,))
        refuse(f"{where}.allowed_callers", tool.allowed_callers, (["direct"],))
        function: Plain = {"name": tool.name, **DEFINED.get(tool.type or "", {})}
        function.setdefault("parameters", tool.input_schema or {})
        if tool.description:
            function["description"] = tool.description
        if tool.strict:
            function["strict"] = True
        found.append({"type": "function", "function": function})
    return found


def openai_choice(choice: ToolChoice | None) -> str | Plain:
    """The tool_choice in OpenAI's form; raises InvalidRequestError for a missing name."""
    if choice is None:
        return "auto"
    if choice.type != "tool":
        return {"any": "required"}.get(choice.type, choice.type)
    if choice.name is None:
        raise InvalidRequestError("tool_choice.name is missing.", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _turn(message: AnthropicMessage, path: str, skipped: Skipped) -> list[Plain]:
    if message.role == "assistant":
        return [_answer(message.content, f"{path}.content", skipped)]
    if isinstance(message.content, str) or message.role == "system":
        return [{"role": message.role, "content": _text(message.content, f"{path}.content")}]
    found: list[Plain] = []
    rest: list[Block] = []
    for number, block in enumerate(message.content):
        if block.type == "tool_result":
            found.append(_tool_result(block, f"{path}.content[{number}]"))
        else:
            rest.append(block)
    if rest or not found:
        found.append({"role": "user", "content": _text(rest, f"{path}.content")})
    return found


def _answer(content: str | list[Block], path: str, skipped: Skipped) -> Plain:
    """An earlier answer: its text, reasoning and calls."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    of_type: dict[str, list[Block]] = {"text": [], "thinking": [], "tool_use": []}
    for number, block in enumerate(content):
        if block.type == "redacted_thinking":  # encrypted by another server
            continue
        if block.type in HOSTED_BLOCKS:
            skipped.add(f"{path}[{number}]", block.type)
            continue
        if block.type not in of_type:
            raise _unsupported(block, f"{path}[{number}]")
        of_type[block.type].append(block)
    plain: Plain = {"role": "assistant", "content": _text(of_type["text"], path)}
    thoughts = [block.thinking or "" for block in of_type["thinking"]]
    if thoughts:
        plain["reasoning_content"] = "\n".join(thoughts)
    if of_type["tool_use"]:
        plain["tool_calls"] = [_call(block, path) for block in of_type["tool_use"]]
    return plain


def _call(block: Block, path: str) -> Plain:
    if block.name is None or block.id is None:
        raise InvalidRequestError(f"{path}: a tool_use has neither name nor id.", param=path)
    function = {"name": block.name, "arguments": block.input or {}}
    return {"id": block.id, "type": "function", "function": function}


def _tool_result(block: Block, path: str) -> Plain:
    if block.tool_use_id is None:
        raise InvalidRequestError(f"{path}.tool_use_id is missing.", param=f"{path}.tool_use_id")
    text = _text(block.content or "", f"{path}.content")
    if block.is_error:
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _text(content: str | Sequence[Block], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, block in enumerate(content):
        if block.type != "text":
            raise _unsupported(block, f"{path}[{number}]")
        if block.text is None:
            raise InvalidRequestError(f"{path}[{number}].text is missing.", param=path)
        texts.append(block.text)
    return "\n".join(texts)


def _unsupported(block: Block, path: str) -> UnsupportedFieldError:
    return UnsupportedFieldError(
        f"{path} is of type {block.type[:50]!r}; this model reads text only.", param=f"{path}.type"
    )


def _together(one: Plain, two: Plain) -> bool:
    """Whether two messages are one turn in Anthropic's API."""
    plain = {"role", "content"}
    return one["role"] == two["role"] and one["role"] != "tool" and set(one) == set(two) == plain


def is_hosted(kind: str) -> bool:
    """Whether a tool of this `type` has nothing behind it here."""
    return kind != "custom" and kind not in DEFINED
