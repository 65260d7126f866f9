"""Declared tools: functions, custom tools and namespaces as chat templates read them.

Hosted tools (web search, file search, MCP and others) and the shells of particular clients have
nothing behind them here. The responses API skips them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import InvalidRequestError
from ..errors import UnsupportedFieldError
from ..fields.checks import MAX_DEPTH, check_json_size
from ..fields.lark_pattern import NotRegularError, lark_pattern
from ..fields.tools import Skipped, begun_object

Plain = dict[str, Any]
INPUT = "input"  # the one parameter of a custom tool
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")


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
        functions: in the form of chat completions.
        declared: by the names that the model sees, of all tools but plain functions.
        skipped: hosted tools, and grammars of custom tools that are not enforced.
    """

    functions: list[Plain] = field(default_factory=list)
    declared: dict[str, DeclaredTool] = field(default_factory=dict)
    skipped: Skipped = field(default_factory=Skipped)

    def choice(self, choice: str | Plain | None) -> str | Plain:
        """The tool_choice in the form of chat completions.

        Raises:
            UnsupportedFieldError: it demands a tool that is not callable here.
        """
        if not isinstance(choice, dict):
            return "auto" if choice is None else choice
        kind = choice.get("type")
        inner = choice.get(str(kind))
        if isinstance(inner, dict):  # as chat completions nest it
            choice = {**inner, "type": kind}
        if kind in ("function", "custom") and "name" in choice:
            shown = shown_name(choice["name"], choice.get("namespace"))
            return {"type": "function", "function": {"name": shown}}
        if kind == "allowed_tools":
            raise UnsupportedFieldError(
                "tool_choice of type 'allowed_tools' is not supported; send these tools alone.",
                param="tool_choice",
            )
        raise UnsupportedFieldError(
            f"tool_choice demands a tool of type {str(kind)[:50]!r}, which is not callable here.",
            param="tool_choice",
        )

    def add(self, tool: Plain, path: str, namespace: str | None = None) -> None:
        """Add the tool at `path`, or skip it; raises as `read_tools`."""
        kind = tool.get("type")
        if kind == "namespace" and namespace is None:
            name, inner = tool.get("name"), tool.get("tools")
            if not isinstance(name, str) or not isinstance(inner, list):
                raise InvalidRequestError(f"{path} has no name or no tools.", param=path)
            for number, each in enumerate(inner):
                if not isinstance(each, dict):
                    raise InvalidRequestError(f"{path}.tools[{number}] is no object.", param=path)
                self.add(each, f"{path}.tools[{number}]", name)
        elif kind in ("function", "custom"):
            self._add_callable(tool, path, namespace)
        elif kind is None:
            raise InvalidRequestError(f"{path}.type is missing.", param=f"{path}.type")
        else:
            self.skipped.add(path, kind)

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
        """A custom tool as a function with one text, constrained by the tool's grammar."""
        given: Mapping[str, Any] = tool.get("format") or {"type": "text"}
        if not isinstance(given, Mapping):
            raise InvalidRequestError(f"{path}.format is no object.", param=f"{path}.format")
        text: Plain = {"type": "string", "description": "The whole input of the tool, as text."}
        description, strict = tool.get("description"), False
        if given.get("type") == "grammar":
            definition = given.get("definition")
            if not isinstance(definition, str):
                raise InvalidRequestError(
                    f"{path}.format.definition is missing.", param=f"{path}.format.definition"
                )
            text["description"] += f" It follows this grammar:\n{definition}"
            pattern = self._pattern(given.get("syntax"), definition, path)
            if pattern is not None:
                text["pattern"], strict = pattern, True
        elif given.get("type") != "text":
            raise UnsupportedFieldError(
                f"{path}.format is of type {str(given.get('type'))[:50]!r}; expected text or "
                "grammar.",
                param=f"{path}.format",
            )
        function: Plain = {
            "name": tool.get("name"),
            "parameters": {"type": "object", "properties": {INPUT: text}, "required": [INPUT]},
            "strict": strict,
        }
        return function if description is None else {**function, "description": description}

    def _pattern(self, syntax: object, definition: str, path: str) -> str | None:
        """The grammar as a pattern; None, and noted, if it is beyond regular expressions."""
        if syntax == "regex":
            return f"^(?:{definition})$"
        if syntax != "lark":
            raise UnsupportedFieldError(
                f"{path}.format.syntax is {str(syntax)[:50]!r}; expected lark or regex.",
                param=f"{path}.format.syntax",
            )
        try:
            return f"^(?:{lark_pattern(definition)})$"
        except NotRegularError:
            self.skipped.add(f"{path}.format", "grammar")
            return None


def read_tools(tools: list[Plain] | None) -> DeclaredTools:
    """The tools of a request to the responses API. Takes a while.

    Raises:
        InvalidRequestError: a tool is incomplete, or all of them are too large.
    """
    check_json_size(tools, param="tools", max_depth=MAX_DEPTH)
    found = DeclaredTools()
    for number, tool in enumerate(tools or ()):
        found.add(tool, f"tools[{number}]")
    return found


def read_chat_tools(tools: list[Plain] | None) -> DeclaredTools:
    """The tools of a chat request; raises as `read_tools`, but for functions, which pass."""
    check_json_size(tools, param="tools", max_depth=MAX_DEPTH)
    found = DeclaredTools()
    for number, tool in enumerate(tools or ()):
        if tool.get("type") == "custom":
            found.add(_flat(tool, f"tools[{number}]"), f"tools[{number}].custom")
        else:
            found.functions.append(tool)
    return found


def _flat(tool: Plain, path: str) -> Plain:
    """A custom tool of a chat request in the form of the responses API."""
    custom = tool.get("custom")
    if not isinstance(custom, dict):
        raise InvalidRequestError(f"{path}.custom is no object.", param=f"{path}.custom")
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
