"""Calls written as JSON objects {"name": ..., "arguments": ...}: Hermes, Llama 3, Mistral."""

import json
import secrets
import string
from collections.abc import Callable, Sequence
from functools import partial

from .format import CallWriter, Clues, ToolFormat, require_known
from .lark import Lark
from .pythonic import read_calls
from .reader import Malformed, Parse, Reader, compiled
from .schema import Toolbox
from .values import copy_value, read_string, read_value

NAMES = ("name", "function", "tool_name")
ARGUMENTS = ("arguments", "parameters")
_NAME = compiled(r"[\w.:/-]+")
_ID_CHARS = string.ascii_letters + string.digits


def read_call(
    reader: Reader,
    calls: CallWriter,
    check: Callable[[str], object] = str,
    *,
    opened: bool = False,
    keys: tuple[Sequence[str], Sequence[str]] = (NAMES, ARGUMENTS),
) -> Parse[None]:
    """Read the object; its arguments are passed on as they arrive if the name stands before them.

    Arguments may also be null, or JSON within a string. Other keys, such as "type" or "id", are
    skipped. A "function" object inside, as OpenAI's API has it, is read as the call.

    Args:
        reader: the next character begins the object.
        calls: receives the call.
        check: called with the name; raises Malformed for a name that cannot be meant.
        opened: the object's first character has been read.
        keys: of the name and of the arguments.
    """
    if not opened:
        yield from reader.expect("{")
    yield from _CallObject(reader, calls, check, keys).read()


def read_arguments(reader: Reader, calls: CallWriter, name: str) -> Parse[None]:
    """Read arguments that follow the name of their call, and end the call."""
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        raise Malformed("the arguments are no object")
    calls.begin(name)
    yield from copy_value(reader, calls.arguments)
    calls.end()


class _CallObject:
    def __init__(
        self,
        reader: Reader,
        calls: CallWriter,
        check: Callable[[str], object],
        keys: tuple[Sequence[str], Sequence[str]],
    ) -> None:
        self._reader, self._calls, self._check = reader, calls, check
        self._name_keys, self._argument_keys = keys
        self._name = ""
        self._held: str | None = None  # arguments that came before the name

    def read(self) -> Parse[None]:
        yield from self._members()
        if not self._name:
            raise Malformed("a call without a name")
        if not self._calls.is_open:
            self._calls.begin(self._name)
            self._calls.arguments(self._held or "{}")
        self._calls.end()

    def _members(self) -> Parse[None]:
        reader = self._reader
        mark = ","
        while mark == ",":
            yield from reader.space()
            key = yield from read_string(reader)
            yield from reader.space()
            yield from reader.expect(":")
            yield from reader.space()
            yield from self._member(key)
            yield from reader.space()
            mark = yield from reader.expect(",", "}")

    def _member(self, key: str) -> Parse[None]:
        first = yield from self._reader.peek()
        if key == "function" and first == "{" and not self._name:
            self._reader.take()
            yield from self._members()
        elif key in self._name_keys and first == '"' and not self._name:
            self._name = yield from read_string(self._reader)
            self._check(self._name)
        elif key in self._argument_keys:
            yield from self._arguments(first)
        else:
            yield from read_value(self._reader)

    def _arguments(self, first: str) -> Parse[None]:
        if self._held is not None or self._calls.is_open:
            raise Malformed("arguments twice")
        if first == "{" and self._name:
            self._calls.begin(self._name)
            yield from copy_value(self._reader, self._calls.arguments)
            return
        text = yield from read_value(self._reader)
        self._held = text if first == "{" else _unwrapped(text)


def _unwrapped(text: str) -> str:
    """Return the object within a JSON string, {} for none; raise Malformed for anything else."""
    try:
        value = json.loads(text)
    except ValueError:  # a number of more digits than Python reads
        raise Malformed("the arguments are no object") from None
    if value is None or value == "":
        return "{}"
    if isinstance(value, str):
        reader = Reader()
        reader.feed(value.strip())
        reader.close()
        pieces: list[str] = []
        steps = copy_value(reader, pieces.append)
        assert next(steps, "done") == "done", "a closed reader waits for nothing"
        if "".join(pieces)[0] == "{":
            return "".join(pieces)
    raise Malformed("the arguments are no object")


class Hermes(ToolFormat):
    """Hermes 2 and 3, Qwen 2.5 and 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

    Source: the chat templates of NousResearch/Hermes-3 and Qwen/Qwen3, and the Hermes
    function-calling repository (github.com/NousResearch/Hermes-Function-Calling).
    """

    name = "hermes"
    begins = ("<tool_call>",)
    ends = ("</tool_call>",)

    def detect(self, clues: Clues) -> bool:
        """The template writes the tag; formats that share it are asked before this one."""
        return "<tool_call>" in clues.template

    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read one object; a missing end tag is tolerated."""
        yield from reader.space()
        yield from read_call(reader, calls)
        yield from reader.space()
        if (yield from reader.accept(*self.ends)):
            reader.commit()

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Name first, arguments by the tool's schema."""
        options = [
            f"{lark.text(f'<tool_call>{chr(10)}' + object_head(tool.name))} "
            f"{lark.parameters(tool)} {lark.text('}' + chr(10) + '</tool_call>')}"
            for tool in tools
        ]
        return lark.repeated(lark.one_of(options), "\n", parallel=parallel)


def object_head(name: str, arguments: str = "arguments") -> str:
    """Return a call's JSON object up to its arguments, as templates write it."""
    return f'{{"name": "{name}", "{arguments}": '


class Llama(ToolFormat):
    """Llama 3: {"name": ..., "parameters": {...}}, bare or after <|python_tag|>.

    Several calls are separated by semicolons, as vLLM's llama3_json and SGLang's llama3 parsers
    expect. The list of Python calls that Llama 3.2 may also write is read too. Without the tag only
    a declared name distinguishes a call from an answer in JSON. Source: Meta's prompt formats of
    Llama 3.1 to 3.3 and their chat templates.
    """

    name = "llama"
    begins = ("<|python_tag|>",)
    bare = ("{", "[")

    def detect(self, clues: Clues) -> bool:
        """The tag is known, and the template mentions parameters."""
        tag = "<|python_tag|>" in clues.tokens or "<|python_tag|>" in clues.template
        return tag and '"parameters"' in clues.template

    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read a list of Python calls, or objects with semicolons between them."""
        yield from reader.space()
        first = mark if mark in self.bare else (yield from reader.accept(*self.bare))
        if first == "[":
            yield from read_calls(reader, calls, mark, self.bare)
            return
        check = partial(_check_llama_name, calls, mark, self.bare)
        yield from read_call(reader, calls, check, opened=first == "{")
        yield from reader.space()
        while (yield from reader.accept(";")):
            yield from reader.space()
            yield from read_call(reader, calls, check)
            yield from reader.space()

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Bare objects, as the templates ask for."""
        options = [
            f"{lark.text(object_head(tool.name, 'parameters'))} {lark.parameters(tool)} "
            f"{lark.text('}')}"
            for tool in tools
        ]
        return lark.repeated(lark.one_of(options), "; ", parallel=parallel)


def _check_llama_name(calls: CallWriter, mark: str, bare: tuple[str, ...], name: str) -> None:
    require_known(calls, name, mark, bare)


class Mistral(ToolFormat):
    """Mistral: [TOOL_CALLS] and a JSON list of calls, or name[ARGS]{...} for each call.

    Ids have nine letters or digits, as mistral-common's validator demands of ids in a conversation.
    Source: mistral-common's instruct tokenizers (v3 to v7: the list; v11: name[ARGS]{...}; v13:
    name[CALL_ID]id[ARGS]{...}) and the chat templates of Mistral-Small 3.1 and 3.2.

    Args:
        listed: a forced call is written in a list; otherwise after its name. Both are read.
    """

    name = "mistral"
    begins = ("[TOOL_CALLS]",)
    ends = ("[ARGS]", "[CALL_ID]")

    def __init__(self, *, listed: bool = True) -> None:
        self._listed = listed

    def detect(self, clues: Clues) -> bool:
        """The mark is in the template or among the tokens."""
        return "[TOOL_CALLS]" in clues.template or "[TOOL_CALLS]" in clues.tokens

    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read a list of calls, or one call."""
        yield from reader.space()
        first = yield from reader.peek()
        if first == "[":
            yield from self._list(reader, calls)
        elif first == "{":
            yield from read_call(reader, calls)
        else:
            yield from self._named(reader, calls)

    def _list(self, reader: Reader, calls: CallWriter) -> Parse[None]:
        reader.take()
        mark = ","
        while mark == ",":
            yield from reader.space()
            yield from read_call(reader, calls)
            yield from reader.space()
            mark = yield from reader.expect(",", "]")
        reader.commit()

    def _named(self, reader: Reader, calls: CallWriter) -> Parse[None]:
        name = yield from reader.whole_run(_NAME)
        yield from reader.space()
        if (yield from reader.accept("[CALL_ID]")):
            yield from reader.whole_run(_NAME)
            yield from reader.space()
        yield from reader.accept("[ARGS]")
        yield from read_arguments(reader, calls, name)

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Calls as the model's own template writes them."""
        if not self._listed:
            options = [
                f"{lark.text(f'[TOOL_CALLS]{tool.name}[ARGS]')} {lark.parameters(tool)}"
                for tool in tools
            ]
            return lark.repeated(lark.one_of(options), "", parallel=parallel)
        options = [
            f"{lark.text(object_head(tool.name))} {lark.parameters(tool)} {lark.text('}')}"
            for tool in tools
        ]
        calls = lark.repeated(lark.one_of(options), ", ", parallel=parallel)
        return f"{lark.text('[TOOL_CALLS][')} {calls} {lark.text(']')}"

    def new_id(self) -> str:
        """Return nine letters or digits."""
        return "".join(secrets.choice(_ID_CHARS) for _ in range(9))
