"""Tools of a conversation in the terminal: functions of a Python file, and MCP servers."""

import json
import runpy
from collections.abc import Callable, Mapping, Sequence
from inspect import isfunction
from pathlib import Path
from typing import Any, Protocol

from ..config.file import ConfigFile
from ..errors import InvalidRequestError, shown
from ..mcp_tools import MAX_RESULT_CHARS
from ._configuration import open_tools

MODULE = "tools_of_a_chat"  # the name under which a file of functions runs


class Tools(Protocol):
    """Where tools come from; each member as in `McpTools`."""

    @property
    def schemas(self) -> list[dict[str, Any]]: ...
    @property
    def failures(self) -> dict[str, str]: ...
    @property
    def left_out(self) -> dict[str, str]: ...
    def allows(self, name: str) -> bool: ...
    def call(self, name: str, arguments: str) -> str: ...
    def close(self) -> None: ...


class FunctionTools:
    """The functions that a Python file defines, but those whose names begin with `_`.

    They run in this process, as the user, and only after the user was asked.

    Raises:
        InvalidRequestError: the file cannot be run, it defines no function, or one of them has no
            docstring or type hints, see `text.tools.functions`.
    """

    def __init__(self, path: Path) -> None:
        from ..text.tools.functions import tool_of

        self._functions = _functions_of(path)
        self.schemas = [tool_of(function) for function in self._functions.values()]
        self.failures: dict[str, str] = {}
        self.left_out: dict[str, str] = {}

    def allows(self, name: str) -> bool:
        return False

    def call(self, name: str, arguments: str) -> str:
        """What a function returns, as text or JSON; its error is a text for the model."""
        try:
            returned = self._functions[name](**json.loads(arguments or "{}"))
            text = returned if isinstance(returned, str) else json.dumps(returned, default=str)
        except Exception as error:  # of the user's code: the model reads it
            return f"Error: {type(error).__name__}: {error}"
        return text[:MAX_RESULT_CHARS]

    def close(self) -> None:
        """Nothing runs on."""


class JoinedTools:
    """The tools of several sources.

    Raises:
        InvalidRequestError: two of them have a tool of one name.
    """

    def __init__(self, sources: Sequence[Tools]) -> None:
        self._sources = sources
        self._source_of: dict[str, Tools] = {}
        for source in sources:
            for schema in source.schemas:
                name = schema["function"]["name"]
                if name in self._source_of:
                    raise InvalidRequestError(f"Two tools are called {name}; rename the function.")
                self._source_of[name] = source

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [schema for source in self._sources for schema in source.schemas]

    @property
    def failures(self) -> dict[str, str]:
        return {name: why for source in self._sources for name, why in source.failures.items()}

    @property
    def left_out(self) -> dict[str, str]:
        return {name: why for source in self._sources for name, why in source.left_out.items()}

    def allows(self, name: str) -> bool:
        return name in self._source_of and self._source_of[name].allows(name)

    def call(self, name: str, arguments: str) -> str:
        if name not in self._source_of:
            return f"Error: there is no tool {name[:100]!r}."
        return self._source_of[name].call(name, arguments)

    def close(self) -> None:
        for source in self._sources:
            source.close()


def conversation_tools(config: ConfigFile, functions: Path | None) -> JoinedTools | None:
    """Run a file of functions, and connect to the MCP servers of a config file."""
    sources: list[Tools] = [] if functions is None else [FunctionTools(functions)]
    servers = open_tools(config)
    if servers is not None:
        sources.append(servers)
    try:
        return JoinedTools(sources) if sources else None
    except InvalidRequestError:
        for source in sources:
            source.close()
        raise


def _functions_of(path: Path) -> Mapping[str, Callable[..., Any]]:
    try:
        members = runpy.run_path(str(path), run_name=MODULE)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}.") from None
    except (Exception, SystemExit) as error:  # whatever the file raises
        raise InvalidRequestError(
            f"{path} does not run: {type(error).__name__}: {error}."
        ) from error
    functions = {
        name: member
        for name, member in members.items()
        if isfunction(member) and not name.startswith("_") and member.__module__ == MODULE
    }
    if not functions:
        raise InvalidRequestError(f"{shown(str(path))} defines no function.")
    return functions
