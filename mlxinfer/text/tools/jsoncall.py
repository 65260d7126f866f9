"""A call written as one JSON object, {"name": ..., "arguments": ...}, whatever stands around it."""

import json
from collections.abc import Callable

from .format import CallWriter
from .jsontext import copy_value, read_string, read_value
from .reader import Malformed, Parse, Reader

NAMES = ("name", "function", "tool_name")
ARGUMENTS = ("arguments", "parameters")


def read_call(
    reader: Reader, calls: CallWriter, check: Callable[[str], object] = str, *, opened: bool = False
) -> Parse[None]:
    """Read the object; its arguments are passed on as they arrive if the name stands before them.

    Arguments may also be null, or JSON within a string. Other keys, such as "type" or "id", are
    skipped. A "function" object inside, as OpenAI's API has it, is read as the call.

    Args:
        reader: the next character begins the object.
        calls: receives the call.
        check: called with the name; raises Malformed for a name that cannot be meant.
        opened: the object's first character has been read.
    """
    if not opened:
        yield from reader.expect("{")
    yield from _CallObject(reader, calls, check).read()


def read_arguments(reader: Reader, calls: CallWriter, name: str) -> Parse[None]:
    """Read the arguments of a call whose name came before them, and end the call."""
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        raise Malformed("the arguments are no object")
    calls.begin(name)
    yield from copy_value(reader, calls.arguments)
    calls.end()


class _CallObject:
    def __init__(self, reader: Reader, calls: CallWriter, check: Callable[[str], object]) -> None:
        self._reader, self._calls, self._check = reader, calls, check
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
        elif key in NAMES and first == '"' and not self._name:
            self._name = yield from read_string(self._reader)
            self._check(self._name)
        elif key in ARGUMENTS:
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
    value = json.loads(text)
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
