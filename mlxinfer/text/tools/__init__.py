"""Tool calls in an answer: formats by their syntax, one parser for all of them.

Known formats are in `json_calls`, `token_calls`, `xml_calls`, `pythonic` and `gemma`. Others are
read off the model's chat template (`probe`, `template_format`), and a template without tools gets a
`generic` form.
"""

from .detect import FORMATS, detect_tools, tool_format
from .format import ToolFormat, ToolParser
from .generic import GENERIC, generic_messages
from .schema import Tool, Toolbox
from .use import ToolUse, forced_grammar

__all__ = [
    "FORMATS",
    "GENERIC",
    "Tool",
    "ToolFormat",
    "ToolParser",
    "ToolUse",
    "Toolbox",
    "detect_tools",
    "forced_grammar",
    "generic_messages",
    "tool_format",
]
