"""The held-out conversations with tools of `held_out.txt`. Training asks none of them.

A conversation begins with its tools, each behind a plus sign: see `form.py`. Then come what the
user says (>), calls (!) and their results (<), and last what must follow (=): the name and the
arguments of a call, or a grade of an answer as in `grade.py`.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .form import Arguments, Tool, read_tool

FILE = Path(__file__).with_suffix(".txt")


@dataclass(frozen=True, slots=True)
class ToolQuestion:
    """Tools, what was said so far in the form of OpenAI's API, and what must follow."""

    tools: tuple[Tool, ...]
    messages: tuple[dict[str, Any], ...]
    wanted: str

    @property
    def asked(self) -> str:
        return next(str(m["content"]) for m in self.messages if m["role"] == "user")

    @property
    def call(self) -> tuple[str, Arguments] | None:
        """The call that must follow; None: an answer must."""
        return None if self.wanted.startswith("~ ") else read_call(self.wanted)


@cache
def tool_questions() -> tuple[ToolQuestion, ...]:
    """Return all of them, in their order."""
    blocks = FILE.read_text(encoding="utf-8").strip().split("\n\n")
    return tuple(_read(block.splitlines()) for block in blocks)


def read_call(text: str) -> tuple[str, Arguments]:
    name, _, arguments = text.partition(" ")
    return name, json.loads(arguments)


def _read(lines: list[str]) -> ToolQuestion:
    said = {mark: [line[2:] for line in lines if line[0] == mark] for mark in "+>!<="}
    messages: list[dict[str, Any]] = [{"role": "user", "content": said[">"][0]}]
    for call, result in zip(said["!"], said["<"], strict=True):
        name, arguments = read_call(call)
        function = {"name": name, "arguments": json.dumps(arguments)}
        made = [{"id": "call_1", "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "", "tool_calls": made})
        messages.append({"role": "tool", "tool_call_id": "call_1", "content": result})
    return ToolQuestion(tuple(map(read_tool, said["+"])), tuple(messages), said["="][0])
