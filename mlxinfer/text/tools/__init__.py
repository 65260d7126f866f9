"""Tool calls in an answer: one file per format, one parser for all of them."""

from .detect import FORMATS, detect_tools, require_tools, tool_format
from .format import ToolFormat, ToolParser
from .schema import Tool, Toolbox
from .use import ToolUse, forced_grammar

__all__ = [
    "FORMATS",
    "Tool",
    "ToolFormat",
    "ToolParser",
    "ToolUse",
    "Toolbox",
    "detect_tools",
    "forced_grammar",
    "require_tools",
    "tool_format",
]
