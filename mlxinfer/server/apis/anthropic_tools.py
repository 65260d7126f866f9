"""Tools and blocks that Anthropic has defined.

Sources: its documentation's pages on the bash, text editor and memory tools; types of its Python
library 2.10.
"""

from typing import Any

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
