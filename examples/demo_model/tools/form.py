"""Tools as the demo's chat template shows them, one signature a line. Knows no conversation.

get_weather(city: string, unit?: celsius|fahrenheit): The weather of a city
"""

import json
import re
from dataclasses import dataclass
from typing import Any

TYPES = ("string", "integer", "number", "boolean", "array", "object")
Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter; its kind is one of TYPES, or words between bars of which one is taken."""

    name: str
    kind: str = "string"
    required: bool = True

    @property
    def words(self) -> list[str]:
        """The values that an enumeration allows; none for a type."""
        return [] if self.kind in TYPES else self.kind.split("|")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a conversation may call."""

    name: str
    parameters: tuple[Parameter, ...]
    description: str

    @property
    def signature(self) -> str:
        """The line that the model sees."""
        written = (f"{p.name}{'' if p.required else '?'}: {p.kind}" for p in self.parameters)
        return f"{self.name}({', '.join(written)}): {self.description}"

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as OpenAI's API has it."""
        properties = {
            p.name: {"type": "string", "enum": p.words} if p.words else {"type": p.kind}
            for p in self.parameters
        }
        parameters = {
            "type": "object",
            "properties": properties,
            "required": [p.name for p in self.parameters if p.required],
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def read_tool(signature: str) -> Tool:
    """Return the tool of a signature."""
    match = re.fullmatch(r"([\w.-]+)\((.*?)\): (.*)", signature)
    assert match is not None, f"expected name(parameter: kind, ...): text, not {signature!r}"
    name, inside, description = match.groups()
    pairs = [part.split(": ") for part in inside.split(", ") if part]
    parameters = tuple(Parameter(n.removesuffix("?"), k, not n.endswith("?")) for n, k in pairs)
    return Tool(name, parameters, description)


def header(tools: list[Tool], system: str | None) -> str:
    """Return the system message of a conversation with tools."""
    lines = "\n".join(["Tools:", *(tool.signature for tool in tools)])
    return f"{system}\n\n{lines}" if system else lines


def written_call(name: str, arguments: Arguments) -> str:
    """Return a call as the model writes it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"
