"""Tools that the model may call: request fields to a ToolUse. Knows limits; no API's spelling."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InvalidRequestError
from ...text import ToolUse
from ..registry.served import ServedModel
from .extent import check_extent

MAX_TOOLS = 512
MAX_DEPTH = 128  # levels of JSON of a tool


def tool_use(
    model: ServedModel,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    *,
    parallel: bool | None = None,
) -> ToolUse | None:
    """How a request uses tools; None: not at all.

    Raises:
        InvalidRequestError: a tool or the choice is wrong.
        TemplateError: the model's template knows no tools.
    """
    if tools and len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"{len(tools)} tools; at most {MAX_TOOLS} are accepted.", param="tools"
        )
    check_extent(tools, param="tools", max_depth=MAX_DEPTH)
    check_extent(choice, param="tool_choice", max_depth=MAX_DEPTH)
    return model.asking.tool_use(tools, choice, parallel=parallel is not False)
