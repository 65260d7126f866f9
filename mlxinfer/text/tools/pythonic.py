"""CallWriter as a list of Python calls: [f(a=1), g(b="x")]. Llama 4, Llama 3.2, LFM2, Gemma 3.

Source: Meta's prompt formats of Llama 3.2 and 4 (a bare list, for Llama 4 at times between
<|python_start|> and <|python_end|>), the chat template of LiquidAI/LFM2 (<|tool_call_start|>[...]
<|tool_call_end|>) and Google's guide to function calling with Gemma 3 (a bare list, or a block
```tool_code). Arguments are given by name: positional ones have no place in JSON.
"""

import json
from collections.abc import Sequence

from ...errors import InvalidRequestError
from .format import CallWriter, Clues, ToolFormat, require_known
from .lark import Lark
from .reader import Malformed, Parse, Reader, compiled
from .schema import Tool, Toolbox, standalone_schema
from .values import copy_literal

_NAME = compiled(r"[\w.:/-]+")
_KEY = compiled(r"[\w.:/$@-]+")  # tools have more names than Python does


class Pythonic(ToolFormat):
    """A list of calls, bare or between marks.

    Args:
        name: under which a user chooses it.
        frames: (mark before, mark after), where there are marks.
        bare: a list without marks is calls, if declared tools are called.
        clues: texts of which one in template or tokens shows this format.
    """

    def __init__(
        self, name: str, frames: Sequence[tuple[str, str]], *, bare: bool, clues: Sequence[str]
    ) -> None:
        self.name = name  # type: ignore[misc]  # one class, several formats
        self.begins = tuple(begin for begin, _ in frames)  # type: ignore[misc]
        self.ends = tuple(end for _, end in frames)  # type: ignore[misc]
        self.bare = ("[",) if bare else ()  # type: ignore[misc]
        self._end_of = dict(frames)
        self._clues = tuple(clues)

    def detect(self, clues: Clues) -> bool:
        """A text of the family stands in the template or among the tokens."""
        return any(clue in clues.template or clue in clues.tokens for clue in self._clues)

    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read a list, or a single call between marks; a missing end mark is tolerated."""
        yield from reader.space()
        if mark in self.bare or (yield from reader.accept("[")):
            yield from read_calls(reader, calls, mark, self.bare)
        else:
            yield from read_one(reader, calls, mark, self.bare)
        end = self._end_of.get(mark)
        if end is not None:
            yield from reader.space()
            if (yield from reader.accept(end)):
                reader.commit()

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """A list, between marks if there are any; values are JSON, a near subset of Python."""
        call = lark.one_of([call_rule(lark, tool) for tool in tools.alternatives()])
        calls = lark.repeated(call, ", ", parallel=parallel)
        begin, end = next(iter(self._end_of.items()), ("", ""))
        if self.bare:
            begin = end = ""
        return f"{lark.text(begin + '[')} {calls} {lark.text(']' + end)}"


def read_calls(reader: Reader, calls: CallWriter, mark: str, bare: tuple[str, ...]) -> Parse[None]:
    """Read the calls of a list after its opening bracket, and its end."""
    while True:
        yield from reader.space()
        yield from read_one(reader, calls, mark, bare)
        yield from reader.space()
        if (yield from reader.expect(",", "]")) == "]":
            break
    reader.commit()


def read_one(reader: Reader, calls: CallWriter, mark: str, bare: tuple[str, ...]) -> Parse[None]:
    """Read one call."""
    name = yield from reader.whole_run(_NAME)
    yield from reader.expect("(")
    require_known(calls, name, mark, bare)
    calls.begin(name)
    calls.arguments("{")
    names: set[str] = set()
    while True:
        yield from reader.space()
        if (yield from reader.accept(")")):
            break
        if names:
            yield from reader.expect(",")
            yield from reader.space()
            if (yield from reader.accept(")")):
                break
        yield from _keyword(reader, calls, names)
    calls.arguments("}")
    calls.end()


def _keyword(reader: Reader, calls: CallWriter, names: set[str]) -> Parse[None]:
    key = yield from reader.whole_run(_KEY)
    if not key or key in names:
        raise Malformed("an argument without a name, or twice the same")
    yield from reader.space()
    yield from reader.expect("=")
    yield from reader.space()
    calls.arguments(f"{', ' if names else ''}{json.dumps(key, ensure_ascii=False)}: ")
    names.add(key)
    yield from copy_literal(reader, calls.arguments)


def call_rule(lark: Lark, tool: Tool) -> str:
    """Return what matches one call of a tool; values are JSON, a near subset of Python."""

    def keyword(name: str) -> str:
        if not _KEY.fullmatch(name):
            raise InvalidRequestError(
                f"The tool {tool.name!r} cannot be forced on this model: its calls are Python's, "
                f"which have no way to name the parameter {name!r}.",
                param="tools",
            )
        schema = standalone_schema(tool.properties[name], tool.parameters)
        return f"{lark.text(f'{name}=')} {lark.json(schema)}"

    return f"{lark.text(f'{tool.name}(')} {lark.arguments(tool, keyword, ', ')} {lark.text(')')}"


LFM2 = Pythonic(
    "lfm2",
    [("<|tool_call_start|>", "<|tool_call_end|>")],
    bare=False,
    clues=("<|tool_call_start|>", "<|tool_list_start|>"),
)
LLAMA_PYTHONIC = Pythonic(
    "llama_pythonic",
    [("<|python_start|>", "<|python_end|>")],
    bare=True,
    clues=("<|python_start|>",),
)
GEMMA3 = Pythonic("gemma3", [("```tool_code", "```")], bare=True, clues=("tool_code",))
