"""Tools that the model may call: request fields, and what they ask of a generation."""

from typing import Any

from .constraints import ConstraintFields
from .refused import refuse


class ToolFields(ConstraintFields, kw_only=True):
    """Of chat requests."""

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None


def refuse_tools(fields: ToolFields) -> None:
    """Raise UnsupportedFieldError for a field that offers tools."""
    refuse("tools", fields.tools, ([],))
    refuse("tool_choice", fields.tool_choice, ("none", "auto"))
    refuse("functions", fields.functions, ([],))
    refuse("function_call", fields.function_call, ("none", "auto"))
