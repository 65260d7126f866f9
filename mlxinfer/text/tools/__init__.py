"""Tool calls in an answer: formats, one parser for all of them, and grammars that force calls.

How a model writes calls is read off its chat template (`infer.py`). A format is written by hand
only where that fails on a published template (`known.py`). A template without tools gets a form
that its messages ask for (`generic.py`).
"""

from .format import ToolFormat, ToolParser, WrittenCall
from .generic import generic_messages
from .known import FORMATS, GENERIC, detect_tools, tool_format
from .schema import Tool, Toolbox
from .use import ToolUse
